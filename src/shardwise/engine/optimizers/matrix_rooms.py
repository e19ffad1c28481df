"""Where matrices are whole during an update, and the two ways in which their parts come there and go back.

CPU ranks of one host write into the memory of homes, and read out of it: one copy of each element for each way.

    rank 0   | put round 1 | all | take round 0 | update round 1 | put round 2 | all | take round 1 | ..
    rank 1   | put round 1 | all | take round 0 | update round 1 | put round 2 | all | take round 1 | ..
                              ^ an exchange: all parts of round 1 are at home, and round 0 is updated

Other ranks send messages. Those of one round travel while another is updated.

    round 0   gather | update   | give back |
    round 1          | gather   | update    | give back |
    round 2                     | gather    | update    | ..
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from shardwise.comm import Channel
from shardwise.comm.local_tensors import torch_dtype
from shardwise.moving.copies import fill, parts_of
from shardwise.moving.mover import BegunBatch, Delivery, Mover
from shardwise.plan import Parameter
from shardwise.plan.matrix_homes import Home, Rooms, rooms_of
from shardwise.space import Move, Piece

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
