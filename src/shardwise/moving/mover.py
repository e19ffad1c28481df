"""The mover: elements go from tensors or verified spans of files into tensors, within a rank and between ranks.

A reshard, full tensors, saves of whole tensors and loads all list deliveries, each in its own way, and give them here.
A batch is started before the one before it is finished, so that messages travel while others are packed::

    batch 0    pack, send .................. wait, put
    batch 1                pack, send .................. wait, put
    batch 2                                              pack, send ....
    memory     first pair  second pair                   first pair of buffers (out, in) again

`carry_out_plan` turns one rank's part of a `ReshardPlan` into deliveries.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic, NamedTuple, TypeVar

import torch

from shardwise.comm import Channel, Work
from shardwise.comm.local_tensors import torch_dtype
from shardwise.moving.copies import fill, parts_of, put
from shardwise.moving.queued_copies import QueuedCopies
from shardwise.plan.dtypes import aligned
from shardwise.routes.reshard_plan import Lot, ReshardPlan, Route, Share, batches_of
from shardwise.space import Move, Piece
from shardwise.space.moves import moves_between

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

    def __init__(self, take: Callable[[int], torch.Tensor]) -> None:
        self._take = take
        self._memory = take(0)

    def room(self, num_bytes: int) -> torch.Tensor:
        if len(self._memory) < num_bytes:
            self._memory = self._take(0)  # goes before the next comes
            self._memory = self._take(num_bytes)
        return self._memory[:num_bytes]


@dataclass(frozen=True, slots=True)
class BegunBatch(Generic[S, T]):
    """A batch under way."""

    works: Sequence[Work]
    arriving: Sequence[tuple[Delivery[S, T], int]]
    """What is put into targets, in the order of the batch, and where it begins in what came."""
    sent: torch.Tensor
    """Not read any more, but kept until the messages have left."""
    came: torch.Tensor


class Mover(Generic[S, T]):
    """One rank's part in moving elements. All ranks of the channel call it with the same batches in one order, each
    with its own deliveries. The first message that has not arrived is under way on both sides, so that no rank waits
    for ever.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        take: Callable[[S, Sequence[Move]], Iterable[torch.Tensor]],
        put: Callable[[T, Sequence[Move], Iterable[torch.Tensor]], None],
        given: Callable[[Delivery[S, T]], None] | None = None,
        packs_on: torch.device | None = None,
        copies: QueuedCopies | None = None,
        purpose: str,
    ) -> None:
        """take: the elements of each of some moves out of a source. put: called with a target, some moves, and the
        elements of each of these, once they have come. Targets come in the order of the batches.

        given: called with each delivery whose source was read. packs_on: where messages are put together and taken
        apart, by default on the channel's device. copies: how they are put together, where that is on the host.
        """
        self.received_bytes = 0
        """In messages from other ranks."""
        self._channel = channel
        self._take, self._put, self._given = take, put, given
        self._purpose = purpose
        self._packs_on = packs_on or channel.device
        self._copies = copies
        packed = partial(torch.empty, dtype=torch.uint8, device=self._packs_on) if copies is None else copies.room
        came = partial(torch.empty, dtype=torch.uint8, device=channel.device)
        self._memories = [(_Memory(packed), _Memory(came)) for _ in range(2)]
        """Two batches are under way at most, each with messages out and in."""

    @torch.no_grad()
    def run(self, batches: Iterable[Iterable[Delivery[S, T]]], *, num_under_way: int = 2) -> None:
        """Carry out batches, 1 or 2 at a time. Nothing is under way at the end."""
        begun: list[BegunBatch[S, T]] = []
        turn = 0
        for number, batch in enumerate(batches):
            following = self.begin(batch, turn, f"{self._purpose}, batch {number}")
            if following is None:
                continue
            begun.append(following)
            # With one batch under way the same memory serves all, for each is finished before the next is packed.
            turn += num_under_way - 1
            if len(begun) == num_under_way:
                self.finish(begun.pop(0))
        for each in begun:
            self.finish(each)

    @torch.no_grad()
    def begin(self, batch: Iterable[Delivery[S, T]], turn: int, purpose: str) -> BegunBatch[S, T] | None:
        """Pack and send what this rank has in a batch; None when that is nothing.

        turn: an even number and an odd one in turn; of two batches with even ones the first must be finished.
        """
        memories = self._memories[turn % 2]
        rank = self._channel.rank
        outgoing: dict[int, list[Delivery[S, T]]] = {}
        sizes: dict[tuple[int, int], int] = {}
        """Bytes of each message, by (giver, taker)."""
        arriving = []
        for each in batch:
            ends = each.giver, each.taker
            at = sizes.get(ends, 0)
            # Offsets are counted alike on both ends, from the order of the deliveries alone: messages have no headers.
            if each.giver != each.taker:
                sizes[ends] = at + each.num_bytes
            # What stays here is not packed: it goes from source to target in one copy, when the batch is finished.
            if each.taker == rank:
                arriving.append((each, at))
            else:
                outgoing.setdefault(each.taker, []).append(each)
        # A rank without a part in a batch goes on at once, and does not wait for those that have one.
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
        if self._copies is not None:
            self._copies.wait()
        # Messages that are put together on the CPU and travel between GPUs go there in one copy, and come back in one.
        sent, came = packed.to(self._channel.device), memories[1].room(totals[False])
        works = []
        # Both ends post their messages in one order. Else two ranks could each wait for what the other has not yet
        # sent, where a channel carries one message after the other.
        for giver, taker in sorted(sizes, key=self._order):
            start, stop = firsts[giver, taker], firsts[giver, taker] + sizes[giver, taker]
            if giver == rank:
                works.append(self._channel.send(sent[start:stop], taker, purpose=purpose))
            else:
                works.append(self._channel.receive(came[start:stop], giver, purpose=purpose))
        # What stays on this rank has no message, and begins nowhere.
        placed = [(each, at + firsts.get((each.giver, each.taker), 0)) for each, at in arriving]
        return BegunBatch(works, placed, sent, came)

    def _order(self, ends: tuple[int, int]) -> tuple[int, int]:
        """Neighbours first, one distance after the other: the same order on all ranks, in which none is overrun."""
        giver, taker = ends
        return (taker - giver) % self._channel.size, giver

    @torch.no_grad()
    def finish(self, begun: BegunBatch[S, T]) -> None:
        """Wait for a batch, and fill targets."""
        for work in begun.works:
            work.wait()
        self.received_bytes += len(begun.came)
        came = begun.came.to(self._packs_on)
        for each, at in begun.arriving:
            is_here = each.giver == each.taker
            taken = self._take(each.source, each.moves) if is_here else _parts(came[at:], each)
            self._put(each.target, each.moves, taken)
            # A source that stays here was read just now; one that was sent, when it was packed.
            if is_here and self._given is not None:
                self._given(each)

    def _pack(self, deliveries: Iterable[Delivery[S, T]], message: torch.Tensor, start: int) -> None:
        copy = put if self._copies is None else self._copies.put
        for each in deliveries:
            taken = self._take(each.source, each.moves)
            for part, elements in zip(_parts(message[start:], each), taken, strict=True):
                copy(part, elements)
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
    """Batches with one message each way per rank, so that memory does not grow with the number of ranks.

    deliveries: of this rank, as giver, taker or both.
    """
    batches: list[list[Delivery[S, T]]] = [[] for _ in range(channel.size)]
    for each in deliveries:
        batches[(each.taker - each.giver) % channel.size].append(each)
    return batches


def carry_out_plan(
    plan: ReshardPlan,
    channel: Channel,
    *,
    sources: Iterable[Piece],
    targets: Iterable[Piece],
    take: Callable[[Piece], torch.Tensor],
    room: Callable[[Piece], torch.Tensor],
    let_go: Callable[[Piece], None] | None = None,
    adds: bool = False,
    purpose: str = "reshard",
) -> None:
    """Give and get everything of a plan; all ranks of the channel call this together.

    sources, targets: this rank's pieces, as the plan counts them.
    take: the tensor that holds a source. room: the tensor that takes a target, asked for when bytes have come.
    let_go: called with each source that is not needed any more. adds: targets get the sum of what comes, in
    the order of the shares, where else each element comes once.
    """
    deliveries = PlanDeliveries(plan, channel.rank, sources, targets)
    mover = Mover(
        channel,
        take=lambda piece, moves: parts_of(take(piece), moves),
        put=lambda piece, moves, elements: fill(room(piece), moves, elements, adds=adds),
        given=None if let_go is None else _Countdown(deliveries, let_go).given,
        purpose=purpose,
    )
    mover.run(deliveries.batches(in_order=adds))


class _ShareTask(NamedTuple):
    """A share that this rank gives or gets."""

    share: Share
    giver: int
    taker: int
    dtype: torch.dtype
    source: int
    """Where it is here: which of this rank's pieces of the tensor."""
    target: int
    """Where it is here: which of this rank's pieces of the tensor."""


class PlanDeliveries:
    """What a rank gives and gets of a plan."""

    def __init__(self, plan: ReshardPlan, rank: int, sources: Iterable[Piece], targets: Iterable[Piece]) -> None:
        self._plan = plan
        self._rank = rank
        self.sources, self._targets = _by_name(sources), _by_name(targets)
        self._tasks = [_tasks_of(route, rank) for route in plan.routes]
        self._moves = cache(lambda route, at: plan.routes[route].moves(plan.routes[route].shares[at]))
        """Found once for all tensors that go alike."""

    def batches(self, *, in_order: bool) -> Iterator[Iterator[Delivery[Piece, Piece]]]:
        """One batch of the plan after the other; those in which this rank has nothing are empty."""
        for batch in batches_of(self._plan, in_order=in_order):
            yield self._of_lots(batch)

    def _of_lots(self, batch: Sequence[Lot]) -> Iterator[Delivery[Piece, Piece]]:
        for lot in batch:
            name, route = self._plan.tensors[lot.tensor]
            tasks = self._tasks[route]
            for at in tasks if lot.share is None else [lot.share] if lot.share in tasks else []:
                start, stop = lot.bounds(tasks[at].share.num_elements)
                if start < stop:
                    yield self._delivery(name, route, at, start, stop)

    def given(self) -> Iterator[tuple[Piece, int]]:
        """Every source that this rank gives, and how many elements of it."""
        for name, route in self._plan.tensors:
            for task in self._tasks[route].values():
                if task.giver == self._rank:
                    yield self.sources[name][task.source], task.share.num_elements

    def _delivery(self, name: str, route: int, at: int, start: int, stop: int) -> Delivery[Piece, Piece]:
        task = self._tasks[route][at]
        moves: Sequence[Move] = self._moves(route, at)
        # Only shares that do not fit into a batch are cut, and their moves with them.
        if stop - start < task.share.num_elements:
            moves = list(moves_between(moves, start, stop))
        held, wanted = self._plan.routes[route].held, self._plan.routes[route].wanted
        source, target = held[task.share.source].piece, wanted[task.share.target].piece
        # Pieces of a route have no names. The other rank's stays as it is: only this one's tensors are asked for.
        if task.giver == self._rank:
            source = self.sources[name][task.source]
        if task.taker == self._rank:
            target = self._targets[name][task.target]
        return Delivery(task.giver, task.taker, source, target, task.dtype, moves)


class _Countdown:
    """Lets go of each source once all of it is given; those that give nothing, at once."""

    def __init__(self, deliveries: PlanDeliveries, let_go: Callable[[Piece], None]) -> None:
        self._let_go = let_go
        self._left = {piece: 0 for pieces in deliveries.sources.values() for piece in pieces}
        """How many elements each has still to give, counted as often as they are given."""
        for piece, num_elements in deliveries.given():
            self._left[piece] += num_elements
        # Those that nobody wants go before the first target is allocated: memory is shortest in the middle.
        for piece in [piece for piece, num_elements in self._left.items() if not num_elements]:
            let_go(piece)

    def given(self, delivery: Delivery[Piece, Piece]) -> None:
        """Note what a source has given."""
        self._left[delivery.source] -= sum(move.num_elements for move in delivery.moves)
        if not self._left[delivery.source]:
            self._let_go(delivery.source)


def _by_name(pieces: Iterable[Piece]) -> Mapping[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return found


def _tasks_of(route: Route, rank: int) -> dict[int, _ShareTask]:
    """What a rank does for tensors of a route, by position of the share."""
    # A rank's pieces follow one another in `held`: a position there, less that of its first, is one in its own list.
    first_held = next((at for at, place in enumerate(route.held) if place.rank == rank), 0)
    first_wanted = next((at for at, place in enumerate(route.wanted) if place.rank == rank), 0)
    tasks = {}
    for at, share in enumerate(route.shares):
        giver, taker = route.ranks(share)
        if rank in (giver, taker):
            dtype = torch_dtype(route.wire_dtype(share))
            tasks[at] = _ShareTask(share, giver, taker, dtype, share.source - first_held, share.target - first_wanted)
    return tasks
