"""Strided copies: elements from one order of memory into another, as fast as the caches allow.

torch copies one row of the target after the other. Where those are the source's columns it touches a cache line per
element: 2-byte elements are transposed at 0.4 GB/s. Whole contiguous matrices it transposes in small squares, so such a
copy is made of two: the transpose into a small contiguous matrix, then rows to where they belong. That makes 4 GB/s,
and 5 GB/s instead of 0.9 with 4-byte elements.
"""

from collections.abc import Iterator

import torch

__all__ = ["copy_strided"]

_LEAST_ELEMENTS = 4096
"""Below this two copies cost more than they save."""

_BOUNCE_BYTES = 2 << 20
"""So much is transposed at a time: the second copy reads it out of the cache."""

_Dims = list[tuple[int, int, int]]
"""Per dim: its size, its stride in the target, its stride in the source."""


def copy_strided(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy; both have one shape, and any strides. The target's dtype holds."""
    if target.numel() < _LEAST_ELEMENTS:
        target.copy_(source)
        return
    dims = _merged(target, source)
    if len(dims) < 2 or dims[-1][1] == 1 or 0 in (dims[-1][1], dims[-1][2]):
        target.copy_(source)
        return
    for ours, theirs in _matrices(target, source, dims):
        _transpose(ours, theirs)


def _merged(target: torch.Tensor, source: torch.Tensor) -> _Dims:
    """The dims of both, as few as can be, from the widest stride in the source to the narrowest."""
    strides = zip(target.shape, target.stride(), source.stride(), strict=True)
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
    if target.numel() < _LEAST_ELEMENTS or source.stride(1) != 1:
        target.copy_(source)
        return
    target.t().copy_(source.contiguous().t().contiguous())
