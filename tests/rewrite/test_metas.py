"""Dtypes and numbers: which casts keep all values, and what a dtype can be filled with, by numpy and torch."""

import math

import numpy as np
import pytest
import torch

from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite.metas import holds_number, keeps_values, number_of, number_text

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


def test_dtypes_that_numpy_does_not_have_are_held_part_by_part() -> None:
    held = {("bfloat16", "float32"), ("complex64", "complex128"), ("float32", "complex64")}
    held |= {(dtype, dtype) for dtype in ITEMSIZE_BYTES}
    lost = {("float16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float16")}
    lost |= {("float64", "complex64"), ("complex64", "float64")}
    assert {pair for pair in held | lost if keeps_values(*pair)} == held


NUMBERS = ("0", "1", "-1", "127", "-128", "128", "255", "256", "0.5", "65504", "65520", "1e+38", "1e+39", "-inf", "nan")


@pytest.mark.parametrize("dtype", [each for each in ITEMSIZE_BYTES if not each.startswith(("float4", "complex"))])
def test_a_dtype_is_filled_with_what_torch_makes_of_it(dtype: str) -> None:
    kind = getattr(torch, dtype)
    for text in NUMBERS:
        number = number_of(text)
        try:
            made = torch.tensor(number, dtype=kind).to(torch.float64).item()
        except (RuntimeError, OverflowError, ValueError, TypeError):
            made = None
        fits = made is not None and math.isnan(number) == math.isnan(made) and math.isinf(number) == math.isinf(made)
        # Integers are not rounded, and of the narrowest floats only 0 and 1 are asked for.
        if not kind.is_floating_point or dtype.startswith("float8"):
            fits = fits and made == number and (kind.itemsize > 1 or not kind.is_floating_point or text in ("0", "1"))
        assert holds_number(dtype, text) == fits, (dtype, text, made)


def test_numbers_have_one_spelling() -> None:
    for text, expected in {"3": "3", "+3": "3", "3.0": "3", "1e-5": "1e-05", "-.5": "-0.5", "-0.0": "-0.0"}.items():
        assert number_text(text) == expected
        assert number_text(expected) == expected
    for text in ("", "x", "0x10", "1_000", "1e99999", "infinity", "--1", "1.2.3"):
        assert number_text(text) is None
