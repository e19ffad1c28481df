"""Pieces: the pure description of what one holder has of one tensor, and whether pieces make it up."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add

from shardwise.errors import PlanError
from shardwise.space.boxes import Box, Run, boxes_of_run, index_of_element


@dataclass(frozen=True, slots=True, init=False)
class Piece:
    """A box of the tensor `name`, or a run of that box's row-major elements.

    The holder stores the elements of a piece row-major, one after the other. A piece may have no elements. Two pieces
    are equal when they are described alike. Raises `PlanError`, with every problem in it, when the box is not inside
    the tensor or the run not inside the box.

    >>> piece = Piece(name="w", dtype="float32", global_shape=(4, 8), offset=(2, 0), shape=(2, 8), run=(3, 12))
    >>> piece.boxes()
    (Box(offset=(2, 3), shape=(1, 5)), Box(offset=(3, 0), shape=(1, 4)))
    """

    name: str
    """The tensor's name."""
    dtype: str
    """The tensor's dtype, by torch's name for it: "float32"."""
    global_shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where the box starts; zeros when not given."""
    shape: tuple[int, ...]
    """The shape of the box; the global shape when not given."""
    run: Run | None
    """The row-major elements of the box that the piece has; None is all of them."""

    def __init__(
        self,
        *,
        name: str,
        dtype: str,
        global_shape: Sequence[int],
        offset: Sequence[int] | None = None,
        shape: Sequence[int] | None = None,
        run: tuple[int, int] | None = None,
    ) -> None:
        # An own `__init__` for a frozen class: callers give lists and leave out what is the whole tensor, and equal
        # pieces must compare and hash alike, since state is `{piece: tensor}`.
        put = object.__setattr__
        put(self, "name", name)
        put(self, "dtype", dtype)
        put(self, "global_shape", tuple(global_shape))
        put(self, "offset", (0,) * len(global_shape) if offset is None else tuple(offset))
        put(self, "shape", self.global_shape if shape is None else tuple(shape))
        put(self, "run", run if run is None or isinstance(run, Run) else Run(*run))
        problems = self._problems()
        if problems:
            raise PlanError(*problems)

    def _problems(self) -> list[str]:
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            return [
                f"piece of {self.name}: global shape {self.global_shape}, offset {self.offset} and shape {self.shape} "
                "differ in number of dims"
            ]
        problems = [
            f"piece of {self.name}: dim {dim} holds indices {start} to {start + size}, but the tensor has 0 to {whole}"
            for dim, (start, size, whole) in enumerate(zip(self.offset, self.shape, self.global_shape, strict=True))
            if not 0 <= start <= start + size <= whole
        ]
        if not problems and self.run is not None and self.run.stop > math.prod(self.shape):
            problems.append(
                f"piece of {self.name}: run {self.run} is not inside its box of shape {self.shape}, which has "
                f"{math.prod(self.shape)} elements"
            )
        return problems

    @property
    def box(self) -> Box:
        """The box, in coordinates of the tensor."""
        return Box(self.offset, self.shape)

    @property
    def elements(self) -> Run:
        """The row-major elements of the box that the piece has."""
        return Run(0, math.prod(self.shape)) if self.run is None else self.run

    @property
    def num_elements(self) -> int:
        """Number of elements that the piece has."""
        return math.prod(self.shape) if self.run is None else self.run.num_elements

    @property
    def whole(self) -> bool:
        """Whether the piece has every element of the tensor."""
        return self.num_elements == math.prod(self.global_shape)

    def within(self, start: int, stop: int) -> "Piece":
        """Return the run from `start` to `stop` of the same box."""
        # Counted in the box, not in the run of this piece.
        return replace(self, run=Run(start, stop))

    def boxes(self) -> tuple[Box, ...]:
        """Return the disjoint boxes, in coordinates of the tensor, that have exactly the piece's elements, in order."""
        return tuple(Box(offset, shape) for _, shape, offset in blocks_of(self) if 0 not in shape)

    def __str__(self) -> str:
        box = ", ".join(f"{start}:{start + size}" for start, size in zip(self.offset, self.shape, strict=True))
        return f"{self.name}[{box}]" + ("" if self.run is None else f" run {self.run.start}:{self.run.stop}")


def known_part(tensor: Piece, offset: tuple[int, ...], shape: tuple[int, ...], run: Run | None) -> Piece:
    """Return a piece of the tensor of another piece, without a check: it is known to be one."""
    return known_piece(tensor.name, tensor.dtype, tensor.global_shape, offset, shape, run)


def known_piece(
    name: str,
    dtype: str,
    global_shape: tuple[int, ...],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    run: Run | None,
) -> Piece:
    """Return a piece without a check: it is known to be one."""
    # There may be a million of them, and to check each takes six times as long as to make it.
    piece = object.__new__(Piece)
    put = object.__setattr__
    put(piece, "name", name)
    put(piece, "dtype", dtype)
    put(piece, "global_shape", global_shape)
    put(piece, "offset", offset)
    put(piece, "shape", shape)
    put(piece, "run", run)
    return piece


def tensor_of(piece: Piece) -> Piece:
    """The whole tensor of a piece, as one."""
    shape = piece.global_shape
    return known_piece(piece.name, piece.dtype, shape, (0,) * len(shape), shape, None)


Block = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Where in the storage a block begins, its shape, and its first index in the tensor."""


def blocks_of(piece: Piece) -> list[Block]:
    """The boxes of a piece, each a stretch of its storage, in order."""
    if piece.run is None:
        return [(0, piece.shape, piece.offset)]
    blocks = []
    start = 0
    for box in boxes_of_run(piece.shape, piece.run):
        blocks.append((start, box.shape, tuple(map(add, box.offset, piece.offset))))
        start += math.prod(box.shape)
    return blocks


def reach(piece: Piece) -> tuple[int, int]:
    """Return the shortest run of the tensor, as (start, stop), that holds the piece; (0, 0) if it has no elements.

    The piece is one stretch of the tensor exactly when this run has as many elements as the piece.
    """
    if piece.run is None:
        if 0 in piece.shape:
            return 0, 0
        first = last = 0
        for whole, start, size in zip(piece.global_shape, piece.offset, piece.shape, strict=True):
            first = first * whole + start
            last = last * whole + start + size - 1
        return first, last + 1
    first_left, stop = piece.run
    if first_left == stop:
        return 0, 0
    if piece.shape == piece.global_shape:
        return first_left, stop
    # From the last dim: the indices of the run's first and last element in the box, moved to the tensor, and made flat
    # again with its strides. Row-major order in the box is row-major order in the tensor, so these are the ends.
    last_left = stop - 1
    first = last = 0
    stride = 1
    for whole, start, size in zip(piece.global_shape[::-1], piece.offset[::-1], piece.shape[::-1], strict=True):
        first_left, index = divmod(first_left, size)
        first += (start + index) * stride
        last_left, index = divmod(last_left, size)
        last += (start + index) * stride
        stride *= whole
    return first, last + 1


def taken_in_order(target: Piece, pieces: Iterable[Piece]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Take every element of `target` from the first of the pieces that has it.

    Returns the boxes that were taken, each with the position of its piece, and the boxes that no piece has. A box that
    is taken is within one box of either piece. The names of the pieces do not matter.
    """
    # The order of the pieces decides who gives: a caller that wants few sources, or near ones, orders them so.
    taken: list[tuple[int, Box]] = []
    left = list(target.boxes())
    for at, piece in enumerate(pieces):
        # `left` shrinks with every box, so that an element that two pieces have is taken once.
        for box in piece.boxes():
            taken += [(at, shared) for each in left if (shared := each.intersect(box)) is not None]
            left = [rest for each in left for rest in each.minus(box)]
    return taken, left


def check_cover(pieces: Iterable[Piece]) -> list[str]:
    """Return what keeps the pieces from covering every element of every tensor exactly once; empty when they do.

    A finding names the tensor, the number of elements that are missing or held more than once, and the first index. For
    elements held more than once it names two pieces. Pieces are grouped by name; give replicas once.
    """
    tensors: dict[str, list[Piece]] = {}
    for piece in pieces:
        tensors.setdefault(piece.name, []).append(piece)
    return [finding for held in tensors.values() for finding in _cover_findings(held)]


def _cover_findings(held: Sequence[Piece]) -> list[str]:
    name, shape = held[0].name, held[0].global_shape
    # Without one shape there is no grid to cover.
    kinds = dict.fromkeys((piece.dtype, piece.global_shape) for piece in held)
    if len(kinds) > 1:
        tensors = ", ".join(f"{dtype} {shape}" for dtype, shape in kinds)
        return [f"{name}: its pieces are of different tensors: {tensors}"]
    grid, regions = _regions(held)
    missing = doubled = 0
    findings: dict[str, str] = {}
    for corner, num_elements, holders in _faults(grid, regions, 0):
        index = corner if grid == shape else index_of_element(shape, corner[0])
        if holders:
            doubled += num_elements
            pair = " and ".join(str(held[holder]) for holder in sorted(holders)[:2])
            findings.setdefault("doubled", f"are held more than once, first {index}, by {pair}")
        else:
            missing += num_elements
            findings.setdefault("missing", f"are held by no piece, first {index}")
    counts = {"missing": missing, "doubled": doubled}
    return [f"{name}: {counts[kind]} of {math.prod(shape)} elements {text}" for kind, text in sorted(findings.items())]


_Region = tuple[tuple[int, ...], tuple[int, ...], int]
"""The first index and the index after the last of a box, and which piece has it."""


def _regions(held: Sequence[Piece]) -> tuple[tuple[int, ...], list[_Region]]:
    """Return the tensor's shape and the boxes of its pieces, flattened to one dim where each piece is one run."""
    # Flat where each piece is one run of the tensor, as row shards and runs are: then the sweep has one dim, and one
    # region per piece.
    shape = held[0].global_shape
    reaches = [reach(piece) for piece in held]
    if any(stop - start != piece.num_elements for (start, stop), piece in zip(reaches, held, strict=True)):
        return shape, [(box.offset, box.stop, holder) for holder, piece in enumerate(held) for box in piece.boxes()]
    flat: list[_Region] = [((start,), (stop,), holder) for holder, (start, stop) in enumerate(reaches) if start < stop]
    return (math.prod(shape),), flat


def _faults(
    shape: tuple[int, ...], regions: list[_Region], dim: int
) -> Iterator[tuple[tuple[int, ...], int, list[int]]]:
    """Find the parts of a tensor that not exactly one region has: (first index, number of elements, who has them).

    The dims before `dim` are settled: the regions given are those that have the index there. The borders of the
    regions cut `dim` into slabs, and within a slab the same regions go on to the next dim. The first part of a kind
    (held by none, held by several) has the first index of that kind.

    Two regions A (rows 0 and 1, all columns) and B (rows 1 to 3, columns 0 and 1) of 4 x 4, dim 0 first::

        A A A A    slab 0 to 1: {A}      dim 1: 0 to 4 {A}                            right
        * * A A    slab 1 to 2: {A, B}   dim 1: 0 to 2 {A, B}, 2 to 4 {A}             2 held twice, first (1, 0)
        B B . .    slab 2 to 4: {B}      dim 1: 0 to 2 {B}, 2 to 4 {}                 2 x 2 missing, first (2, 2)
        B B . .
    """
    if dim == len(shape):
        if len(regions) != 1:
            yield (), 1, [holder for _, _, holder in regions]
        return
    # A sweep along the dim: regions begin (`waiting`, next one last) and end (`active`) at borders, never between them.
    waiting = sorted(regions, key=lambda region: region[0][dim], reverse=True)
    borders = {0, shape[dim]}
    for start, stop, _ in regions:
        borders |= {start[dim], stop[dim]}
    active: list[_Region] = []
    for low, high in pairwise(sorted(borders)):
        active = [region for region in active if region[1][dim] > low]
        while waiting and waiting[-1][0][dim] == low:
            active.append(waiting.pop())
        for corner, num_elements, holders in _faults(shape, active, dim + 1):
            yield (low, *corner), num_elements * (high - low), holders
