"""Elements: how two stretches of elements differ, bit for bit where they are of one dtype, else by value."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

ElementValue = int | float | complex | tuple[float, float]
"""The value of an element; a pair for float4_e2m1fn_x2, which has two in each."""

_CHUNK_ELEMENTS = 1 << 18
"""So many are looked at closely at a time, as double precision numbers."""

_NANS_AT_ONCE = 1 << 20
"""Elements among which NaNs are looked for at a time."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

_PAIRS = torch.float4_e2m1fn_x2
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """How two stretches differ."""

    num_different: int
    max_difference: float
    """The largest |a - b|; whole numbers exactly (as an int), NaN where one of them is NaN."""
    max_relative: float
    """The largest |a - b| / |a|; elements that are 0 in the one are left out."""
    first: int
    """The first element that differs."""
    a: ElementValue
    """It in the one, and in the other."""
    b: ElementValue
    a_shown: str
    b_shown: str


def compare(a: torch.Tensor, b: torch.Tensor) -> Elements | None:
    """How two flat stretches of equally many elements differ; None when they do not.

    Elements of one dtype are equal when all their bits are. NaN equals NaN of the same bits, and -0.0 is not 0.0,
    though their difference is 0. Elements of two dtypes are equal when their values are, NaN being equal to NaN. Whole
    numbers are compared exactly, unless one of them is of uint64, all others as double precision.
    """
    same = a.dtype == b.dtype
    # Most stretches are equal, and bits are compared many times faster than values are looked at.
    if same and torch.equal(_bits(a), _bits(b)):
        return None
    found: Elements | None = None
    for start in range(0, len(a), _CHUNK_ELEMENTS):
        here = _different(a[start : start + _CHUNK_ELEMENTS], b[start : start + _CHUNK_ELEMENTS])
        if not len(here):
            continue
        at = start + int(here[0])
        ours, theirs = _picked(a, here + start), _picked(b, here + start)
        a_shown, b_shown = shown(a[at : at + 1]), shown(b[at : at + 1])
        # Two NaNs with different bits print the same text: the bits tell them apart.
        if a_shown == b_shown and same:
            a_shown, b_shown = f"{a_shown} ({_hex(a, at)})", f"{b_shown} ({_hex(b, at)})"
        max_difference, max_relative = _largest_differences(ours, theirs)
        different = Elements(
            num_different=len(here),
            max_difference=max_difference,
            max_relative=max_relative,
            first=at,
            a=_value(a[at : at + 1]),
            b=_value(b[at : at + 1]),
            a_shown=a_shown,
            b_shown=b_shown,
        )
        found = different if found is None else joined(found, different)
    return found


def joined(before: Elements, after: Elements) -> Elements:
    """Those of two stretches that follow one another: the first difference is that of the earlier one."""
    return replace(
        before,
        num_different=before.num_different + after.num_different,
        max_difference=larger(before.max_difference, after.max_difference),
        max_relative=larger(before.max_relative, after.max_relative),
    )


def larger(a: float, b: float) -> float:
    """The larger of two differences; NaN is the largest."""
    return a if math.isnan(a) or (a >= b and not math.isnan(b)) else b


def shown(element: torch.Tensor) -> str:
    """The one element of a flat tensor, in as few digits as tell it from all others of its dtype.

    >>> shown(torch.tensor([0.1])), shown(torch.tensor([0.1]).double())
    ('0.1', '0.10000000149011612')
    """
    value = _value(element)
    if isinstance(value, tuple):
        return f"{value[0]:g}|{value[1]:g}"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, complex):
        parts = torch.view_as_real(_plain(element))
        return f"{shown(parts[0, :1])} + {shown(parts[0, 1:])}i"
    if element.dtype == torch.float32 or element.dtype == torch.float16:
        return str(element.numpy()[0])
    return repr(value) if element.dtype == torch.float64 else f"{value:.4g}"


def with_one_nan(elements: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bits of flat floats, or of the parts of complex numbers, with the same NaN for every NaN; some at a time."""
    for some in elements.split(_NANS_AT_ONCE):
        # A complex number has two floats, and each may be a NaN of its own.
        parts = some.view(_PARTS.get(some.dtype, some.dtype))
        bits = parts.view(_BITS[parts.itemsize])
        nan = torch.tensor([math.nan]).to(parts.dtype).view(bits.dtype)
        # torch cannot tell NaNs of every dtype; float32 keeps them NaN, and makes none of what is too large for it.
        yield bits.masked_fill(parts.to(torch.float32).isnan(), int(nan))


def _bits(elements: torch.Tensor) -> torch.Tensor:
    """The bits as whole numbers, one or two a row."""
    size = elements.element_size()
    return elements.view(torch.int64).view(-1, 2) if size == 16 else elements.view(_BITS[size])


def _hex(elements: torch.Tensor, at: int) -> str:
    data = bytes(_bits(elements[at : at + 1]).contiguous().view(torch.uint8).flatten().tolist())
    return f"0x{int.from_bytes(data, 'little'):0{2 * len(data)}x}"


def _different(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Positions of the elements that differ."""
    if a.dtype == b.dtype:
        differ = _bits(a) != _bits(b)
        return (differ.any(1) if differ.dim() == 2 else differ).nonzero().flatten()
    x, y = _alike(a, b)
    differ = x != y
    if not _is_whole(x):
        differ &= ~((x != x) & (y != y))
    return (differ.any(1) if differ.dim() == 2 else differ).nonzero().flatten()


def _picked(elements: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Some elements; torch cannot index every dtype."""
    return _bits(elements)[positions].contiguous().flatten().view(elements.dtype)


def _largest_differences(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The largest difference, and the largest in relation to an element of `a`."""
    x, y = _alike(a, b)
    if _is_whole(x):
        # The difference of two of 64 bits has one bit more than fits; without a sign it fits.
        one, other = x.numpy(), y.numpy()
        whole = (np.maximum(one, other) - np.minimum(one, other)).view(np.uint64)
        largest: float = int(whole.max())
        sizes, differences = (torch.from_numpy(np.abs(each.astype(np.float64))) for each in (one, whole))
    else:
        sizes, differences = x.abs(), (x - y).abs()
        largest = float(differences.max())
    relative = (differences / sizes)[sizes != 0]
    return largest, float(relative.max()) if len(relative) else 0.0


def _alike(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as numbers of one dtype: int64 or uint64 where both are whole, else float64 or complex128."""
    if a.dtype == b.dtype == torch.uint64:
        return a, b
    if _is_whole(a) and _is_whole(b) and torch.uint64 not in (a.dtype, b.dtype):
        return a.to(torch.int64), b.to(torch.int64)
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = _plain(a).to(wide), _plain(b).to(wide)
    if x.dim() != y.dim():  # a pair beside a number
        x, y = (each if each.dim() == 2 else each.unsqueeze(1) for each in (x, y))
    return x, y


def _is_whole(elements: torch.Tensor) -> bool:
    return not (elements.is_floating_point() or elements.is_complex() or elements.dtype == _PAIRS)


def _plain(elements: torch.Tensor) -> torch.Tensor:
    """In a dtype that torch converts: pairs become rows of two."""
    if elements.dtype == torch.complex32:
        return torch.view_as_complex(elements.view(torch.float16).view(-1, 2).float())
    if elements.dtype != _PAIRS:
        return elements
    data = elements.view(torch.uint8)
    table = torch.tensor(_FLOAT4, dtype=torch.float64)
    return table[torch.stack((data & 15, data >> 4), dim=1).long()]


def _value(element: torch.Tensor) -> ElementValue:
    if element.dtype == _PAIRS:
        low, high = _plain(element)[0].tolist()
        return low, high
    value: int | float | complex = _plain(element)[0].item()
    return value
