"""Boxes: n-d index regions, and the row-major order of their elements.

All of `space` is built on integers and tuples, without numpy or torch. One process plans for a thousand ranks, and
shapes may have any size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

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
