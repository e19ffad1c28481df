"""Parts: what a move takes or fills of the tensor that holds a piece."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
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

_LEAST_BY_ROWS = 1 << 14


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
    if target.dtype != source.dtype:
        target.copy_(source)
    elif _is_faster_by_rows(target, source):
        bits = _BITS[target.element_size()]
        np.copyto(target.detach().view(bits).numpy(), source.detach().view(bits).numpy())
    elif target.dtype in _COPIED:
        target.copy_(source)
    else:
        bits = _BITS[target.element_size()]
        target.view(bits).copy_(source.view(bits))


def _is_faster_by_rows(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both sides are rows of CPU memory that are copied one after the other.

    torch stores element by element, and so reads each cache line of the target before it overwrites it. numpy calls
    memcpy for each row, which does not: rows of 4 KiB go at 8 to 9 GB/s instead of 4 to 6, long ones at 9 instead of 7.
    With several threads torch is faster again. What is small is faster without the detour over numpy.
    """
    return (
        target.numel() >= _LEAST_BY_ROWS
        and target.stride(-1) == source.stride(-1) == 1
        and target.device.type == source.device.type == "cpu"
        and target.element_size() in _BITS
        and torch.get_num_threads() == 1
        and not (source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg())
    )
