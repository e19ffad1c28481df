"""Dtypes by name: sizes and promotion, without torch."""

from collections.abc import Mapping
from types import MappingProxyType

ITEMSIZE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "float4_e2m1fn_x2": 1,  # two numbers in each element
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
    }
)
"""Bytes of one element."""

# 16, of complex128. A torch view needs an offset that is a multiple of its own itemsize, and every itemsize divides 16,
# so one alignment serves messages and files that hold stretches of several dtypes.
ALIGNMENT_BYTES = max(ITEMSIZE_BYTES.values())
"""Stretches of a message start at multiples of the widest element, so that they can be viewed in any dtype."""

CHECKPOINT_ONLY_DTYPES = frozenset(
    {
        "uint16",
        "uint32",
        "uint64",
        "float4_e2m1fn_x2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "complex32",
    }
)
"""Dtypes that a checkpoint can hold and a plan cannot: torch computes too little in them."""

COMPUTE_DTYPES = ("float16", "bfloat16", "float32", "float64")
"""The dtypes a plan may compute, keep masters, accumulate and reduce in."""


def itemsize_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`; raises KeyError for an unknown one."""
    return ITEMSIZE_BYTES[dtype]


def aligned(num_bytes: int) -> int:
    """The next multiple of the widest element."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_complex(dtype: str) -> bool:
    """Whether the elements are complex numbers."""
    return dtype.startswith("complex")


def promote(first: str, second: str) -> str:
    """The narrowest dtype that holds every value of both floating or complex dtypes (as `torch.promote_types`)."""
    if first == second:
        return first
    if is_complex(first) or is_complex(second):
        real = promote(_real(first), _real(second))
        return "complex128" if real == "float64" else "complex64"
    if itemsize_bytes(first) == itemsize_bytes(second):
        # float16 has more digits, bfloat16 the larger range: only a wider dtype holds the values of both.
        return "float32"
    return max(first, second, key=itemsize_bytes)


def _real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
