"""Stretches of moves, against moving element by element."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.space import Piece, moves
from shardwise.space.moves import Move, stretch_of
from tests.space.plain import pieces_of, proven, shapes
from tests.space.test_moves import places


def pairs(move: Move) -> list[tuple[int, int]]:
    return list(zip(places(move.source, move.shape), places(move.target, move.shape), strict=True))


@proven
@given(shapes().flatmap(lambda shape: st.tuples(pieces_of(shape), pieces_of(shape))), st.data())
def test_a_stretch_is_the_same_elements_in_the_same_order(pieces: tuple[Piece, Piece], data: st.DataObject) -> None:
    found = moves(*pieces)
    every = [pair for move in found for pair in pairs(move)]
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    stretch = list(stretch_of(found, start, stop))
    assert [pair for move in stretch for pair in pairs(move)] == every[start:stop]
    assert all(move.num_elements for move in stretch)
    assert len(stretch) <= len(found) + 4 * len(pieces[0].global_shape)
