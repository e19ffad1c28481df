"""The mover: elements go from tensors of some ranks into tensors of others, batch by batch.

    [1] start     pack what goes out, one message of bytes per peer
    [2] (the next batch may be started)
    [3] finish    wait; put what came, and what stays on this rank, into targets

A reshard, full tensors, saves of whole tensors and loads all plan deliveries, each in its own way, and give them here.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from shardwise.comm import Channel, Work
from shardwise.moving.copies import put
from shardwise.plan.dtypes import aligned
from shardwise.space import Move

__all__ = ["Delivery", "Mover", "by_distance"]

S = TypeVar("S", bound=Hashable)
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Delivery(Generic[S, T]):
    """Elements that one rank gives and one gets, maybe the same one. Both find it in the same place of their lists."""

    giver: int
    taker: int
    source: S
    """By which the giver knows the tensor."""
    target: T
    """By which the taker knows the tensor."""
    dtype: torch.dtype
    """In which the elements travel."""
    moves: Sequence[Move]
    """From the source's storage to the target's."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements in a message."""
        return aligned(sum(move.num_elements for move in self.moves) * self.dtype.itemsize)


class _Memory:
    """Memory for the messages of a batch, which each takes over from the one before."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def room(self, num_bytes: int) -> torch.Tensor:
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device)  # goes before the next comes
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:num_bytes]


@dataclass(frozen=True, slots=True)
class _Begun(Generic[S, T]):
    """A batch under way."""

    works: Sequence[Work]
    arriving: Sequence[tuple[Delivery[S, T], int]]
    """What is put into targets, in the order of the batch, and where it begins in what came."""
    sent: torch.Tensor
    """Not read any more, but kept until the messages have left."""
    came: torch.Tensor


class Mover(Generic[S, T]):
    """One rank's part in moving elements. All ranks of the channel call it with the same batches, each with its own
    deliveries of them, and in one order: the first message that has not arrived is under way on both sides, so that no
    rank waits for ever."""

    def __init__(
        self,
        channel: Channel,
        *,
        take: Callable[[S, Sequence[Move]], Iterable[torch.Tensor]],
        put: Callable[[T, Sequence[Move], Iterable[torch.Tensor]], None],
        given: Callable[[Delivery[S, T]], None] | None = None,
        packs_on: torch.device | None = None,
        purpose: str,
    ) -> None:
        """take: the elements of each of some moves out of a source. put: called with a target, some moves, and the
        elements of each of these, once they have come; targets come in the order of the batches.

        given: called with each delivery whose source was read. packs_on: where messages are put together and taken
        apart, by default on the channel's device.
        """
        self.received_bytes = 0
        """In messages from other ranks."""
        self._channel = channel
        self._take, self._put, self._given = take, put, given
        self._purpose = purpose
        self._packs_on = packs_on or channel.device
        self._memories = [(_Memory(self._packs_on), _Memory(channel.device)) for _ in range(2)]
        """Two batches are under way at most, each with messages out and in."""

    @torch.no_grad()
    def run(self, batches: Iterable[Iterable[Delivery[S, T]]], *, num_under_way: int = 2) -> None:
        """Carry out batches, of which so many are under way at a time: 1 or 2. Nothing is under way at the end."""
        begun: list[_Begun[S, T]] = []
        turn = 0
        for number, batch in enumerate(batches):
            following = self._start(batch, self._memories[turn % 2], f"{self._purpose}, batch {number}")
            if following is None:
                continue
            begun.append(following)
            turn += num_under_way - 1
            if len(begun) == num_under_way:
                self._finish(begun.pop(0))
        for each in begun:
            self._finish(each)

    def _start(
        self, batch: Iterable[Delivery[S, T]], memories: tuple[_Memory, _Memory], purpose: str
    ) -> _Begun[S, T] | None:
        """Pack and send what this rank has in a batch; None when that is nothing."""
        rank = self._channel.rank
        outgoing: dict[int, list[Delivery[S, T]]] = {}
        sizes: dict[tuple[int, int], int] = {}
        """Bytes of each message, by (giver, taker)."""
        arriving = []
        for each in batch:
            ends = each.giver, each.taker
            at = sizes.get(ends, 0)
            if each.giver != each.taker:
                sizes[ends] = at + each.num_bytes
            if each.taker == rank:
                arriving.append((each, at))
            else:
                outgoing.setdefault(each.taker, []).append(each)
        if not sizes and not arriving:
            return None
        firsts: dict[tuple[int, int], int] = {}
        totals = {True: 0, False: 0}
        for ends, num_bytes in sizes.items():
            is_outgoing = ends[0] == rank
            firsts[ends] = totals[is_outgoing]
            totals[is_outgoing] += num_bytes
        packed = memories[0].room(totals[True])
        for taker, deliveries in outgoing.items():
            self._pack(deliveries, packed, firsts[rank, taker])
        # Messages that are put together on the CPU and travel between GPUs go there in one copy, and come back in one.
        sent, came = packed.to(self._channel.device), memories[1].room(totals[False])
        works = []
        for giver, taker in sorted(sizes, key=self._order):
            start, stop = firsts[giver, taker], firsts[giver, taker] + sizes[giver, taker]
            if giver == rank:
                works.append(self._channel.send(sent[start:stop], taker, purpose=purpose))
            else:
                works.append(self._channel.receive(came[start:stop], giver, purpose=purpose))
        placed = [(each, at + firsts.get((each.giver, each.taker), 0)) for each, at in arriving]
        return _Begun(works, placed, sent, came)

    def _order(self, ends: tuple[int, int]) -> tuple[int, int]:
        """Neighbours first, one distance after the other: the same order on all ranks, in which none is overrun."""
        giver, taker = ends
        return (taker - giver) % self._channel.size, giver

    def _finish(self, begun: _Begun[S, T]) -> None:
        """Wait for a batch, and fill targets."""
        for work in begun.works:
            work.wait()
        self.received_bytes += len(begun.came)
        came = begun.came.to(self._packs_on)
        for each, at in begun.arriving:
            is_here = each.giver == each.taker
            taken = self._take(each.source, each.moves) if is_here else _parts(came[at:], each)
            self._put(each.target, each.moves, taken)
            if is_here and self._given is not None:
                self._given(each)

    def _pack(self, deliveries: Iterable[Delivery[S, T]], message: torch.Tensor, start: int) -> None:
        for each in deliveries:
            taken = self._take(each.source, each.moves)
            for part, elements in zip(_parts(message[start:], each), taken, strict=True):
                put(part, elements)
            start += each.num_bytes
            if self._given is not None:
                self._given(each)


def _parts(message: torch.Tensor, delivery: Delivery[S, T]) -> Iterable[torch.Tensor]:
    """The elements of each move of a delivery, with which the message begins."""
    start = 0
    for move in delivery.moves:
        stop = start + move.num_elements * delivery.dtype.itemsize
        yield message[start:stop].view(delivery.dtype).view(move.shape)
        start = stop


def by_distance(deliveries: Iterable[Delivery[S, T]], channel: Channel) -> Iterable[list[Delivery[S, T]]]:
    """Batches in each of which a rank has one message each way, so that memory does not grow with the number of ranks.

    deliveries: of this rank, as giver, taker or both.
    """
    batches: list[list[Delivery[S, T]]] = [[] for _ in range(channel.size)]
    for each in deliveries:
        batches[(each.taker - each.giver) % channel.size].append(each)
    return batches
