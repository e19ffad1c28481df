"""Boxes and runs: n-d index regions, half-open ranges of row-major elements, and how runs become boxes.

All of `space` is built on integers and tuples, without numpy or torch. One process plans for a thousand ranks, and
shapes may have any size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.errors import PlanError


@dataclass(frozen=True, slots=True)
class Box:
    """The indices `offset[d] <= i[d] < offset[d] + shape[d]` of every dim d.

    A box of no dims is a scalar and has one element. A box with a dim of size 0 has none.
    Raises `PlanError` when offset and shape differ in length or hold a negative number.

    >>> Box((2, 0), (2, 8)).stop
    (4, 8)
    """

    offset: tuple[int, ...]
    """The first index, per dim."""
    shape: tuple[int, ...]
    """The number of indices, per dim."""

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise PlanError(f"a box has one offset and one size per dim, not offset {self.offset}, shape {self.shape}")
        if min(self.offset, default=0) < 0 or min(self.shape, default=0) < 0:
            raise PlanError(f"a box has no negative numbers, but got offset {self.offset}, shape {self.shape}")

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        """Number of indices in the box."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The index after the last, per dim."""
        return tuple(offset + size for offset, size in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """Return the box of the indices that both have; None when there are none."""
        if len(self.shape) != len(other.shape):
            raise PlanError(f"boxes of one tensor have the same number of dims, not {self} and {other}")
        # A scalar has no dims in which boxes could be apart: `default=1` below makes two scalars meet.
        low = tuple(map(max, self.offset, other.offset))
        shape = tuple(high - start for high, start in zip(map(min, self.stop, other.stop), low, strict=True))
        return None if min(shape, default=1) <= 0 else Box(low, shape)

    def minus(self, taken: "Box") -> "Iterator[Box]":
        """Return disjoint boxes of exactly the indices that `taken` does not have, at most two per dim.

        Dim by dim, what is before and after `taken` is cut off, and the rest is narrowed. Here with 4 x 4 indices::

            a a a a      a: dim 0, before            (nothing is after: `taken` goes on beyond the box)
            b . c c      b: dim 1, before, c: after
            b . c c
            b . c c

        >>> list(Box((0, 0), (4, 4)).minus(Box((1, 1), (9, 1))))  # doctest: +NORMALIZE_WHITESPACE
        [Box(offset=(0, 0), shape=(1, 4)), Box(offset=(1, 0), shape=(3, 1)), Box(offset=(1, 2), shape=(3, 2))]
        """
        shared = self.intersect(taken)
        if shared is None:
            yield self
            return
        start, stop = list(self.offset), list(self.stop)
        for dim, (low, high) in enumerate(zip(shared.offset, shared.stop, strict=True)):
            # The dims before are narrowed to what both have.
            for first, last in ((start[dim], low), (high, stop[dim])):
                if first < last:
                    offset, end = [*start[:dim], first, *start[dim + 1 :]], [*stop[:dim], last, *stop[dim + 1 :]]
                    yield Box(tuple(offset), tuple(b - a for a, b in zip(offset, end, strict=True)))
            start[dim], stop[dim] = low, high

    def relative_to(self, origin: tuple[int, ...]) -> "Box":
        """Return the same box in coordinates whose zero is `origin`; `PlanError` when it starts before the origin."""
        if len(origin) != self.ndim:
            raise PlanError(f"{self} has {self.ndim} dims, but origin {origin} has {len(origin)}")
        # `Box` itself refuses what would be negative.
        return Box(tuple(mine - zero for mine, zero in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return what selects this box from an array that starts at index 0 of every dim."""
        return tuple(map(slice, self.offset, self.stop))


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many elements one step of each dim passes.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    # From the last dim, whose neighbours are next to each other.
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def index_of_element(shape: tuple[int, ...], element: int) -> tuple[int, ...]:
    """Return the index of the row-major `element` of a tensor of `shape`.

    >>> index_of_element((2, 3, 4), 17)
    (1, 1, 1)
    """
    return tuple(element // stride % size for stride, size in zip(row_major_strides(shape), shape, strict=True))


class _Bounds(NamedTuple):
    start: int
    stop: int


class Run(_Bounds):
    """The row-major elements `start <= i < stop` of a tensor or of a box.

    A run is a tuple: it equals, hashes, sorts and prints as `(start, stop)`.
    """

    __slots__ = ()

    def __new__(cls, start: int, stop: int) -> "Run":
        """Raise `PlanError` unless 0 <= start <= stop."""
        if not 0 <= start <= stop:
            raise PlanError(f"a run has 0 <= start <= stop, not ({start}, {stop})")
        return tuple.__new__(cls, (start, stop))

    def __repr__(self) -> str:
        return f"({self.start}, {self.stop})"

    @property
    def num_elements(self) -> int:
        """Number of elements in the run."""
        return self.stop - self.start

    def intersect(self, other: "Run") -> "Run | None":
        """Return the elements that both have; None when there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Run(start, stop) if start < stop else None

    def shift(self, by: int) -> "Run":
        """Return the run `by` elements later (earlier when negative)."""
        return Run(self.start + by, self.stop + by)


def boxes_of_run(shape: tuple[int, ...], run: Run) -> tuple[Box, ...]:
    """Return the boxes that, one after the other, have exactly the elements of `run`, a run of a tensor of `shape`.

    Every box is itself a stretch of the run, and there are as few as that allows: at most `2 * len(shape) - 1`.
    Raises `PlanError` when the run is not inside the tensor.

    Figure 1. A run (the letters) of a tensor of shape (5, 6). The climb finishes the first row (a), whole rows follow
    in one step (b), and the descent takes the rest of the last row (c). With more dims the climb and the descent have
    one such step per dim::

        . . . . . .
        . . a a a a
        b b b b b b
        b b b b b b
        c c . . . .
    """
    start, stop = run
    num_elements = math.prod(shape)
    if stop > num_elements:
        raise PlanError(f"run {run} is not inside shape {shape}, which has {num_elements} elements")
    if start == stop:
        return ()
    if not shape:
        return (Box((), ()),)
    strides = row_major_strides(shape)

    def block(dim: int, first: int, end: int) -> Box:
        """The elements from first to end, which are in one row along `dim` and are whole steps of it."""
        steps = (end - first) // strides[dim]
        return Box(index_of_element(shape, first), (1,) * dim + (steps,) + shape[dim + 1 :])

    boxes = []
    dim = len(shape) - 1
    while dim > 0:  # climb, until the row along `dim` that holds `start` also holds `stop`
        row = strides[dim - 1]
        boundary = -(-start // row) * row  # where the next row begins
        if boundary > stop:
            break
        if start < boundary:
            boxes.append(block(dim, start, boundary))
            start = boundary
        dim -= 1
    while start < stop:  # descend
        end = stop - stop % strides[dim]
        if start < end:
            boxes.append(block(dim, start, end))
            start = end
        dim += 1
    return tuple(boxes)
