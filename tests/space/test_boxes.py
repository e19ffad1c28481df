"""Boxes against the list of their indices, runs against the range of their elements."""

import copy
import pickle
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import Box, Run
from tests.space.plain import boxes_within, indices_of_box, proven, runs_within, shapes


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    shape = draw(shapes())
    return draw(boxes_within(shape)), draw(boxes_within(shape))


@proven
@given(box_pairs())
def test_boxes_meet_move_and_count_as_their_indices_do(pair: tuple[Box, Box]) -> None:
    a, b = pair
    indices = indices_of_box(a)
    assert a.num_elements == len(indices)
    assert a.ndim == len(a.slices()) == len(a.stop)
    assert indices == list(product(*(range(stop)[part] for part, stop in zip(a.slices(), a.stop, strict=True))))
    common = sorted(set(indices) & set(indices_of_box(b)))
    shared = a.intersect(b)
    assert shared == b.intersect(a)
    assert (shared is None) == (not common)
    if shared is not None:
        assert indices_of_box(shared) == common
        moved = indices_of_box(shared.relative_to(a.offset))
        assert [tuple(map(sum, zip(index, a.offset, strict=True))) for index in moved] == common


def test_a_box_is_a_value() -> None:
    assert {Box((0,), (2,)): "here"}[Box((0,), (2,))] == "here"
    with pytest.raises(AttributeError):
        Box((0,), (2,)).offset = (1,)  # type: ignore[misc]


@proven
@given(runs_within(20), runs_within(20), st.integers(0, 9))
def test_runs_meet_and_move_as_ranges_do(a: Run, b: Run, by: int) -> None:
    common = sorted(set(range(*a)) & set(range(*b)))
    shared = a.intersect(b)
    assert (list(range(*shared)) if shared else []) == common
    assert a.num_elements == len(range(*a))
    assert list(range(*a.shift(by))) == [element + by for element in range(*a)]
    assert a.shift(by).shift(-by) == a


def test_a_run_is_the_tuple_of_its_bounds() -> None:
    run = Run(2, 5)
    assert run == (2, 5)
    assert hash(run) == hash((2, 5))
    assert repr(run) == str(run) == "(2, 5)"
    assert sorted([Run(3, 4), Run(0, 9)]) == [(0, 9), (3, 4)]
    assert type(pickle.loads(pickle.dumps(run))) is type(copy.deepcopy(run)) is Run
