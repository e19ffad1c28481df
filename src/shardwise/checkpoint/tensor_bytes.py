"""Tensor bytes: the elements of tensors as the bytes of files, and the casts on the way."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from shardwise.moving.copies import part_of
from shardwise.space import Piece, moves

__all__ = ["cast_through", "is_plain", "plain_bytes", "row_major_bytes"]

_BOUNCE_BYTES = 16 << 20
"""So much of a tensor that is not plain CPU memory is copied at a time."""


def cast_through(elements: torch.Tensor, dtypes: Iterable[torch.dtype]) -> torch.Tensor:
    """The elements in one dtype after the other."""
    for dtype in dtypes:
        elements = elements.to(dtype)
    return elements


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in CPU memory row-major, one after the other, as the bytes that they stand for."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def plain_bytes(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The memory of the elements `start` up to `stop` of a plain tensor, as flat bytes."""
    # Not view(-1): dims of size 1 may have any stride, and a single element would keep it.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat[start:stop].view(torch.uint8)


def row_major_bytes(
    piece: Piece, held: Piece, tensor: torch.Tensor, dtypes: Sequence[torch.dtype] = ()
) -> Iterator[torch.Tensor]:
    """The elements of `piece`, which lies within `held`, as flat bytes on the CPU: views where the memory has them so.

    dtypes: what they are cast to, one after the other.
    The last chunk may be overwritten as soon as the next is asked for.
    """
    plain = tensor.resolve_conj().resolve_neg()
    start, stop = piece.elements.start - held.elements.start, piece.elements.stop - held.elements.start
    if is_plain(plain) and not dtypes:
        yield plain_bytes(plain, start, stop)
        return
    dtype = dtypes[-1] if dtypes else plain.dtype
    step = _BOUNCE_BYTES // max(dtype.itemsize, plain.element_size())
    bounce = torch.empty(min(step, stop - start), dtype=dtype)
    first, last = piece.elements
    for begin in range(first, last, step):
        part = held.within(begin, min(begin + step, last))
        chunk = bounce[: part.num_elements]
        for move in moves(held, part):
            taken = part_of(plain, move.source, move.shape)
            part_of(chunk, move.target, move.shape).copy_(cast_through(taken, dtypes[:-1]))
        yield chunk.view(torch.uint8)
