"""Indexes: which of many pieces of one tensor meet a piece, without asking each of them."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from shardwise.space.moves import check_one_tensor, reach, shared_elements
from shardwise.space.pieces import Piece

__all__ = ["PieceIndex"]

_FEW = 4
"""So many pieces are asked one by one: most tensors of a checkpoint have no more, and need no index."""


class PieceIndex:
    """Pieces of one tensor, ordered by where in the tensor they begin.

    A search looks only at the pieces whose reach (the run from their first element to their last) meets the reach of
    the piece asked for. For runs of the tensor and blocks of rows these are the answer itself; pieces side by side,
    such as columns, all reach over nearly the whole tensor and are tested one by one.
    """

    __slots__ = ("_furthest_stops", "_pieces", "_positions", "_starts", "_stops")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        if len(pieces) <= _FEW:
            return
        reaches = [(*reach(piece), position) for position, piece in enumerate(pieces)]
        reaches = sorted(each for each in reaches if each[0] < each[1])  # pieces without elements meet nothing
        self._starts = [start for start, _, _ in reaches]
        self._stops = [stop for _, stop, _ in reaches]
        self._positions = [position for _, _, position in reaches]
        # Never falls, so that bisection finds the first place before which all pieces end too early.
        self._furthest_stops = list(accumulate(self._stops, max))

    def overlapping(self, piece: Piece) -> list[int]:
        """Return the positions of the pieces that share an element with `piece`, in increasing order.

        Raises `PlanError` when `piece` is of another tensor.
        """
        if self._pieces:
            check_one_tensor(self._pieces[0], piece)
        if len(self._pieces) <= _FEW:
            return [position for position, each in enumerate(self._pieces) if shared_elements(each, piece)]
        start, stop = reach(piece)
        first = bisect_right(self._furthest_stops, start)
        last = bisect_left(self._starts, stop)
        flat = stop - start == piece.num_elements
        found = []
        for at in range(first, last):
            if self._stops[at] > start:
                position = self._positions[at]
                other = self._pieces[position]
                other_flat = flat and self._stops[at] - self._starts[at] == other.num_elements
                if other_flat or shared_elements(other, piece):
                    found.append(position)
        found.sort()
        return found
