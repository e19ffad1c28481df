"""Degrees: into how many equal boxes the layouts of fused tensors cut them where an operation lays them out."""

from collections.abc import Sequence

from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.statements import Ffn, Operation, Permute, QkvPerRank, Reshape
from shardwise.rewrite.steps import inverted

__all__ = ["degrees_of"]


def degrees_of(
    operations: Sequence[Operation], transposed: bool, source: TensorMeta, target: TensorMeta | None
) -> tuple[int, int]:
    """Return the tensor-parallel degrees of the fused tensor on the left and of the one on the right.

    Where the operation does not say them they are those of the layouts of `source` and `target`, which are the metas of
    the first left and the first right tensor; 1 where those are not known.
    """
    for place, operation in enumerate(operations):
        if isinstance(operation, Ffn | QkvPerRank):
            before, after = operations[:place], operations[place + 1 :]
            left, right = operation.source_degree, operation.target_degree
            if left is None:
                left = _cut(source, operation.axis, before, transposed) if operation.sources == 1 else 1
            if right is None:
                known = target if operation.targets == 1 else None
                right = 1 if known is None else _cut(known, operation.axis, _back(after, len(known.shape)), False)
            return left, right
    return 1, 1


def _cut(meta: TensorMeta, axis: int | None, before: Sequence[Operation], transposed: bool) -> int:
    """Into how many boxes a tensor is cut along what is dim `axis` after the operations `before`."""
    rank = len(meta.shape)
    degrees = meta.degrees
    if len(degrees) != rank or not rank:
        return 1
    if transposed:
        degrees = degrees[::-1]
    for operation in before:
        if isinstance(operation, Reshape):
            return 1
        if isinstance(operation, Permute):
            order = _order(operation, rank)
            if len(order) != rank:
                return 1
            degrees = tuple([degrees[dim] for dim in order])
    if axis is None:
        axis = 1 if rank > 1 else 0
    return degrees[axis] if -rank <= axis < rank else 1


def _order(permute: Permute, rank: int) -> tuple[int, ...]:
    return permute.dims if permute.dims is not None else tuple(range(rank))[::-1]


def _back(after: Sequence[Operation], rank: int) -> list[Operation]:
    """What leads from a result back to what the operation made of it before the operations `after`."""
    back: list[Operation] = []
    for operation in reversed(after):
        if isinstance(operation, Permute):
            order = _order(operation, rank)
            back.append(Permute(inverted(order)))
        elif isinstance(operation, Reshape):
            back.append(operation)
    return back
