"""Execution: one rank's part of a reshard plan, batch by batch.

    [1] start     pack what goes out, one message of bytes per peer; sources whose last element is packed may go
    [2] (the next batch is started)
    [3] finish    wait; copy what came, and what stays on this rank, into targets, which are allocated now

Messages of a batch have one order on all ranks, and batches follow one another: the first transfer that is not
complete has been begun on both sides, so that no rank waits for ever.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm import Channel, Work
from shardwise.comm.dtypes import torch_dtype
from shardwise.moving.parts import part_of, put
from shardwise.plan.reshard import ReshardPlan, Route, Share
from shardwise.plan.reshard_batches import Lot, batches_of, stretch_bytes
from shardwise.space import Move, Piece
from shardwise.space.moves import stretch_of

__all__ = ["Execution"]


@dataclass(frozen=True, slots=True)
class _Task:
    """A share that this rank gives or gets."""

    share: Share
    wire_dtype: str
    peer: int | None
    """The other rank; None where both sides are here."""
    is_outgoing: bool
    source: int
    """Where it is here: which of this rank's pieces of the tensor."""
    target: int
    """Where it is here: which of this rank's pieces of the tensor."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements of a task that go together, and where in a message they are, in bytes."""

    name: str
    route: int
    at: int
    """Position of the share in the route."""
    task: _Task
    start: int
    stop: int
    position: int = 0


class _Staging:
    """Memory for the messages of a batch, which each takes over from the one before."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def room(self, num_bytes: int) -> torch.Tensor:
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._memory.device)  # goes before the next comes
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory


@dataclass(frozen=True, slots=True)
class _Begun:
    """A batch under way."""

    works: Sequence[Work]
    arriving: Sequence[_Stretch]
    """What is copied into targets, in the order of the shares."""
    incoming: torch.Tensor


class Execution:
    """Moves elements as a plan says, between the tensors of this rank and those of its peers. Runs once."""

    def __init__(
        self,
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
        """sources, targets: this rank's pieces, as the plan counts them.

        take: the tensor that holds a source. room: the tensor that takes a target, asked for when bytes have come.
        let_go: told of each source of which nothing is needed any more. adds: targets get the sum of what comes, in
        the order of the shares, where else each element comes once.
        """
        self._plan = plan
        self._channel = channel
        self._sources = _by_name(sources)
        self._targets = _by_name(targets)
        self._take, self._room, self._let_go = take, room, let_go
        self._adds = adds
        self._purpose = purpose
        self._tasks = [_tasks_of(route, channel.rank) for route in plan.routes]
        self._moves: dict[tuple[int, int], list[Move]] = {}
        self._left = {piece: 0 for pieces in self._sources.values() for piece in pieces}
        """How many elements each source has still to give, counted as often as they are given."""

    @torch.no_grad()
    def run(self) -> None:
        """Give and get everything; all ranks of the channel call this together."""
        if self._let_go is not None:
            self._count()
        slots = [(_Staging(self._channel.device), _Staging(self._channel.device)) for _ in range(2)]
        begun: _Begun | None = None
        turn = 0
        for number, batch in enumerate(batches_of(self._plan, in_order=self._adds)):
            following = self._start(batch, slots[turn % 2], f"{self._purpose}, batch {number}")
            if following is None:
                continue
            if begun is not None:
                self._finish(begun)
            begun = following
            turn += 1
        if begun is not None:
            self._finish(begun)

    def _count(self) -> None:
        """Note what each source gives; what gives nothing is let go at once."""
        for name, at in self._plan.tensors:
            for task in self._tasks[at].values():
                if task.is_outgoing or task.peer is None:
                    self._left[self._sources[name][task.source]] += task.share.num_elements
        for piece, num_elements in self._left.items():
            if not num_elements:
                self._given(piece, 0)

    def _start(self, batch: Sequence[Lot], slot: tuple[_Staging, _Staging], purpose: str) -> _Begun | None:
        """Begin what this rank has in a batch; None when that is nothing."""
        arriving: list[_Stretch] = []
        outgoing: dict[int, list[_Stretch]] = {}
        sizes: dict[tuple[int, bool], int] = {}
        """Bytes of each message, by (peer, whether it goes out)."""
        for lot in batch:
            name, route = self._plan.tensors[lot.tensor]
            tasks = self._tasks[route]
            for at in tasks if lot.share is None else [lot.share] if lot.share in tasks else []:
                task = tasks[at]
                start, stop = lot.stretch(task.share.num_elements)
                if start == stop:
                    continue
                position = 0
                if task.peer is not None:
                    message = task.peer, task.is_outgoing
                    position = sizes.get(message, 0)
                    sizes[message] = position + stretch_bytes(stop - start, task.wire_dtype)
                stretch = _Stretch(name, route, at, task, start, stop, position)
                if task.is_outgoing and task.peer is not None:
                    outgoing.setdefault(task.peer, []).append(stretch)
                else:
                    arriving.append(stretch)
        if not sizes and not arriving:
            return None
        firsts, totals = _places(sizes)
        messages = [staging.room(totals[is_outgoing]) for staging, is_outgoing in zip(slot, (True, False), strict=True)]
        for peer, stretches in outgoing.items():
            for stretch in stretches:
                self._pack(stretch, messages[0], firsts[peer, True] + stretch.position)
        works = []
        for peer, is_outgoing in sorted(sizes, key=self._order):
            start = firsts[peer, is_outgoing]
            stop = start + sizes[peer, is_outgoing]
            if is_outgoing:
                works.append(self._channel.send(messages[0][start:stop], peer, purpose=purpose))
            else:
                works.append(self._channel.receive(messages[1][start:stop], peer, purpose=purpose))
        placed = [each if each.task.peer is None else _moved(each, firsts[each.task.peer, False]) for each in arriving]
        return _Begun(works, placed, messages[1])

    def _order(self, message: tuple[int, bool]) -> tuple[int, int]:
        """Neighbours first, one distance after the other: the same order on all ranks, in which none is overrun."""
        peer, is_outgoing = message
        giver, taker = (self._channel.rank, peer) if is_outgoing else (peer, self._channel.rank)
        return (taker - giver) % self._channel.size, giver

    def _finish(self, begun: _Begun) -> None:
        for work in begun.works:
            work.wait()
        for stretch in begun.arriving:
            if stretch.task.peer is None:
                self._copy(stretch)
            else:
                self._unpack(stretch, begun.incoming)

    def _pack(self, stretch: _Stretch, message: torch.Tensor, position: int) -> None:
        piece = self._sources[stretch.name][stretch.task.source]
        tensor = _plain(self._take(piece))
        dtype = torch_dtype(stretch.task.wire_dtype)
        for move in self._moves_of(stretch):
            stop = position + move.num_elements * dtype.itemsize
            put(message[position:stop].view(dtype).view(move.shape), part_of(tensor, move.source, move.shape))
            position = stop
        self._given(piece, stretch.stop - stretch.start)

    def _unpack(self, stretch: _Stretch, message: torch.Tensor) -> None:
        tensor = self._room(self._targets[stretch.name][stretch.task.target]).detach()
        dtype = torch_dtype(stretch.task.wire_dtype)
        position = stretch.position
        for move in self._moves_of(stretch):
            stop = position + move.num_elements * dtype.itemsize
            came = message[position:stop].view(dtype).view(move.shape)
            self._arrive(part_of(tensor, move.target, move.shape), came)
            position = stop

    def _copy(self, stretch: _Stretch) -> None:
        piece = self._sources[stretch.name][stretch.task.source]
        source = _plain(self._take(piece))
        target = self._room(self._targets[stretch.name][stretch.task.target]).detach()
        for move in self._moves_of(stretch):
            taken = part_of(source, move.source, move.shape)
            self._arrive(part_of(target, move.target, move.shape), taken)
        self._given(piece, stretch.stop - stretch.start)

    def _arrive(self, target: torch.Tensor, elements: torch.Tensor) -> None:
        if self._adds:
            target.add_(elements)
        else:
            put(target, elements)

    def _given(self, piece: Piece, num_elements: int) -> None:
        if self._let_go is None:
            return
        self._left[piece] -= num_elements
        if not self._left[piece]:
            self._let_go(piece)

    def _moves_of(self, stretch: _Stretch) -> Iterable[Move]:
        key = stretch.route, stretch.at
        if key not in self._moves:
            self._moves[key] = self._plan.routes[stretch.route].moves(stretch.task.share)
        moves = self._moves[key]
        if stretch.stop - stretch.start == stretch.task.share.num_elements:
            return moves
        return stretch_of(moves, stretch.start, stretch.stop)


def _by_name(pieces: Iterable[Piece]) -> Mapping[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.name, []).append(piece)
    return found


def _tasks_of(route: Route, rank: int) -> dict[int, _Task]:
    """What a rank does for tensors of a route, by position of the share."""
    first_held = next((at for at, place in enumerate(route.held) if place.rank == rank), 0)
    first_wanted = next((at for at, place in enumerate(route.wanted) if place.rank == rank), 0)
    tasks = {}
    for at, share in enumerate(route.shares):
        giver, taker = route.ranks(share)
        if rank in (giver, taker):
            peer = None if giver == taker else taker if giver == rank else giver
            source, target = share.source - first_held, share.target - first_wanted
            tasks[at] = _Task(share, route.wire_dtype(share), peer, giver == rank, source, target)
    return tasks


def _places(sizes: Mapping[tuple[int, bool], int]) -> tuple[dict[tuple[int, bool], int], dict[bool, int]]:
    """Where each message begins among those of its way, and how many bytes those are together."""
    firsts = {}
    totals = {True: 0, False: 0}
    for message, num_bytes in sizes.items():
        _, is_outgoing = message
        firsts[message] = totals[is_outgoing]
        totals[is_outgoing] += num_bytes
    return firsts, totals


def _moved(stretch: _Stretch, by: int) -> _Stretch:
    position = stretch.position + by
    return _Stretch(stretch.name, stretch.route, stretch.at, stretch.task, stretch.start, stretch.stop, position)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its memory as it stands for its values."""
    return tensor.detach().resolve_conj().resolve_neg()
