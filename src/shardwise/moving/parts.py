"""Parts: what a move takes or fills of the tensor that holds a piece."""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from shardwise.space import BlockPart, Move

__all__ = ["copy_moves", "part_of", "parts_of", "put"]

_COPIED = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
"""Dtypes that torch copies everywhere, bit for bit."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Others are copied as these. By bytes of an element."""


def part_of(tensor: torch.Tensor, part: BlockPart, shape: Sequence[int]) -> torch.Tensor:
    """The part of a piece's tensor that a move of `shape` takes or fills: a view.

    The tensor is of the piece's shape with any strides, or flat.
    """
    box = tuple(slice(first, first + size) for first, size in zip(part.offset, shape, strict=True))
    if tuple(tensor.shape) == part.block:
        return tensor[box]
    return tensor[part.start : part.start + math.prod(part.block)].view(part.block)[box]


def parts_of(tensor: torch.Tensor, moves: Iterable[Move]) -> Iterator[torch.Tensor]:
    """What each of some moves takes of the tensor that holds their source, as the values that its memory stands for."""
    tensor = tensor.detach()
    for move in moves:
        yield part_of(tensor, move.source, move.shape).resolve_conj().resolve_neg()


def copy_moves(moves: Iterable[Move], source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy from the tensor that holds the source to that which holds the target; the target's dtype holds."""
    for move in moves:
        put(part_of(target, move.target, move.shape), part_of(source, move.source, move.shape))


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy; the target's dtype holds. Elements of the same dtype keep their bits."""
    if target.dtype == source.dtype and target.dtype not in _COPIED:
        bits = _BITS[target.element_size()]
        target.view(bits).copy_(source.view(bits))
    else:
        target.copy_(source)
