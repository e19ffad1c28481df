"""Casts that can be undone: numpy's values of every narrow dtype come back, or some do not."""

import numpy as np
import pytest

from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite.metas import keeps_values

KNOWN = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)


def _telling(dtype: str) -> np.ndarray:
    """All values of a narrow dtype; of a wide one the extremes and what needs every bit."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return np.array([False, True])
    if kind.itemsize <= 2:
        values = np.arange(1 << (8 * kind.itemsize), dtype=np.uint64).astype(f"uint{8 * kind.itemsize}").view(kind)
        return values[~np.isnan(values)] if kind.kind == "f" else values
    if kind.kind == "f":
        info = np.finfo(kind)
        return np.array([0, 1 + info.eps, info.max, info.tiny, info.smallest_subnormal, -info.max], dtype=kind)
    limits = np.iinfo(kind)
    return np.array([limits.min, limits.max, limits.max - 1, limits.max // 2], dtype=kind)


@pytest.mark.parametrize("source", KNOWN)
@pytest.mark.parametrize("to", KNOWN)
def test_a_cast_keeps_values_when_all_come_back(source: str, to: str) -> None:
    values = _telling(source)
    with np.errstate(all="ignore"):
        there = values.astype(to)
        back = there.astype(source)
    # Equal after a round trip, and equal in between: a wrapped integer comes back and yet is another number.
    same = bool((back == values).all()) and all(
        int(a) == int(b) for a, b in zip(values, there, strict=True) if _finite(a, b)
    )
    finite = bool(np.isfinite(there.astype(np.float64)).sum() == np.isfinite(values.astype(np.float64)).sum())
    assert keeps_values(source, to) == (same and finite)


def _finite(*numbers: np.generic) -> bool:
    return all(np.isfinite(np.float64(number)) for number in numbers)


def test_bfloat16_is_held_by_float32_and_holds_neither_float16_nor_float32() -> None:
    assert keeps_values("bfloat16", "float32")
    assert not keeps_values("float16", "bfloat16")
    assert not keeps_values("float32", "bfloat16")
    assert not keeps_values("bfloat16", "float16")


def test_complex_numbers_are_held_part_by_part() -> None:
    assert keeps_values("complex64", "complex128")
    assert keeps_values("float32", "complex64")
    assert not keeps_values("float64", "complex64")
    assert not keeps_values("complex64", "float64")


def test_every_dtype_holds_its_own_values() -> None:
    assert all(keeps_values(dtype, dtype) for dtype in ITEMSIZE_BYTES)
