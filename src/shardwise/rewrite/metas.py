"""Metas: all that a rewrite knows of a tensor (shape, dtype, layout), and dtypes that hold all values of another."""

import math
import re
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, Protocol, TypeAlias

from shardwise.errors import RewriteError
from shardwise.plan.dtypes import ITEMSIZE_BYTES, is_complex


class TensorMeta(NamedTuple):
    """Shape, dtype and layout of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """By torch's name for it: "float32"."""
    degrees: tuple[int, ...] = ()
    """Into how many equal boxes tensor parallelism cuts each dim; 0 where something cuts it and it is not known what.

    () is not cut at all.
    """
    recorded: bool = False
    """Whether the elements are laid out for so many ranks, whatever cuts the tensor now: so its save says."""


class Shaped(Protocol):
    """A tensor of torch or numpy, a `StoredTensor`, a `TensorMeta`: this room imports none of their libraries."""

    @property
    def shape(self) -> Sequence[int]:
        """Its dims."""

    @property
    def dtype(self) -> object:
        """By its name ("float32"), or what torch has for it."""


TensorLike: TypeAlias = Shaped | Sequence[int] | tuple[object, ...]
"""Something with `shape` and `dtype`, a shape (its dtype is then "float32"), or a pair (shape, dtype).

A dict with shapes and pairs has tuples of objects for type checkers.
"""


def metas_of(tensors: Mapping[str, TensorLike], what: str = "tensors") -> dict[str, TensorMeta]:
    """Return the metas of tensors by name; `what` they are called in messages.

    See `TensorLike` for what a value may be. Raises RewriteError for anything else.

    >>> metas_of({"w": (2, 3), "b": ((3,), "bfloat16")})["b"]
    TensorMeta(shape=(3,), dtype='bfloat16', degrees=(), recorded=False)
    """
    if not isinstance(tensors, Mapping):
        raise RewriteError(f"{what} are a mapping of names to tensors or shapes, not {tensors!r:.100}")
    metas = {}
    problems = []
    # A large model has a few dozen shapes among 100,000 tensors, and each is checked once.
    good: set[TensorMeta] = set()  # few differ among many
    for name, value in tensors.items():
        try:
            meta = value if type(value) is TensorMeta else _meta_of(value)
            if meta not in good:
                _check(meta)
                good.add(meta)
        # All that is wrong comes out in one error, with the names.
        except (TypeError, ValueError) as error:
            problems.append(f"{name}: {error}")
            continue
        if not isinstance(name, str):
            problems.append(f"{name!r:.100} is no name of a tensor: names are text")
            continue
        metas[name] = meta
    if problems:
        raise RewriteError(*problems, about=what)
    return metas


def _meta_of(value: Any) -> TensorMeta:
    # Anything with a shape and a dtype passes. This room imports no torch, so it cannot ask for tensors.
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return TensorMeta(tuple(map(int, value.shape)), _dtype(value.dtype))
    match value:
        case (tuple() | list() as shape, dtype):
            return TensorMeta(_shape(shape, value), _dtype(dtype))
        case _:
            return TensorMeta(_shape(value, value), "float32")


def _shape(shape: Any, value: Any) -> tuple[int, ...]:
    try:
        return tuple(map(index, shape))
    except TypeError:
        raise TypeError(
            f"give a tensor, a shape such as (2, 3), or a pair (shape, dtype), not {value!r:.100}"
        ) from None


def _dtype(dtype: Any) -> str:
    """The name of a dtype, which may be one of torch's own."""
    return str(dtype).removeprefix("torch.")


def _check(meta: TensorMeta) -> None:
    """Raise ValueError for what no tensor has."""
    if any(size < 0 for size in meta.shape):
        raise ValueError(f"shape {list(meta.shape)} has a negative size")
    if meta.dtype not in ITEMSIZE_BYTES:
        raise ValueError(f"there is no dtype {meta.dtype!r:.100}; one is called as by torch, such as 'float32'")


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
    # Real into complex keeps the value where a real part of that dtype would.
    if is_complex(to):
        return keeps_values(_PARTS.get(source, source), _PARTS[to])
    # float16 has more mantissa and bfloat16 more exponent: neither holds the other. Both bits have to be enough.
    if source in _FLOATS and to in _FLOATS:
        return to in _WIDE and all(mine <= theirs for mine, theirs in zip(_FLOATS[source], _FLOATS[to], strict=True))
    if source in _INTEGERS and to in _FLOATS:
        # The mantissa has one leading bit that is not stored. So float32, with 23, counts exactly up to 2**24.
        bits, signed = _INTEGERS[source]
        return to in _WIDE and bits - signed <= _FLOATS[to][1] + 1
    if source in _INTEGERS and to in _INTEGERS:
        (bits, signed), (more, signs) = _INTEGERS[source], _INTEGERS[to]
        return to != "bool" and (bits - signed <= more - signs) and (signs or not signed)
    return False


def needed_casts(dtypes: Sequence[str]) -> tuple[str, ...]:
    """The dtypes of a chain of casts without those in between that change no value. The first is that of the source.

    >>> needed_casts(("bfloat16", "float32", "float16")), needed_casts(("float32", "float16", "float32"))
    (('bfloat16', 'float16'), ('float32', 'float16', 'float32'))
    """
    kept = [dtypes[0]]
    for at, dtype in enumerate(dtypes[1:], 1):
        is_last = at == len(dtypes) - 1
        # The last dtype is what is written and always counts. One before it counts only if it rounds: then the bits of
        # the result depend on it.
        if dtype != kept[-1] and (is_last or not keeps_values(kept[-1], dtype)):
            kept.append(dtype)
    return tuple(kept)


_NARROW_NUMBERS = {"float8_e8m0fnu": ("1",), "float4_e2m1fn_x2": ("0",)}
"""Of narrow floats without a 0 or a 1 those that they have; others have both."""


KEPT_FILL = "kept"
"""In the place of a number to pad with: what the target of a load has there."""


def number_text(text: str) -> str | None:
    """A number in its one spelling; None for what is no number.

    >>> number_text("-0x1"), number_text("1e-5"), number_text("3.0"), number_text("-inf"), number_text("-0.0")
    (None, '1e-05', '3', '-inf', '-0.0')
    """
    if re.fullmatch(r"[-+]?[0-9]{1,19}", text):
        return str(int(text))
    if not re.fullmatch(
        r"[-+]?(?:inf|nan|(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:e[-+]?[0-9]{1,4})?)", text.lower()
    ):
        return None
    number = float(text)
    is_whole = number.is_integer() and abs(number) < 1e15 and str(number) != "-0.0"
    return str(int(number)) if is_whole else str(number)


def number_of(text: str) -> int | float:
    """The number that `number_text` wrote."""
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def holds_number(dtype: str, text: str) -> bool:
    """Whether a dtype has a number, or rounds it to one that is not infinite.

    >>> holds_number("int8", "-128"), holds_number("int8", "128"), holds_number("float16", "1e5")
    (True, False, False)
    """
    if text == KEPT_FILL:
        return True
    number = number_of(text)
    if dtype in _INTEGERS:
        bits, signed = _INTEGERS[dtype]
        return isinstance(number, int) and -(1 << bits - 1) * signed <= number < 1 << (bits - signed)
    dtype = _PARTS.get(dtype, dtype)
    if dtype not in _WIDE:
        return text in _NARROW_NUMBERS.get(dtype, ("0", "1"))
    exponent, mantissa = _FLOATS[dtype]
    largest = (2 - 2.0**-mantissa) * 2.0 ** ((1 << exponent - 1) - 1)
    return not math.isfinite(number) or abs(number) <= largest


def holds_nans(dtype: str) -> bool:
    """Whether elements of a dtype, or their parts, can be NaN."""
    return dtype in _FLOATS or is_complex(dtype)
