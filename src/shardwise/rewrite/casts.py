"""Casts: which dtypes hold every value of which."""

from collections.abc import Sequence

from shardwise.plan.dtypes import is_complex

__all__ = ["holds_nans", "keeps_values", "needed_casts"]

_FLOATS = {
    "float8_e8m0fnu": (8, 0),
    "float8_e4m3fn": (4, 3),
    "float8_e4m3fnuz": (4, 3),
    "float8_e5m2": (5, 2),
    "float8_e5m2fnuz": (5, 2),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float32": (8, 23),
    "float64": (11, 52),
}
"""Bits of exponent and mantissa."""

_INTEGERS = {
    "bool": (1, False),
    "uint8": (8, False),
    "uint16": (16, False),
    "uint32": (32, False),
    "uint64": (64, False),
    "int8": (8, True),
    "int16": (16, True),
    "int32": (32, True),
    "int64": (64, True),
}
"""Bits, and whether one of them is the sign."""

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

_WIDE = ("float16", "bfloat16", "float32", "float64")
"""Narrower floats differ among each other in range and in what infinity is: none is taken to hold another's values."""


def keeps_values(source: str, to: str) -> bool:
    """Whether a cast between these dtypes can be undone: every value but the payload of NaNs comes back as it was.

    A NaN stays one. Its payload (sign and mantissa) is what the cast makes it: many get the same.

    >>> keeps_values("bfloat16", "float32"), keeps_values("float32", "bfloat16"), keeps_values("float16", "bfloat16")
    (True, False, False)
    """
    if source == to:
        return True
    if is_complex(to):
        return keeps_values(_PARTS.get(source, source), _PARTS[to])
    if source in _FLOATS and to in _FLOATS:
        return to in _WIDE and all(mine <= theirs for mine, theirs in zip(_FLOATS[source], _FLOATS[to], strict=True))
    if source in _INTEGERS and to in _FLOATS:
        bits, signed = _INTEGERS[source]
        return to in _WIDE and bits - signed <= _FLOATS[to][1] + 1
    if source in _INTEGERS and to in _INTEGERS:
        (bits, signed), (more, signs) = _INTEGERS[source], _INTEGERS[to]
        return to != "bool" and (bits - signed <= more - signs) and (signs or not signed)
    return False


def needed_casts(dtypes: Sequence[str]) -> tuple[str, ...]:
    """The dtypes of a chain of casts without those in between that change no value; the first is that of the source.

    >>> needed_casts(("bfloat16", "float32", "float16")), needed_casts(("float32", "float16", "float32"))
    (('bfloat16', 'float16'), ('float32', 'float16', 'float32'))
    """
    kept = [dtypes[0]]
    for at, dtype in enumerate(dtypes[1:], 1):
        is_last = at == len(dtypes) - 1
        if dtype != kept[-1] and (is_last or not keeps_values(kept[-1], dtype)):
            kept.append(dtype)
    return tuple(kept)


def holds_nans(dtype: str) -> bool:
    """Whether elements of a dtype, or their parts, can be NaN."""
    return dtype in _FLOATS or is_complex(dtype)
