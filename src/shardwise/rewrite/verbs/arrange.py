"""Arrange: what all come down to that join, part or interleave tensors along a dim."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.operation import Operation, Work

AxisSlice: TypeAlias = tuple[int, int, int]
"""Which tensor; from which index along the axis; to which (exclusive)."""


# Figure 1. `qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2` for heads of one element: one tensor of
# size 8 in, three out. Each row of the table is a result; (0, 4, 6) are indices 4 and 5 of tensor 0::
#
#     qkv   0  1  2  3  4  5  6  7        table = (((0, 0, 2), (0, 4, 6)),      q
#           q  q  k  v  q  q  k  v                 ((0, 2, 3), (0, 6, 7)),      k
#                                                  ((0, 3, 4), (0, 7, 8)))      v
#
# Back, the table has one row of six slices: in the order of qkv, which result has each, and where.
@dataclass(frozen=True, slots=True)
class Arrange:
    """Result j consists of the slices `table[j]`, one after the other along `axis`. Each index is used once."""

    axis: int
    sizes: tuple[int, ...]
    """Of the tensors, along the axis."""
    table: tuple[tuple[AxisSlice, ...], ...]

    @property
    def made_sizes(self) -> tuple[int, ...]:
        """Of the results, along the axis."""
        return tuple([sum([stop - start for _, start, stop in row]) for row in self.table])

    def undone(self) -> "Arrange":
        """Where each slice went, in the order in which the tensors have them."""
        # For each tensor: the index of each of its slices, and where that slice went.
        went: list[list[tuple[int, AxisSlice]]] = [[] for _ in self.sizes]
        for result, row in enumerate(self.table):
            at = 0
            for tensor, start, stop in row:
                went[tensor].append((start, (result, at, at + stop - start)))
                at += stop - start
        # In the order of the tensor's own indices, whatever order the results took them in.
        table = tuple([tuple([each for _, each in sorted(slices)]) for slices in went])
        back = Arrange(self.axis, self.made_sizes, table)
        # An index that no result takes could not be given back, and would vanish without a word.
        assert back.made_sizes == self.sizes, "an arrangement uses every index once"
        return back

    def applied(self, values: Sequence[ViewedTensor]) -> list[ViewedTensor]:
        """Each result, made of its slices."""
        return [self._made(values, row) for row in self.table]

    def _made(self, values: Sequence[ViewedTensor], row: tuple[AxisSlice, ...]) -> ViewedTensor:
        parts = [
            # A slice of all is the tensor itself, with its views as they are.
            values[tensor] if stop - start == self.sizes[tensor] else values[tensor].crop(self.axis, start, stop)
            for tensor, start, stop in row
        ]
        return parts[0] if len(parts) == 1 else ViewedTensor.concat(parts, self.axis)


def fuse(axis: int, sizes: Sequence[int], parts: int) -> Arrange:
    """Return what joins tensors of these sizes to one: part after part, each with its share of each tensor.

    `parts` divides all sizes.

    >>> fuse(0, (4, 2), 2).table
    (((0, 0, 2), (1, 0, 1), (0, 2, 4), (1, 1, 2)),)
    """
    if parts <= 1:
        return Arrange(axis, tuple(sizes), (tuple([(tensor, 0, size) for tensor, size in enumerate(sizes)]),))
    row = [
        # Part outside, tensor inside: q0 k0 v0 q1 k1 v1. This order is the whole difference to a concatenation.
        (tensor, part * size // parts, (part + 1) * size // parts)
        for part in range(parts)
        for tensor, size in enumerate(sizes)
    ]
    return Arrange(axis, tuple(sizes), (tuple(row),))


def unfuse(axis: int, sizes: Sequence[int], parts: int) -> Arrange:
    """Return what makes tensors of these sizes of the one that `fuse` makes of them."""
    # The inverse of the other direction, so that the two cannot come to disagree.
    return fuse(axis, sizes, parts).undone()


def arrange(work: Work, steps: Sequence[Arrange], back: Operation) -> None:
    """Arrange what is worked on; the tensors were found to be alike."""
    first, axis = work.metas[0], steps[-1].axis
    shapes = [(*first.shape[:axis], size, *first.shape[axis + 1 :]) for size in steps[-1].made_sizes]
    work.make(steps, [first._replace(shape=shape) for shape in shapes], back)
