"""Moves: what two pieces of one tensor share, as a few strided copies between their storages, and who shares at all.

A piece is stored flat, and is some blocks: boxes of the tensor, one after the other in its storage (`blocks_of`). What
two pieces share is what each block of the one shares with each of the other. The run (3, 16) of a tensor of shape
(4, 5) is three blocks, and columns 1 and 2 are one::

    . . . 0 0     storage of the run:       | 0 0 | 1 1 1 1 1 1 1 1 1 1 | 2 |
    1 1 1 1 1     storage of the columns:   one block of shape (4, 2)
    1 1 1 1 1     block 1 and the columns:  rows 1 and 2, columns 1 and 2: one move of shape (2, 2)
    2 . . . .     blocks 0 and 2:           nothing in common with the columns

One move may be many rows: `overlap` and `runs_of` take moves apart into copies of bytes that are together in both
storages. A `PieceIndex` finds the pieces that share anything with a piece, among thousands.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import add, sub

from shardwise.errors import PlanError
from shardwise.space.boxes import Run, boxes_of_run, row_major_strides
from shardwise.space.pieces import Block, Piece, blocks_of, reach


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A box within a block: a stretch of a piece's storage, read as a row-major array of the shape `block`.

    A piece without a run is always one block: `start` is 0 and `block` the piece's shape. So the part, of a shape that
    its move says, is found in both forms of storage::

        box = tuple(slice(first, first + size) for first, size in zip(part.offset, move.shape))
        tensor[box]                                                          # of the piece's shape, any strides
        flat[part.start : part.start + prod(part.block)].view(part.block)[box]     # flat, of all its elements

    The first form is for pieces without a run only, the second for all.
    """

    start: int
    """The element of the storage with which the block begins."""
    block: tuple[int, ...]
    """Shape of the block."""
    offset: tuple[int, ...]
    """Where in the block the part begins, per dim."""

    @property
    def first(self) -> int:
        """The element of the storage with which the part begins."""
        first = 0
        for index, size in zip(self.offset, self.block, strict=True):
            first = first * size + index
        return self.start + first


@dataclass(frozen=True, slots=True)
class Move:
    """One copy: a box of a block of the source's storage becomes a box of a block of the target's."""

    shape: tuple[int, ...]
    """Of the box, the same in both. It has the dims of the tensor, or one dim where both sides are flat stretches."""
    source: BlockPart
    target: BlockPart

    @property
    def num_elements(self) -> int:
        """Number of elements that move."""
        return math.prod(self.shape)


def moves(source: Piece, target: Piece) -> list[Move]:
    """Return copies that bring every element which two pieces share from one storage to the other, each once.

    They are in the order of both storages. A box that both have is one move, where `overlap` has a pair per row. There
    are at most `(2 * ndim - 1) ** 2`. There is only one if no piece has a run, or if both are runs of one box or of the
    tensor.
    Raises `PlanError` for pieces of different tensors. The dtypes may differ.

    >>> columns = Piece(name="w", dtype="float32", global_shape=(4, 8), offset=(0, 6), shape=(4, 2))
    >>> moves(columns, Piece(name="w", dtype="float32", global_shape=(4, 8), run=(4, 32)))  # doctest: +ELLIPSIS
    [Move(shape=(1, 2), source=BlockPart(start=0, ...), target=BlockPart(start=0, block=(1, 4), ...)), Move(...)]
    """
    check_one_tensor(source, target)
    # Three short ways, each of one move: the same box, runs of the same box, and runs of the tensor itself. The general
    # way would cut the runs into blocks, and give one move per block.
    same_box = source.offset == target.offset and source.shape == target.shape
    if same_box and source.run == target.run is None:
        shape = source.shape
        if 0 in shape:
            return []
        part = BlockPart(0, shape, (0,) * len(shape))
        return [Move(shape, part, part)]
    if source.run is not None and target.run is not None:
        if same_box:
            return _flat_move(source.run, target.run)
        # A piece that has every element of its reach is a run of the tensor, whatever its box.
        a, b = reach(source), reach(target)
        if a[1] - a[0] == source.run.num_elements and b[1] - b[0] == target.run.num_elements:
            return _flat_move(a, b)
    return _block_moves(source, target)


def shared_elements(a: Piece, b: Piece) -> int:
    """How many elements two pieces of one tensor share. Raises `PlanError` for pieces of different tensors."""
    check_one_tensor(a, b)
    shared = 1
    for a_start, a_size, b_start, b_size in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        size = min(a_start + a_size, b_start + b_size) - max(a_start, b_start)
        if size <= 0:
            return 0
        shared *= size
    return shared if a.run is b.run is None else elements_in_both(blocks_of(a), blocks_of(b))


def elements_in_both(blocks: Iterable[Block], others: Sequence[Block]) -> int:
    """How many elements two pieces share, by their blocks. A caller with many pieces makes their blocks once."""
    # Blocks of one piece do not overlap, so that volumes may be added.
    shared = 0
    for _, shape, offset in blocks:
        stop = tuple(map(add, offset, shape))
        for _, other_shape, other_offset in others:
            volume = 1
            for size in map(sub, map(min, stop, map(add, other_offset, other_shape)), map(max, offset, other_offset)):
                if size <= 0:
                    break
                volume *= size
            else:
                shared += volume
    return shared


def overlap(a: Piece, b: Piece) -> Iterator[tuple[Run, Run]]:
    """Return the elements that two pieces of one tensor share, as runs of (the storage of `a`, the storage of `b`).

    Each pair is one copy of equally many elements that are together in both storages. Pairs are as long as possible and
    in order in both. The work grows with the number of pairs, and not with the tensor.
    Raises `PlanError` for pieces of different tensors. The dtypes may differ.
    """
    return runs_of(moves(a, b))


def elements_together(move: Move) -> int:
    """How many elements of a move are together in both storages."""
    # From the last dim: rows follow one another in storage as long as the box is as wide as both blocks.
    together = 1
    for size, source, target in zip(
        reversed(move.shape), reversed(move.source.block), reversed(move.target.block), strict=True
    ):
        together *= size
        if not size == source == target:
            break
    return together


def runs_of(moves: Iterable[Move]) -> Iterator[tuple[Run, Run]]:
    """Return what moves copy as runs of (the source's storage, the target's), as long as possible, in their order."""
    # One pair is held back: the next may go on where it ends, in both storages, also across moves.
    source = target = Run(0, 0)
    for move in moves:
        length = elements_together(move)
        for in_source, in_target in _rows(move, length):
            if (in_source, in_target) == (source.stop, target.stop):
                source, target = Run(source.start, in_source + length), Run(target.start, in_target + length)
                continue
            if source.num_elements:
                yield source, target
            source, target = Run(in_source, in_source + length), Run(in_target, in_target + length)
    if source.num_elements:
        yield source, target


def _rows(move: Move, length: int) -> Iterator[tuple[int, int]]:
    """Where in both storages each row of so many elements begins."""
    # Only the dims outside of a row have steps; those within it are one copy.
    steps = []
    left = move.num_elements // length
    strides = row_major_strides(move.source.block), row_major_strides(move.target.block)
    for size, source, target in zip(move.shape, *strides, strict=True):
        if left == 1:
            break
        steps.append([(at * source, at * target) for at in range(size)])
        left //= size
    for step in product(*steps):
        yield move.source.first + sum(each for each, _ in step), move.target.first + sum(each for _, each in step)


def moves_between(moves: Iterable[Move], start: int, stop: int) -> Iterator[Move]:
    """Return the moves of the elements `start` up to `stop`, counted row-major through one move after the other.

    A move that is cut becomes at most `2 * ndim - 1` moves. Elements keep their order.
    """
    # A part of a box is boxes again, which are offsets into the same blocks: nothing else of the move changes.
    passed = 0
    for move in moves:
        num_elements = move.num_elements
        low, high = max(start - passed, 0), min(stop - passed, num_elements)
        passed += num_elements
        if high - low == num_elements:
            yield move
        elif low < high:
            for box in boxes_of_run(move.shape, Run(low, high)):
                source, target = _within(move.source, box.offset), _within(move.target, box.offset)
                yield Move(box.shape, source, target)


def _within(part: BlockPart, offset: tuple[int, ...]) -> BlockPart:
    return replace(part, offset=tuple(map(add, part.offset, offset)))


def check_one_tensor(a: Piece, b: Piece) -> None:
    """Raise `PlanError` unless both are pieces of one tensor."""
    if a.name != b.name or a.global_shape != b.global_shape:
        raise PlanError(
            f"pieces of one tensor can overlap, but these are of {a.name} with shape {a.global_shape} "
            f"and {b.name} with shape {b.global_shape}"
        )


def _flat_move(source: tuple[int, int], target: tuple[int, int]) -> list[Move]:
    """The one move between two storages that are runs of one and the same sequence of elements."""
    start, stop = max(source[0], target[0]), min(source[1], target[1])
    if start >= stop:
        return []
    shape = (stop - start,)
    return [Move(shape, BlockPart(start - source[0], shape, (0,)), BlockPart(start - target[0], shape, (0,)))]


def _block_moves(source: Piece, target: Piece) -> list[Move]:
    """Intersect every block of the one with every block of the other.

    For all boxes, blocks follow one another in row-major order of the tensor's indices. So do their intersections: it
    is the order of both storages.
    """
    found = []
    sources = blocks_of(source)
    for target_start, target_block, target_offset in blocks_of(target):
        target_stop = tuple(map(add, target_offset, target_block))
        for source_start, source_block, source_offset in sources:
            low = tuple(map(max, source_offset, target_offset))
            shape = tuple(map(sub, map(min, map(add, source_offset, source_block), target_stop), low))
            if min(shape, default=1) > 0:
                source_part = BlockPart(source_start, source_block, tuple(map(sub, low, source_offset)))
                target_part = BlockPart(target_start, target_block, tuple(map(sub, low, target_offset)))
                found.append(Move(shape, source_part, target_part))
    return found


_FEW = 4
"""So many pieces are asked one by one: most tensors of a checkpoint have no more, and need no index."""


class PieceIndex:
    """Pieces of one tensor, ordered by where in the tensor they begin.

    The reach of a piece is the run from its first element to its last. A search looks only at pieces with a reach that
    meets the reach of the given piece. For runs of the tensor and blocks of rows these are the answer itself. Pieces
    side by side, such as columns, all reach over nearly the whole tensor and are tested one by one.
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
        # Sorted by start, so that starts end the search; stops need not rise, but the furthest stop so far does.
        #
        #     number          0   1   2   3      asked for 6 to 9:
        #     start           0   2   3   8      1 is the first whose furthest stop is beyond 6
        #     stop            4   7   5  12      3 is the last that starts before 9
        #     furthest stop   4   7   7  12      2 is between them, stops at 5, and is passed over
        start, stop = reach(piece)
        first = bisect_right(self._furthest_stops, start)
        last = bisect_left(self._starts, stop)
        flat = stop - start == piece.num_elements
        found = []
        for at in range(first, last):
            if self._stops[at] > start:
                position = self._positions[at]
                other = self._pieces[position]
                # Two runs of the tensor whose reaches meet share elements: nothing is left to compute.
                other_flat = flat and self._stops[at] - self._starts[at] == other.num_elements
                if other_flat or shared_elements(other, piece):
                    found.append(position)
        found.sort()
        return found
