"""What is left of a box, against sets of indices."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import Box
from tests.space.plain import boxes_within, indices_of_box, proven, shapes


@proven
@given(shapes().flatmap(lambda shape: st.tuples(boxes_within(shape), boxes_within(shape))))
def test_a_remainder_has_what_was_not_taken_each_index_once_in_few_boxes(pair: tuple[Box, Box]) -> None:
    box, taken = pair
    left = list(box.minus(taken))
    indices = [index for each in left for index in indices_of_box(each)]
    assert sorted(indices) == sorted(set(indices_of_box(box)) - set(indices_of_box(taken)))
    assert len(left) <= max(1, 2 * box.ndim)


def test_scalars() -> None:
    assert list(Box((), ()).minus(Box((), ()))) == []
