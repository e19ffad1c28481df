"""Padding and crops: the table, the ways back, and the numbers that a dtype can be filled with."""

import math

import pytest
import torch

from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.rewrite import Rewrite
from shardwise.rewrite.metas import holds_number, number_of, number_text
from tests.rewrite.filling import assert_same, proved, resolved
from tests.rewrite.oracle import Tensor, interpret, metas
from tests.rewrite.strategies import numbered

SOURCES = {"a": Tensor(numbered(1, (4, 3))), "b": Tensor(numbered(2, (2, 3)))}


def test_the_table_shows_padding_and_a_note_says_what_is_cropped() -> None:
    text = "a -> x, pad='[6,-1]', fill='-inf', dtype='bfloat16'; b -> y, crop='[-1,2]', fill=3"
    assert Rewrite(text).explain(metas(SOURCES)) == "\n".join(
        [
            "target  box         source  box         operations",
            "x       [0:4, 0:3]  a       [0:4, 0:3]  float32 -> bfloat16",
            "x       [4:6, 0:3]                      fill -inf, float32 -> bfloat16",
            "y       [0:2, 0:2]  b       [0:2, 0:2]",
            "note: line 1, `b -> y, crop='[-1,2]', fill=3`, crops b from [2, 3] to [2, 2]: the way back fills them "
            "with 3, whatever the elements were",
        ]
    )


@pytest.mark.parametrize(
    "text",
    [
        "a^T -> x, pad='[-1,7]', reshape='[21]'",
        "a -> t, pad='[6,-1]', fill=5; t, b -> x, axis=0, permute='[]'",
        "a -> t, pad='[6,4]', fill='0.3'; t -> x, y, axis=0",
        "a, b -> x, axis=0, pad='[8,3]', fill=1",
        "a, b -> x, pad='[4,5]', stack=1",
        "a -> t, pad='[8,-1]', fill=2; t -> x, crop='[6,-1]', fill=2",
    ],
)
def test_padded_tensors_are_what_the_oracle_makes_and_come_back(text: str) -> None:
    text = text.replace("; ", "\n")
    assert proved(text, SOURCES)
    inverse = Rewrite(text).inverse().check(metas(interpret(text, SOURCES)), metas(SOURCES))
    assert_same(resolved(inverse, interpret(text, SOURCES), {}), SOURCES)


def test_what_was_cropped_comes_back_as_the_fill_says() -> None:
    text = "a -> x, crop='[3,2]', fill=9\nb -> y, pad='[5,-1]', fill=9"
    outputs = interpret(text, SOURCES)
    expected = {"b": SOURCES["b"], "a": Tensor(SOURCES["a"].values.copy())}
    expected["a"].values[3:], expected["a"].values[:, 2:] = 9, 9
    forward = Rewrite(text)
    checked = forward.check(metas(SOURCES))
    assert checked.invertible
    assert str(checked.inverse()) == "y -> b, crop='[2,3]', fill=9\nx -> a, pad='[4,3]', fill=9"
    for inverse in (checked.inverse(), forward.inverse(), Rewrite(str(checked.inverse()))):
        assert_same(resolved(inverse.check(metas(outputs), metas(SOURCES)), outputs, {}), expected)
    assert str(forward.inverse()) == "y -> b, crop=recorded, fill=9\nx -> a, pad=recorded, fill=9"
    assert forward.inverse().inverse() == forward


def test_a_crop_and_a_pad_in_turn_are_not_taken_for_nothing() -> None:
    """`apply_ops` hands the tensor itself back where an operation undoes the one before, and here it does not."""
    text = "a -> t, crop='[2,-1]', fill=0\nt -> x, pad='[4,-1]'"
    outputs = resolved(Rewrite(text).check(metas(SOURCES)), SOURCES, {})
    assert_same(outputs, interpret(text, SOURCES))
    assert not outputs["x"].values[2:].any()


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
