"""Streaming: every rank's pieces become whole tensors, in the files of their writers or in memory, in bounded memory.

All ranks go on in step, a window at a time: what a rank holds of another's window it sends there. Beside its own window
a rank has a message each way in memory, each at most as large.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from shardwise.checkpoint.arrangement import Arrangement
from shardwise.checkpoint.held import Held, bytes_of
from shardwise.checkpoint.transfers import carry_out, cast_through, message_bytes, pack, swap_messages, unpack
from shardwise.checkpoint.windows import part_of_piece, windows
from shardwise.checkpoint.writing import DataFile, Sink
from shardwise.comm import Channel
from shardwise.comm.dtypes import torch_dtype
from shardwise.moving.parts import part_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Move, Part, Piece, PieceIndex, moves

__all__ = ["Sources", "fill_window", "stream_whole"]


@dataclass(frozen=True, slots=True)
class _Contribution:
    """What one rank gives to a stretch of a writer's window."""

    source_rank: int
    source: Piece
    target: Piece
    move: Move


def stream_whole(channel: Channel, arrangement: Arrangement, held: Held, sink: Sink | None) -> None:
    """Fill this rank's file with whole tensors, out of what all ranks hold.

    `sink` is None on a rank whose file cannot be written. It goes on sending, so that the others do not wait; so
    does a rank whose file fails on the way, which raises the error (OSError) at the end.
    """
    sources = Sources(arrangement.holders)
    failure: OSError | None = None
    for current in zip_longest(*(_windows(arrangement.file(rank)) for rank in range(channel.size)), fillvalue=[]):
        mine = current[channel.rank]
        sizes = [piece.num_elements * itemsize_bytes(piece.dtype) for piece in mine]
        window = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = zip(mine, window.split(sizes), strict=True) if mine else ()
        targets = {piece: part.view(torch_dtype(piece.dtype)) for piece, part in parts}
        fill_window(channel, sources, current, held, targets)
        if sink is not None and failure is None:
            try:
                sink.write(bytes_of(window))
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure


def fill_window(
    channel: Channel,
    sources: "Sources",
    windows: Sequence[Sequence[Piece]],
    held: Held,
    targets: Mapping[Piece, torch.Tensor],
) -> None:
    """Fill the pieces of this rank's window, which are flat `targets`; all ranks help each other with theirs."""
    given = {rank: sources.contributions(window, rank) for rank, window in enumerate(windows)}
    awaited: dict[int, list[_Contribution]] = {}
    for each in given[channel.rank]:
        awaited.setdefault(each.source_rank, []).append(each)

    def outgoing(rank: int) -> torch.Tensor:
        return pack([_taken(each, held) for each in given[rank] if each.source_rank == channel.rank])

    def incoming(rank: int) -> int:
        return message_bytes((each.move, itemsize_bytes(each.target.dtype)) for each in awaited.get(rank, []))

    def accept(rank: int, message: torch.Tensor) -> None:
        parts = ((each.move, targets[each.target].dtype, targets[each.target]) for each in awaited[rank])
        unpack(message, parts)

    for each in awaited.get(channel.rank, []):
        move, elements = _taken(each, held)
        carry_out(move, elements, targets[each.target])
    swap_messages(channel, outgoing, incoming, accept, purpose="window of whole tensors")


def _taken(contribution: _Contribution, held: Held) -> tuple[Move, torch.Tensor]:
    """What this rank gives, in the dtype of the target: the move out of the tensor that it holds, or of a cast part."""
    move, tensor = contribution.move, held.tensors[contribution.source]
    casts = held.casts.get(contribution.source)
    if not casts:
        return move, tensor
    part = part_of(tensor, move.source, move.shape)
    source = Part(0, move.shape, (0,) * len(move.shape))
    return Move(move.shape, source, move.target), cast_through(part, map(torch_dtype, casts))


class Sources:
    """Which rank gives which piece: the writer itself where it holds the piece, else holders in turn."""

    def __init__(self, holders: Mapping[Piece, tuple[int, ...]]) -> None:
        self._holders = holders
        self._pieces: dict[str, list[Piece]] = {}
        for piece in holders:
            self._pieces.setdefault(piece.name, []).append(piece)
        self._indexes: dict[str, PieceIndex] = {}

    def contributions(self, window: Sequence[Piece], writer: int) -> list[_Contribution]:
        """What fills the window of `writer`, and from which ranks, in the order of the window."""
        found = []
        for target in window:
            pieces = self._pieces[target.name]
            index = self._index(target.name)
            for at in index.overlapping(target):
                holders = self._holders[pieces[at]]
                rank = writer if writer in holders else holders[at % len(holders)]
                found += [_Contribution(rank, pieces[at], target, move) for move in moves(pieces[at], target)]
        return found

    def _index(self, name: str) -> PieceIndex:
        if name not in self._indexes:
            self._indexes[name] = PieceIndex(self._pieces[name])
        return self._indexes[name]


def _windows(file: DataFile) -> Iterator[list[Piece]]:
    """The pieces of a file window by window; a piece is cut where a window ends."""
    sizes = [(piece.num_elements, itemsize_bytes(piece.dtype)) for piece in file.pieces]
    for window in windows(sizes):
        yield [part_of_piece(file.pieces[at], start, stop) for at, start, stop in window]
