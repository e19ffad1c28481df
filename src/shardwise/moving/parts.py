"""Parts: what a move takes or fills of the tensor that holds a piece."""

import math
from collections.abc import Sequence

import torch

from shardwise.space import Part

__all__ = ["as_bits", "part_of", "torch_dtype"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Copied as these, for torch cannot copy every dtype. By bytes of an element."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in a piece."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype of as many bytes that can be copied."""
    return tensor.view(_BITS[tensor.element_size()])


def part_of(tensor: torch.Tensor, part: Part, shape: Sequence[int]) -> torch.Tensor:
    """The part of a piece's tensor that a move of `shape` takes or fills: a view.

    The tensor is of the piece's shape with any strides, or flat.
    """
    box = tuple(slice(first, first + size) for first, size in zip(part.offset, shape, strict=True))
    if tuple(tensor.shape) == part.block:
        return tensor[box]
    return tensor[part.start : part.start + math.prod(part.block)].view(part.block)[box]
