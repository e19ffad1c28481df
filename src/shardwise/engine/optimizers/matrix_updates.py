"""Matrices that one rank updates as a whole, for all ranks that hold parts of them or copies.

tp = 2 cuts w by columns; rank 1 is its home. Both hold the masters and the reduced gradients of their halves, as under
any layout; between updates nothing is anywhere twice, but the optimizer's state is at home alone:

    rank 0   master w[:, :2]  --+                                              +-->  master w[:, :2]
             gradient           +--> [1] gather: w, its gradient               |     [4] cast, gather, as always
    rank 1   master w[:, 2:]  --+    [2] optimizer.step() --> [3] give back  --+-->  master w[:, 2:]
             gradient

The matrices of an owner go in rounds; each of its ranks updates some in each round. The ranks agree on one
`ReshardPlan` when the engine is made, and carry out the lines of it that are due.

[1] and [3] go one of two ways. CPU ranks of one host write into the memory of homes, and read out of it: one copy of
each element for each way.

    rank 0   | put round 1 | all | take round 0 | update round 1 | put round 2 | all | take round 1 | ..
    rank 1   | put round 1 | all | take round 0 | update round 1 | put round 2 | all | take round 1 | ..
                              ^ an exchange: all parts of round 1 are at home, and round 0 is updated

Other ranks send messages. Those of one round travel while another is updated.

    round 0   gather | update   | give back |
    round 1          | gather   | update    | give back |
    round 2                     | gather    | update    | ..
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from shardwise.comm import Channel
from shardwise.comm.local_tensors import dtype_name, torch_dtype
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.zero.flat_params import FlatParams, Owned, placed
from shardwise.engine.zero.masters import master
from shardwise.moving.copies import fill, parts_of
from shardwise.moving.mover import BegunBatch, Delivery, Mover, PlanDeliveries
from shardwise.moving.piece_exchange import consent
from shardwise.plan import Parameter, Segment
from shardwise.plan.matrix_homes import Home, Rooms, rooms_of, rounds_of
from shardwise.space import Move, Piece, Run

GRADIENT, MASTER, UPDATED = "gradient ", "master ", "updated "
"""What the pieces of a matrix are on their way; names of pieces begin with it."""

Deliveries = list[Delivery[Piece, Piece]]
Rounds = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixRoutes:
    """What this rank gives and gets of each matrix."""

    gathers: Mapping[str, Deliveries]
    returns: Mapping[str, Deliveries]
    sources: dict[Piece, torch.Tensor]
    """Masters, by what they give, and gradients while an update goes on."""
    targets: dict[Piece, torch.Tensor]
    """Masters, by what they take."""


class SharedMatrices:
    """Memory of each home that all ranks write and read."""

    num_behind = 1
    """By how many rounds masters come back later than matrices are updated."""

    def __init__(
        self,
        channel: Channel,
        routes: MatrixRoutes,
        memory: Sequence[torch.Tensor],
        homes: Mapping[str, Home],
        rooms: Rooms,
        spec_of: Mapping[str, Parameter],
    ) -> None:
        self._channel = channel
        self._routes = routes
        self._num_bytes = memory[channel.rank].nbytes
        self._rooms: dict[str, torch.Tensor] = {}
        for kind, starts in ((MASTER, rooms.masters), (GRADIENT, rooms.gradients)):
            for name, start in starts.items():
                home, spec = homes[name], spec_of[name]
                values = memory[home.rank][start : start + home.num_bytes].view(torch_dtype(spec.master))
                self._rooms[kind + name] = values.view(spec.global_shape)

    def bring(self, rounds: Rounds, number: int) -> None:
        """Called for -1, to begin, and before each round is updated; then `num_behind` times more.

        On return the round of this number is at home, and the masters of round `number - num_behind` have come back.
        """
        coming, going = names_of(rounds, number), names_of(rounds, number - 1)
        for each in _of(self._routes.gathers, coming):
            if each.giver == self._channel.rank:
                _copy(self._routes.sources[each.source], self._rooms[each.source.name], each.moves)
        # Rounds to come take the memory of the one before these two, which slower ranks may still read. An exchange is
        # between, except where the update has nothing of these two.
        memory_goes_on = names_of(rounds, number - 2) and any(rounds[number + 1 :])
        if coming or going or memory_goes_on:
            self._channel.exchange(b"", purpose="matrices of a round")
        for each in _of(self._routes.returns, going):
            if each.taker == self._channel.rank:
                source = self._rooms[MASTER + each.target.name.removeprefix(UPDATED)]
                _copy(source, self._routes.targets[each.target], each.moves)

    def whole(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix whose home is here, and its gradient. Asked for once, in its round; goes back as it is left then."""
        return self._rooms[MASTER + name], self._rooms[GRADIENT + name]

    @property
    def held_bytes(self) -> tuple[int, int]:
        """The most that an update holds: for whole matrices, and for messages."""
        return self._num_bytes, 0


def shared_matrices(
    channel: Channel, routes: MatrixRoutes, rounds: Rounds, homes: Mapping[str, Home], spec_of: Mapping[str, Parameter]
) -> SharedMatrices | None:
    """Memory for the rounds of an owner; None where its ranks share none. All of them call this together."""
    rooms = rooms_of(homes, rounds, channel.size)
    memory = channel.share(rooms.num_bytes) if rooms.num_bytes else None
    return None if memory is None else SharedMatrices(channel, routes, memory, homes, rooms, spec_of)


class SentMatrices:
    """Memory that comes and goes with each matrix, and messages."""

    num_behind = 2

    def __init__(
        self,
        channel: Channel,
        routes: MatrixRoutes,
        rounds: Rounds,
        held: Mapping[str, torch.Tensor],
        *,
        packs_on: torch.device | None,
    ) -> None:
        """rounds: of an update that is not made at once. held: the matrices whose home is here, without memory.
        packs_on: see `Mover`."""
        self._rank = channel.rank
        self._routes = routes
        self._rounds = rounds
        self._held = held
        self._rooms: dict[str, torch.Tensor] = {}
        """Whole gradients, masters and updated masters, by the names of their pieces."""
        self._begun: BegunBatch[Piece, Piece] | None = None
        self._mover: Mover[Piece, Piece] = Mover(
            channel,
            take=lambda piece, moves: parts_of(self._source(piece), moves),
            put=lambda piece, moves, elements: fill(self._target(piece), moves, elements),
            packs_on=packs_on,
            purpose="matrices",
        )

    def bring(self, rounds: Rounds, number: int) -> None:
        """Called as that of `SharedMatrices` is, and gives as much: in messages, of which one batch is under way."""
        begun = self._begun
        following = number + 1
        self._begun = self._mover.begin(self._batch(rounds, following), following, f"matrices, batch {following}")
        for name in names_of(rounds, number):
            if name in self._held:
                for kind in (GRADIENT, MASTER):
                    self._rooms[kind + name] = torch.empty_like(self._held[name], memory_format=torch.contiguous_format)
        if begun is not None:
            self._mover.finish(begun)
        for name in names_of(rounds, number - 2):
            self._rooms.pop(UPDATED + name, None)

    def whole(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix whose home is here, and its gradient. Asked for once, in its round."""
        self._rooms[UPDATED + name] = self._rooms.pop(MASTER + name)
        return self._rooms[UPDATED + name], self._rooms.pop(GRADIENT + name)

    @property
    def held_bytes(self) -> tuple[int, int]:
        """The most that an update holds: for whole matrices, and for messages."""
        rounds = self._rounds
        whole = [sum(self._held[name].nbytes for name in names if name in self._held) for names in rounds]
        # The masters of one round go back while those of another are updated and those of a third come, with gradients.
        in_rooms = max((sum(whole[max(0, at - 2) : at + 1]) + whole[at] for at in range(len(whole))), default=0)
        messages: dict[tuple[int, bool], int] = {}
        for number in range(len(rounds) + 2):
            batch = [each for each in self._batch(rounds, number) if each.giver != each.taker]
            for is_sent in (True, False):
                num_bytes = sum(each.num_bytes for each in batch if (each.giver == self._rank) == is_sent)
                messages[number % 2, is_sent] = max(messages.get((number % 2, is_sent), 0), num_bytes)
        return in_rooms, sum(messages.values())

    def _batch(self, rounds: Rounds, number: int) -> Deliveries:
        """What travels together: what goes back first, for its memory is free before more comes."""
        return [
            *_of(self._routes.returns, names_of(rounds, number - 2)),
            *_of(self._routes.gathers, names_of(rounds, number)),
        ]

    def _source(self, piece: Piece) -> torch.Tensor:
        return self._rooms[piece.name] if piece.name.startswith(UPDATED) else self._routes.sources[piece]

    def _target(self, piece: Piece) -> torch.Tensor:
        return self._routes.targets[piece] if piece.name.startswith(UPDATED) else self._rooms[piece.name]


def names_of(rounds: Rounds, number: int) -> Sequence[str]:
    """The matrices of a round; none before the first one and after the last one."""
    return rounds[number] if 0 <= number < len(rounds) else ()


def _copy(source: torch.Tensor, target: torch.Tensor, moves: Sequence[Move]) -> None:
    fill(target, moves, parts_of(source, moves))


def _of(deliveries: Mapping[str, Deliveries], names: Iterable[str]) -> Iterator[Delivery[Piece, Piece]]:
    return chain.from_iterable(deliveries.get(name, ()) for name in names)


_UNCUT = 1 << 60
"""Bytes of messages: rounds keep them small, and no plan cuts them."""


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
        order = [spec.name for spec in reversed(inventory.specs)]
        if not channel.progresses_alone:
            # No bucket travels while others are updated, so none has to be ready first. Ranks wait for each other once
            # a round: with the largest ones first all have about as much to do in each.
            order.sort(key=lambda name: -homes[name].work if name in homes else 0)
        self._rounds = rounds_of(homes, order, buffers.owner)
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
        self._routes = self._agree(channel)
        held = {name: each.parameter for name, each in self._held.items()}
        packs_on = next((each.master.device for each in buffers.buckets if each.plan.trainable), None)
        self._sent = SentMatrices(channel, self._routes, self._rounds, held, packs_on=packs_on)
        shared = None
        if channel.device.type == "cpu":
            shared = shared_matrices(channel, self._routes, self._rounds, homes, self._spec_of)
        self._rooms: SharedMatrices | SentMatrices = shared or self._sent

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
        return self._rooms.held_bytes

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Of gradients, and of masters, that go from this rank to others in an update of all matrices."""
        sent = {True: 0, False: 0}
        for each in chain(*self._routes.gathers.values(), *self._routes.returns.values()):
            if each.giver == self._rank != each.taker:
                num_elements = sum(move.num_elements for move in each.moves)
                sent[each.source.name.startswith(GRADIENT)] += num_elements * each.dtype.itemsize
        return sent[True], sent[False]

    @torch.no_grad()
    def carry_out(
        self,
        gradients: Mapping[str, torch.Tensor],
        touched: Collection[str],
        step: Callable[[int], None],
        *,
        at_once: bool,
    ) -> Iterator[int]:
        """Bring together, update and give back. Yields 0 once the first parts are on their way, and then how many
        rounds are over: the masters of their matrices have their new values. All ranks come to its end.

        gradients: of what is owned here, by name. touched: names that have a gradient on any rank; the others stay.
        step: updates this rank's matrices of a round. at_once: there is one round, 0; the same on all ranks.
        """
        rounds = [[name for name in names if name in touched] for names in self._rounds]
        rooms = self._rooms
        if at_once:  # shared memory has room for a few rounds, and not for all
            rounds, rooms = [[*chain(*rounds)]], self._sent
        given: dict[Piece, torch.Tensor] = {}
        for name in self._parts.keys() & set(touched):
            given |= self._placed(GRADIENT, name, gradients[name])
        self._routes.sources.update(given)
        rooms.bring(rounds, -1)
        yield 0
        for number in range(len(rounds) + rooms.num_behind):
            rooms.bring(rounds, number)
            if 0 <= (last := number - rooms.num_behind) < len(rounds) - 1:
                yield last + 1
            self._update(rooms, names_of(rounds, number), number, step)
        for piece in given:  # views would keep buffers that are given back
            del self._routes.sources[piece]
        yield len(self._rounds)

    def _update(
        self, rooms: SharedMatrices | SentMatrices, names: Sequence[str], number: int, step: Callable[[int], None]
    ) -> None:
        mine = [(name, self._held[name].parameter) for name in names if name in self._held]
        for name, parameter in mine:
            parameter.data, parameter.grad = rooms.whole(name)
        if mine or not number:
            step(number)
        for _, parameter in mine:
            parameter.grad = None
            parameter.data = _without_memory(parameter, parameter.shape)

    def _placed(self, kind: str, name: str, tensor: torch.Tensor) -> dict[Piece, torch.Tensor]:
        return placed(kind + name, tensor.detach(), self._spec_of[name], self._parts[name].segment)

    def _agree(self, channel: Channel) -> MatrixRoutes:
        """What this rank gives and gets: of each matrix to bring it together, and to give it back."""
        masters: dict[Piece, torch.Tensor] = {}
        taken: dict[Piece, torch.Tensor] = {}
        for name, each in self._parts.items():
            masters |= self._placed(MASTER, name, each.parameter)
            taken |= self._placed(UPDATED, name, each.parameter)
        sources, targets = [*masters], [*taken]
        for name, each in self._parts.items():
            sources += self._placed(GRADIENT, name, each.parameter)
        for name, each in self._held.items():
            whole = Piece(
                name="", dtype=dtype_name(each.parameter.dtype), global_shape=self._spec_of[name].global_shape
            )
            sources.append(replace(whole, name=UPDATED + name))
            targets += [replace(whole, name=kind + name) for kind in (MASTER, GRADIENT)]
        plan, _ = consent(channel, sources, targets, max_bytes=_UNCUT, cast=False)
        deliveries = PlanDeliveries(plan, channel.rank, sources, targets)
        gathers: dict[str, Deliveries] = {}
        returns: dict[str, Deliveries] = {}
        for delivery in chain(*deliveries.batches(in_order=False)):
            piece = delivery.source if delivery.giver == channel.rank else delivery.target
            kind, _, name = piece.name.partition(" ")
            (returns if kind == UPDATED.strip() else gathers).setdefault(name, []).append(delivery)
        return MatrixRoutes(gathers=gathers, returns=returns, sources=masters, targets=taken)


def _whole(spec: Parameter, like: torch.Tensor) -> Owned:
    """A matrix in the hands of an optimizer, without memory."""
    segment = Segment(name=spec.name, run=Run(0, math.prod(spec.global_shape)), start=0)
    return Owned(segment=segment, parameter=master(_without_memory(like, spec.global_shape), None, is_part=False))


def _without_memory(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape))
