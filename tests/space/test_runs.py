"""Runs against the range of their elements; runs and boxes against each other."""

import copy
import math
import pickle

from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import Box, Run, boxes_of_run
from tests.space.plain import Shape, elements_of_box, proven, runs_within, shapes


@st.composite
def shapes_and_runs(draw: st.DrawFn) -> tuple[Shape, Run]:
    shape = draw(shapes())
    return shape, draw(runs_within(math.prod(shape)))


@proven
@given(shapes_and_runs())
def test_boxes_of_a_run_laid_one_after_the_other_are_the_run(case: tuple[Shape, Run]) -> None:
    shape, run = case
    boxes = boxes_of_run(shape, run)
    elements = [element for box in boxes for element in elements_of_box(shape, box)]
    assert elements == list(range(run.start, run.stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.num_elements for box in boxes)


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


def test_runs_of_scalars_and_empty_tensors_become_boxes() -> None:
    assert boxes_of_run((), Run(0, 1)) == (Box((), ()),)
    assert boxes_of_run((), Run(1, 1)) == ()
    assert boxes_of_run((3, 0), Run(0, 0)) == ()


def test_work_does_not_grow_with_the_number_of_elements() -> None:
    shape = (10**9, 10**9, 10**9)
    boxes = boxes_of_run(shape, Run(1, 10**27 - 1))
    assert len(boxes) == 5
    assert sum(box.num_elements for box in boxes) == 10**27 - 2
