"""Interleaving: in which order tensors are in one fused tensor, and the sizes that this needs."""

from collections.abc import Sequence

from shardwise.rewrite.op_steps import Arrange, AxisSlice, undone


def _interleaved(sizes: Sequence[int], parts: int) -> tuple[AxisSlice, ...]:
    """Return the stretches of a fused tensor: part after part, each with its share of each tensor.

    `sizes` are the tensors' along the axis; `parts` divides them all.

    >>> _interleaved((4, 2), 2)
    ((0, 0, 2), (1, 0, 1), (0, 2, 4), (1, 1, 2))
    """
    if parts <= 1:
        return tuple([(tensor, 0, size) for tensor, size in enumerate(sizes)])
    return tuple(
        [
            # Part outside, tensor inside: q0 k0 v0 q1 k1 v1. This order is the whole difference to a concatenation.
            (tensor, part * size // parts, (part + 1) * size // parts)
            for part in range(parts)
            for tensor, size in enumerate(sizes)
        ]
    )


def fuse(axis: int, sizes: Sequence[int], parts: int) -> Arrange:
    """Return what joins tensors of these sizes to one that is interleaved part by part."""
    return Arrange(axis, tuple(sizes), (_interleaved(sizes, parts),))


def unfuse(axis: int, sizes: Sequence[int], parts: int) -> Arrange:
    """Return what makes tensors of these sizes of the one that `fuse` makes of them."""
    # The inverse of the other direction, so that the two cannot come to disagree.
    (step,) = undone([fuse(axis, sizes, parts)])
    assert isinstance(step, Arrange)
    return step


def heads_of_three(sizes: Sequence[int], num_heads: int, num_groups: int) -> str | None:
    """Say why query, key and value of these sizes do not consist of so many heads; None where they do.

    Query and key have heads of one size; those of value may have another.
    """
    query, key, value = sizes
    for what, size, heads in (("query", query, num_heads), ("key", key, num_groups), ("value", value, num_groups)):
        if size % heads:
            return f"the {what} has {size}, which {heads} heads do not divide"
    if query // num_heads != key // num_groups:
        return (
            f"query heads have size {query // num_heads}, key heads {key // num_groups}, and they must be equal; check "
            f"num_heads={num_heads}, num_key_value_groups={num_groups}"
        )
    return None


def heads_of_fused(size: int, num_heads: int, num_groups: int) -> tuple[int, int, int] | None:
    """Return the sizes of query, key and value in a fused tensor; None where its heads do not divide it."""
    heads = num_heads + 2 * num_groups
    if size % heads:
        return None
    head = size // heads
    return num_heads * head, num_groups * head, num_groups * head


def unlike(sizes: tuple[int, ...], num_heads: int, num_groups: int) -> tuple[int, ...] | None:
    """Return the sizes of query, key and value; None where they are those of heads of one size."""
    return None if heads_of_fused(sum(sizes), num_heads, num_groups) == sizes else sizes
