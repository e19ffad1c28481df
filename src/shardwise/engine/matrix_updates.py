"""Matrices that one rank updates as a whole, for all ranks that hold parts of them or copies.

tp = 2 cuts w by columns; rank 1 is its home. Both hold the masters and the reduced gradients of their halves, as under
any layout; between updates nothing is anywhere twice, but the optimizer's state is at home alone:

    rank 0   master w[:, :2]  --+                                              +-->  master w[:, :2]
             gradient           +--> [1] gather: w, its gradient               |     [4] cast, gather, as always
    rank 1   master w[:, 2:]  --+    [2] optimizer.step() --> [3] give back  --+-->  master w[:, 2:]
             gradient

    round 0   [1] | [2]      | [3]                      the messages of a round travel while another is updated; each
    round 1       | [1]      | [2]      | [3]           rank updates some of its matrices in each round
    round 2                  | [1]      | [2]     ..

The ranks agree on one `ReshardPlan` when the engine is made. The mover carries out the lines of it that are due.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.inventory import Inventory
from shardwise.engine.state import placed
from shardwise.engine.zero.flat_params import FlatParams, Owned
from shardwise.moving.copies import fill, parts_of
from shardwise.moving.mover import BegunBatch, Delivery, Mover, PlanDeliveries
from shardwise.moving.piece_exchange import consent
from shardwise.plan import Parameter, Segment
from shardwise.plan.matrix_homes import rounds_of
from shardwise.space import Piece, Run

_GRADIENT, _MASTER, _UPDATED = "gradient ", "master ", "updated "
"""What the pieces of a matrix are on their way; names of pieces begin with it."""

_UNCUT = 1 << 60
"""Bytes of messages: rounds keep them small, and no plan cuts them."""

_Deliveries = list[Delivery[Piece, Piece]]


class MatrixUpdates:
    """The matrices of one owner. All ranks that hold parts or copies of what it owns make and call this together."""

    def __init__(self, buffers: FlatParams, inventory: Inventory, channel: Channel) -> None:
        """inventory: of what this rank owns, or owns a part of. channel: see `EngineChannels.homes`."""
        homes = buffers.ownership.homes
        self._rank = channel.rank
        self._spec_of = {spec.name: spec for spec in inventory.specs}
        self._parts = {each.segment.name: each for each in buffers.owned if each.segment.name in homes}
        """What is here of each matrix: its master in the flat buffer."""
        bucket_of = {slot.name: at for at, each in enumerate(buffers.buckets) for slot in each.plan.slots}
        # About the order of the buckets, which may be others on ranks with larger parts.
        self._rounds = rounds_of(homes, [spec.name for spec in reversed(inventory.specs)], buffers.owner)
        self._round_of = {name: at for at, names in enumerate(self._rounds) for name in names}
        self.last_rounds: dict[int, int] = {}
        """For each bucket with such matrices how many rounds end before all of its masters have their new values."""
        for name, at in self._round_of.items():
            self.last_rounds[bucket_of[name]] = max(self.last_rounds.get(bucket_of[name], 0), at + 1)
        self._held = {
            name: _whole(self._spec_of[name], buffers.buckets[bucket_of[name]].master)
            for name in self._round_of
            if homes[name].rank == channel.rank
        }
        """The matrices whose home is here. They have memory during their round only."""
        self.updated = [each for each in buffers.owned if each.segment.name not in homes] + list(self._held.values())
        """What the optimizers of this rank have."""
        self._sources: dict[Piece, torch.Tensor] = {}
        """Masters, by what they give, and gradients while an update goes on."""
        self._targets: dict[Piece, torch.Tensor] = {}
        """Masters, by what they take."""
        for name, each in self._parts.items():
            self._sources |= self._placed(_MASTER, name, each.parameter)
            self._targets |= self._placed(_UPDATED, name, each.parameter)
        self._rooms: dict[str, torch.Tensor] = {}
        """Whole gradients, masters and updated masters, by the names of their pieces."""
        self._gathers, self._returns = self._agree(channel)
        self._mover: Mover[Piece, Piece] = Mover(
            channel,
            take=lambda piece, moves: parts_of(self._source(piece), moves),
            put=lambda piece, moves, elements: fill(self._target(piece), moves, elements),
            packs_on=next((each.master.device for each in buffers.buckets), None),
            purpose="matrices",
        )

    def round_of(self, each: Owned) -> int | None:
        """The number of the round in which this rank updates it; None for what is no matrix of this rank."""
        name = each.segment.name
        return self._round_of[name] if self._held.get(name) is each else None

    @property
    def added_elements(self) -> int:
        """By how many elements this rank's optimizers have more, or less, than what it owns of the matrices."""
        whole = sum(each.parameter.numel() for each in self._held.values())
        return whole - sum(each.parameter.numel() for each in self._parts.values())

    @property
    def held_bytes(self) -> tuple[int, int]:
        """The most that an update holds in addition: whole matrices, and messages that go and come."""
        rounds = self._rounds
        whole = [sum(self._held[name].parameter.nbytes for name in names if name in self._held) for names in rounds]
        # The masters of one round go back while those of another are updated and those of a third come, with gradients.
        in_rooms = max((sum(whole[max(0, at - 2) : at + 1]) + whole[at] for at in range(len(whole))), default=0)
        messages: dict[tuple[int, bool], int] = {}
        for number in range(len(rounds) + 2):
            for is_sent in (True, False):
                sizes = [each.num_bytes for each in self._by_message(self._batch(rounds, number), is_sent)]
                messages[number % 2, is_sent] = max(messages.get((number % 2, is_sent), 0), sum(sizes))
        return in_rooms, sum(messages.values())

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Of gradients, and of masters, in an update of all matrices."""
        batch = [each for number in range(len(self._rounds) + 2) for each in self._batch(self._rounds, number)]
        sent = {True: 0, False: 0}
        for each in self._by_message(batch, True):
            num_elements = sum(move.num_elements for move in each.moves)
            sent[each.source.name.startswith(_GRADIENT)] += num_elements * each.dtype.itemsize
        return sent[True], sent[False]

    def _by_message(self, batch: _Deliveries, is_sent: bool) -> Iterator[Delivery[Piece, Piece]]:
        """What this rank sends to others, or gets from them."""
        for each in batch:
            if each.giver != each.taker and (each.giver == self._rank) == is_sent:
                yield each

    def _batch(self, rounds: Sequence[Sequence[str]], number: int) -> _Deliveries:
        """What travels together: what goes back first, for its memory is free before more comes."""
        returned, gathered = self._at(rounds, number - 2), self._at(rounds, number)
        return [
            *chain.from_iterable(self._returns.get(name, ()) for name in returned),
            *chain.from_iterable(self._gathers.get(name, ()) for name in gathered),
        ]

    @torch.no_grad()
    def carry_out(
        self,
        gradients: Mapping[str, torch.Tensor],
        touched: Collection[str],
        step: Callable[[int], None],
        *,
        at_once: bool,
    ) -> Iterator[int]:
        """Bring together, update and give back. Yields 0 once the first messages are on their way, and then how many
        rounds are over: the masters of their matrices have their new values.

        gradients: of what is owned here, by name. touched: names that have a gradient on any rank; the others stay.
        step: updates this rank's matrices of a round. at_once: there is one round, 0; the same on all ranks.
        """
        names = tuple(chain(*self._rounds))
        rounds = [[name for name in names if name in touched] for names in ([names] if at_once else self._rounds)]
        given: dict[Piece, torch.Tensor] = {}
        for name in self._parts.keys() & set(touched):
            given |= self._placed(_GRADIENT, name, gradients[name])
        self._sources |= given
        begun: list[BegunBatch[Piece, Piece] | None] = []
        for number in range(len(rounds) + 2):
            begun.append(self._mover.begin(self._batch(rounds, number), number, f"matrices, batch {number}"))
            if not number:
                yield 0
                continue
            self._finish(begun.pop(0), self._at(rounds, number - 3), self._at(rounds, number - 1))
            if number > 2:
                yield number - 2
            self._update(self._at(rounds, number - 1), number - 1, step)
        self._finish(begun.pop(0), self._at(rounds, len(rounds) - 1), ())
        for piece in given:  # views would keep buffers that are given back
            del self._sources[piece]
        yield len(self._rounds)

    @staticmethod
    def _at(rounds: Sequence[Sequence[str]], number: int) -> Sequence[str]:
        return rounds[number] if 0 <= number < len(rounds) else ()

    def _finish(self, begun: BegunBatch[Piece, Piece] | None, returned: Sequence[str], gathered: Sequence[str]) -> None:
        """Wait for a batch, in which some matrices went back and others came."""
        for name in gathered:
            if name in self._held:
                like = self._held[name].parameter
                for kind in (_GRADIENT, _MASTER):
                    self._rooms[kind + name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if begun is not None:
            self._mover.finish(begun)
        for name in returned:
            self._rooms.pop(_UPDATED + name, None)

    def _update(self, names: Sequence[str], number: int, step: Callable[[int], None]) -> None:
        mine = [(name, self._held[name].parameter) for name in names if name in self._held]
        for name, parameter in mine:
            parameter.data = self._rooms[_UPDATED + name] = self._rooms.pop(_MASTER + name)
            parameter.grad = self._rooms.pop(_GRADIENT + name)
        if mine or not number:
            step(number)
        for _, parameter in mine:
            parameter.grad = None
            parameter.data = _without_memory(parameter, parameter.shape)

    def _source(self, piece: Piece) -> torch.Tensor:
        return self._rooms[piece.name] if piece.name.startswith(_UPDATED) else self._sources[piece]

    def _target(self, piece: Piece) -> torch.Tensor:
        return self._targets[piece] if piece.name.startswith(_UPDATED) else self._rooms[piece.name]

    def _placed(self, kind: str, name: str, tensor: torch.Tensor) -> dict[Piece, torch.Tensor]:
        return placed(kind + name, tensor.detach(), self._spec_of[name], self._parts[name].segment)

    def _agree(self, channel: Channel) -> tuple[dict[str, _Deliveries], dict[str, _Deliveries]]:
        """What this rank gives and gets: of each matrix to bring it together, and to give it back."""
        sources, targets = [*self._sources], [*self._targets]
        for name, each in self._parts.items():
            sources += self._placed(_GRADIENT, name, each.parameter)
        for name, each in self._held.items():
            whole = Piece(
                name="", dtype=dtype_name(each.parameter.dtype), global_shape=self._spec_of[name].global_shape
            )
            sources.append(replace(whole, name=_UPDATED + name))
            targets += [replace(whole, name=kind + name) for kind in (_MASTER, _GRADIENT)]
        agreed = consent(channel, sources, targets, max_bytes=_UNCUT, cast=False)
        deliveries = PlanDeliveries(agreed.plan, channel.rank, agreed.sources, agreed.targets)
        gathers: dict[str, _Deliveries] = {}
        returns: dict[str, _Deliveries] = {}
        for delivery in chain(*deliveries.batches(in_order=False)):
            piece = delivery.source if delivery.giver == channel.rank else delivery.target
            kind, _, name = piece.name.partition(" ")
            (returns if kind == _UPDATED.strip() else gathers).setdefault(name, []).append(delivery)
        return gathers, returns


def _whole(spec: Parameter, like: torch.Tensor) -> Owned:
    """A matrix in the hands of an optimizer, without memory."""
    segment = Segment(name=spec.name, run=Run(0, math.prod(spec.global_shape)), start=0)
    return Owned(segment=segment, parameter=nn.Parameter(_without_memory(like, spec.global_shape)))


def _without_memory(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape))
