"""Runs: half-open ranges of row-major elements, and how they and boxes become each other."""

import math
from typing import NamedTuple

from shardwise.errors import PlanError
from shardwise.space.boxes import Box, index_of_element, row_major_strides


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
