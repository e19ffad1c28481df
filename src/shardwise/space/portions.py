"""Portions: what a rank along `tp` has of a tensor, as the local tensor with which it computes.

A local tensor is made of boxes of the global one. Most have one; packed projections have one per part:

    global   | gate 0 . . . | up 0 . . . . |        local, rank 0   | gate 0 . | up 0 . . |
             |   part 0       part 1       |                          first box   second box
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from shardwise.errors import PlanError
from shardwise.space.boxes import Box
from shardwise.space.moves import BlockPart
from shardwise.space.pieces import Piece, blocks_of


@dataclass(frozen=True, slots=True)
class Portion:
    """A local tensor: which boxes of a global tensor it is made of, side by side along one dim."""

    global_shape: tuple[int, ...]
    dim: int
    """The dim along which the global tensor is cut."""
    ranges: tuple[tuple[int, int], ...]
    """Indices of the global tensor along `dim`, from and to, in the order of the local tensor."""

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.global_shape):
            raise PlanError(f"a portion along dim {self.dim} of a tensor of shape {self.global_shape}, which has none")
        size = self.global_shape[self.dim]
        if wrong := [each for each in self.ranges if not 0 <= each[0] <= each[1] <= size]:
            raise PlanError(
                f"a portion has the indices {wrong[0]} along dim {self.dim}, but the tensor has 0 to {size}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        size = sum(stop - start for start, stop in self.ranges)
        return (*self.global_shape[: self.dim], size, *self.global_shape[self.dim + 1 :])

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """The parts: (box of the global tensor, box of the local tensor)."""
        starts = accumulate((stop - start for start, stop in self.ranges), initial=0)
        for (start, stop), at in zip(self.ranges, starts, strict=False):  # `starts` also holds the end
            shape = (*self.global_shape[: self.dim], stop - start, *self.global_shape[self.dim + 1 :])
            yield Box(self._offset(start), shape), Box(self._offset(at), shape)

    def pieces(
        self, name: str, dtype: str, run: tuple[int, int] | None = None
    ) -> Iterator[tuple[Piece, BlockPart | None]]:
        """The pieces that a run of the local tensor's elements has, all of them by default.

        With each comes the place of its elements in the storage of the run, as a box of a block. None means that they
        are all of the storage, in its order.
        """
        # One box is stored as one piece is, with or without a run. Several boxes are not: next to each other in the
        # local tensor, they are rows apart in its storage, and a piece per box says where each begins.
        if len(self.ranges) == 1:
            ((box, local),) = self.boxes()
            whole = run is None or run == (0, math.prod(local.shape))
            yield self._piece(name, dtype, box, None if whole else run), None
            return
        # The local tensor as if it were a whole one: its run as blocks, and what each box has of each block.
        held = Piece(name=name, dtype=dtype, global_shape=self.shape, run=run)
        for start, block, offset in blocks_of(held):
            for box, local in self.boxes():
                shared = local.intersect(Box(offset, block))
                if shared is not None and 0 not in shared.shape:
                    first = shared.relative_to(local.offset).offset
                    at = tuple(map(sum, zip(box.offset, first, strict=True)))
                    part = BlockPart(start, block, shared.relative_to(offset).offset)
                    yield self._piece(name, dtype, Box(at, shared.shape), None), part

    def _piece(self, name: str, dtype: str, box: Box, run: tuple[int, int] | None) -> Piece:
        return Piece(
            name=name, dtype=dtype, global_shape=self.global_shape, offset=box.offset, shape=box.shape, run=run
        )

    def _offset(self, index: int) -> tuple[int, ...]:
        return tuple(index if dim == self.dim else 0 for dim in range(len(self.global_shape)))


def even_cuts(size: int, count: int, *, unit: int = 1) -> Sequence[tuple[int, int]]:
    """Cut `size` indices into `count` ranges of whole units, as equal as can be, larger ones first.

    Raises PlanError for a size that is not a whole number of units.
    """
    # Units are heads or groups of them, which no rank can compute in part.
    units, rest = divmod(size, unit)
    if rest:
        raise PlanError(f"{size} indices are asked to be cut in units of {unit}, which does not divide them")
    lengths = [(units // count + (at < units % count)) * unit for at in range(count)]
    return list(pairwise(accumulate(lengths, initial=0)))
