"""Execution: one rank's part of a reshard plan, as deliveries for the mover."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch

from shardwise.comm import Channel
from shardwise.comm.local_tensors import torch_dtype
from shardwise.moving.mover import Delivery, Mover
from shardwise.moving.parts import parts_of
from shardwise.plan.reshard import ReshardPlan, Route, Share
from shardwise.plan.routes import Lot, batches_of
from shardwise.space import Move, Piece
from shardwise.space.moves import stretch_of

__all__ = ["carry_out_plan"]


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
    let_go: called with each source of which nothing is needed any more. adds: targets get the sum of what comes, in
    the order of the shares, where else each element comes once.
    """
    deliveries = _Deliveries(plan, channel.rank, sources, targets)
    mover = Mover(
        channel,
        take=lambda piece, moves: parts_of(take(piece), moves),
        room=room,
        given=None if let_go is None else _Countdown(deliveries, let_go).given,
        adds=adds,
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


class _Deliveries:
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
                start, stop = lot.stretch(tasks[at].share.num_elements)
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
        if stop - start < task.share.num_elements:
            moves = list(stretch_of(moves, start, stop))
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

    def __init__(self, deliveries: _Deliveries, let_go: Callable[[Piece], None]) -> None:
        self._let_go = let_go
        self._left = {piece: 0 for pieces in deliveries.sources.values() for piece in pieces}
        """How many elements each has still to give, counted as often as they are given."""
        for piece, num_elements in deliveries.given():
            self._left[piece] += num_elements
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
    first_held = next((at for at, place in enumerate(route.held) if place.rank == rank), 0)
    first_wanted = next((at for at, place in enumerate(route.wanted) if place.rank == rank), 0)
    tasks = {}
    for at, share in enumerate(route.shares):
        giver, taker = route.ranks(share)
        if rank in (giver, taker):
            dtype = torch_dtype(route.wire_dtype(share))
            tasks[at] = _ShareTask(share, giver, taker, dtype, share.source - first_held, share.target - first_wanted)
    return tasks
