"""Transfers: carrying out moves between tensors, and between ranks as messages."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shardwise.comm import Channel
from shardwise.moving.parts import part_of
from shardwise.plan.dtypes import aligned
from shardwise.space import Move, Piece, moves

__all__ = [
    "carry_out",
    "cast_through",
    "is_plain",
    "message_bytes",
    "pack",
    "plain_bytes",
    "row_major_bytes",
    "swap_messages",
    "unpack",
]

_BOUNCE_BYTES = 16 << 20
"""So much of a tensor that is not plain CPU memory is copied at a time."""


def carry_out(move: Move, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy; the target's dtype holds."""
    part_of(target, move.target, move.shape).copy_(part_of(source, move.source, move.shape))


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


def message_bytes(parts: Iterable[tuple[Move, int]]) -> int:
    """Bytes of the message that holds what moves, each with the bytes of its element."""
    return sum(aligned(move.num_elements * itemsize) for move, itemsize in parts)


def pack(parts: Sequence[tuple[Move, torch.Tensor]]) -> torch.Tensor:
    """A message: what moves out of each tensor, one after the other."""
    num_bytes = message_bytes((move, source.element_size()) for move, source in parts)
    message = torch.empty(num_bytes, dtype=torch.uint8)
    start = 0
    for move, source in parts:
        stop = start + move.num_elements * source.element_size()
        taken = part_of(source, move.source, move.shape)
        message[start:stop].view(source.dtype).view(move.shape).copy_(taken)
        start += aligned(stop - start)
    return message


def unpack(message: torch.Tensor, parts: Iterable[tuple[Move, torch.dtype, torch.Tensor]]) -> None:
    """Put what `pack` took into the targets; the dtype is the source's."""
    start = 0
    for move, dtype, target in parts:
        stop = start + move.num_elements * dtype.itemsize
        part_of(target, move.target, move.shape).copy_(message[start:stop].view(dtype).view(move.shape))
        start += aligned(stop - start)


def swap_messages(
    channel: Channel,
    outgoing: Callable[[int], torch.Tensor],
    incoming: Callable[[int], int],
    accept: Callable[[int, torch.Tensor], None],
    *,
    purpose: str,
) -> None:
    """Give every rank its message and take what the others have for this one.

    outgoing(rank): the bytes for that rank, maybe none. incoming(rank): how many bytes it has for this one.
    accept(rank, message): called with each message that is not empty. At any time there is one message each way in
    memory; ranks go round in the same order, so that every send meets its receive.
    """
    for shift in range(1, channel.size):
        destination, source = (channel.rank + shift) % channel.size, (channel.rank - shift) % channel.size
        works = []
        message = outgoing(destination)
        if message.numel():
            works.append(channel.send(message.to(channel.device), destination, purpose=purpose))
        received = torch.empty(incoming(source), dtype=torch.uint8, device=channel.device)
        if received.numel():
            works.append(channel.receive(received, source, purpose=purpose))
        for work in works:
            work.wait()
        if received.numel():
            accept(source, received.cpu())
