"""Copies: what a move takes or fills of the tensor that holds a piece, and how elements get there fastest.

A copy is limited by how it goes through memory, so `put` looks at the strides of both sides first:

    both sides in rows       source  abcd efgh        target  abcd.. efgh..      a memcpy per row
    rows become columns      source  abcd efgh        target  ae bf cg dh        squares of 2 MiB, then rows
    anything else, or small                                                      as torch does it
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from shardwise.comm.local_tensors import bits_of
from shardwise.space import BlockPart, Move
from shardwise.space.boxes import row_major_strides

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

_LEAST_BY_ROWS = 1 << 16
"""Below so many elements a memcpy per row saves less than the detour over numpy costs, 10 microseconds."""

_LEAST_TRANSPOSED = 4096
"""Below so many elements two copies cost more than they save."""

_BOUNCE_BYTES = 2 << 20
"""So much is transposed at a time: the second copy reads it out of the cache."""


def part_of(tensor: torch.Tensor, part: BlockPart, shape: Sequence[int]) -> torch.Tensor:
    """The part of a piece's tensor that a move of `shape` takes or fills: a view.

    The tensor is of the piece's shape with any strides, or flat.
    """
    if tuple(tensor.shape) == part.block:
        return tensor[tuple(slice(first, first + size) for first, size in zip(part.offset, shape, strict=True))]
    # One call into torch, not three: a span of a file is some hundred KiB, so that its views cost as much as its copy.
    (step,) = tensor.stride()
    strides = row_major_strides(part.block)
    if step != 1:
        strides = tuple([stride * step for stride in strides])
    return tensor.as_strided(shape, strides, int(tensor.storage_offset()) + part.first * step)


def parts_of(tensor: torch.Tensor, moves: Iterable[Move]) -> Iterator[torch.Tensor]:
    """What each of some moves takes of the tensor that holds their source, as the values that its memory stands for."""
    tensor = tensor.detach()
    # A conjugated view has other bytes in memory than its values: a copy of the bytes would lose the conjugation.
    is_plain = not (tensor.is_conj() or tensor.is_neg())
    for move in moves:
        part = part_of(tensor, move.source, move.shape)
        yield part if is_plain else part.resolve_conj().resolve_neg()


def fill(target: torch.Tensor, moves: Iterable[Move], elements: Iterable[torch.Tensor], *, adds: bool = False) -> None:
    """Put the elements of each of some moves into the tensor that holds their target, or add them to what is there."""
    target = target.detach()
    for move, taken in zip(moves, elements, strict=True):
        part = part_of(target, move.target, move.shape)
        if adds:
            part.add_(taken)
        else:
            put(part, taken)


def put(target: torch.Tensor, source: torch.Tensor, *, queued: bool = False) -> None:
    """Copy; both have one shape, and any strides. The target's dtype holds; elements of one dtype keep their bits.

    queued: the host waits for no device; see `QueuedCopies`.
    """
    if target.dtype == source.dtype and target.dtype not in _COPIED:
        bits = _BITS[target.element_size()]
        target, source = target.view(bits), source.view(bits)
    # On a GPU torch's own kernels are the fastest; what follows is about the caches of a CPU.
    is_small = target.numel() < _LEAST_TRANSPOSED
    if is_small or not (target.is_cpu and source.is_cpu) or target.is_conj() or target.is_neg():
        target.copy_(source, non_blocking=queued)
    elif target.stride(-1) == 1 and source.stride(-1) == 1:
        _put_rows(target, source)
    else:
        _put_strided(target, source)


def _put_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy rows that are whole in the memory of both.

    torch stores element by element, so that the processor reads each cache line of the target before it is overwritten.
    memcpy, which numpy calls for each row, does not: rows of 4 KiB go at 8 to 9 GB/s instead of 4 to 6. Where torch has
    several threads it is the faster one again.
    """
    if target.numel() < _LEAST_BY_ROWS or target.dtype != source.dtype or torch.get_num_threads() > 1:
        target.copy_(source)
        return
    # As whole numbers: numpy has no bfloat16, and a float that is copied as a float might lose the payload of a NaN.
    if target.element_size() not in _BITS:  # 16 bytes
        target.copy_(source)
        return
    np.copyto(bits_of(target), bits_of(source))


_Dims = list[tuple[int, int, int]]
"""Per dim: its size, its stride in the target, its stride in the source."""


def _put_strided(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy what is not in rows on both sides.

    torch copies one row of the target after the other. Where those are the source's columns it touches a cache line per
    element: 2-byte elements are transposed at 0.4 GB/s. It transposes whole contiguous matrices in small squares. So
    such a copy is made of two: the transpose into a small contiguous matrix, then rows to their places. That makes 4
    GB/s, and 5 GB/s instead of 0.9 with 4-byte elements.
    """
    dims = _merged(target, source)
    if len(dims) < 2 or dims[-1][1] == 1 or 0 in (dims[-1][1], dims[-1][2]):
        target.copy_(source)
        return
    for ours, theirs in _matrices(target, source, dims):
        _transpose(ours, theirs)


def _merged(target: torch.Tensor, source: torch.Tensor) -> _Dims:
    """The dims of both, as few as can be, from the widest stride in the source to the narrowest."""
    strides = zip(target.shape, target.stride(), source.stride(), strict=True)
    # Dims of size 1 have any stride, and say nothing of the order in memory.
    dims = sorted((each for each in strides if each[0] > 1), key=lambda each: (-each[2], -each[1]))
    merged: _Dims = []
    for size, ours, theirs in dims:
        if merged and merged[-1][1] == size * ours and merged[-1][2] == size * theirs:
            merged[-1] = (merged[-1][0] * size, ours, theirs)
        else:
            merged.append((size, ours, theirs))
    return merged


def _matrices(target: torch.Tensor, source: torch.Tensor, dims: _Dims) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both as matrices: the source goes on along rows, the target along columns; a pair per index of other dims."""
    columns = len(dims) - 1
    # The dim that is narrowest in the target, among those that are not the rows of the source.
    rows = min(range(columns), key=lambda dim: dims[dim][1])
    others = [dim for at, dim in enumerate(dims) if at not in (rows, columns)]
    (height, *row_strides), (width, *column_strides) = dims[rows], dims[columns]
    starts = [(target.storage_offset(), source.storage_offset())]
    for size, ours, theirs in others:
        starts = [(one + at * ours, other + at * theirs) for one, other in starts for at in range(size)]
    step = max(1, _BOUNCE_BYTES // (width * source.element_size()))
    for one, other in starts:
        for first in range(0, height, step):
            shape = (min(step, height - first), width)
            yield (
                target.as_strided(shape, (row_strides[0], column_strides[0]), one + first * row_strides[0]),
                source.as_strided(shape, (row_strides[1], column_strides[1]), other + first * row_strides[1]),
            )


def _transpose(target: torch.Tensor, source: torch.Tensor) -> None:
    """The source has its rows together, the target (best) its columns."""
    if target.numel() < _LEAST_TRANSPOSED or source.stride(1) != 1:
        target.copy_(source)
        return
    target.t().copy_(source.contiguous().t().contiguous())
