"""Boxes against the list of their indices."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.space import Box
from shardwise.space.boxes import index_of_element, row_major_strides
from tests.space.plain import Shape, boxes_within, indices_of_box, proven, shapes


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    shape = draw(shapes())
    return draw(boxes_within(shape)), draw(boxes_within(shape))


@proven
@given(box_pairs())
def test_intersection_is_the_common_indices(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = sorted(set(indices_of_box(a)) & set(indices_of_box(b)))
    shared = a.intersect(b)
    assert (shared is None) == (not common)
    assert shared is None or indices_of_box(shared) == common
    assert shared == b.intersect(a)


@proven
@given(box_pairs())
def test_counts_ends_and_slices_agree_with_the_indices(pair: tuple[Box, Box]) -> None:
    box, _ = pair
    indices = indices_of_box(box)
    assert box.num_elements == len(indices)
    assert box.ndim == len(box.slices()) == len(box.stop)
    assert indices == list(product(*(range(stop)[part] for part, stop in zip(box.slices(), box.stop, strict=True))))


@proven
@given(box_pairs())
def test_relative_box_moves_every_index_by_the_origin(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    shared = outer.intersect(inner)
    if shared is not None:
        moved = shared.relative_to(outer.offset)
        back = [tuple(map(sum, zip(index, outer.offset, strict=True))) for index in indices_of_box(moved)]
        assert back == indices_of_box(shared)


@proven
@given(shapes())
def test_strides_and_indices_count_row_major(shape: Shape) -> None:
    indices = list(product(*map(range, shape)))
    assert [index_of_element(shape, element) for element in range(len(indices))] == indices
    strides = row_major_strides(shape)
    assert [sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices] == list(range(len(indices)))


def test_a_scalar_box_has_one_element_and_meets_itself() -> None:
    scalar = Box((), ())
    assert scalar.num_elements == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.slices() == ()


def test_a_box_is_a_value() -> None:
    assert {Box((0,), (2,)): "here"}[Box((0,), (2,))] == "here"
    with pytest.raises(AttributeError):
        Box((0,), (2,)).offset = (1,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("offset", "shape", "message"),
    [((0,), (1, 2), "one offset and one size per dim"), ((-1,), (2,), "negative"), ((0,), (-2,), "negative")],
)
def test_a_box_that_cannot_be_is_refused(offset: Shape, shape: Shape, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Box(offset, shape)


def test_boxes_of_different_ndim_do_not_meet() -> None:
    with pytest.raises(PlanError, match="same number of dims"):
        Box((0,), (2,)).intersect(Box((0, 0), (2, 2)))
    with pytest.raises(PlanError, match="has 1 dims"):
        Box((0,), (2,)).relative_to((0, 0))
    with pytest.raises(PlanError, match="negative"):
        Box((0,), (2,)).relative_to((1,))
