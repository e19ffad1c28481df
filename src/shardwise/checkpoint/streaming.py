"""Streaming: every rank's pieces become whole tensors, in the files of their writers or in memory, in bounded memory.

All ranks go on in step, a window at a time: what a rank holds of another's window it sends there. Beside its own window
a rank has a message each way in memory, each at most as large.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch

from shardwise.checkpoint.arrangement import Arrangement
from shardwise.checkpoint.held import Held, bytes_of
from shardwise.checkpoint.safetensors_files import DataFile, Sink, cast_through
from shardwise.checkpoint.windows import part_of_piece, windows
from shardwise.comm import Channel
from shardwise.comm.local_tensors import torch_dtype
from shardwise.moving.mover import Delivery, Mover, by_distance
from shardwise.moving.parts import parts_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Move, Piece, PieceIndex, moves

__all__ = ["WindowFiller", "stream_whole"]


def stream_whole(channel: Channel, arrangement: Arrangement, held: Held, sink: Sink | None) -> None:
    """Fill this rank's file with whole tensors, out of what all ranks hold.

    `sink` is None on a rank whose file cannot be written. It goes on sending, so that the others do not wait; so
    does a rank whose file fails on the way, which raises the error (OSError) at the end.
    """
    filler = WindowFiller(channel, arrangement.holders, held)
    failure: OSError | None = None
    for current in zip_longest(*(_windows(arrangement.file(rank)) for rank in range(channel.size)), fillvalue=[]):
        mine = current[channel.rank]
        sizes = [piece.num_elements * itemsize_bytes(piece.dtype) for piece in mine]
        window = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = zip(mine, window.split(sizes), strict=True) if mine else ()
        filler.fill(current, {piece: part.view(torch_dtype(piece.dtype)) for piece, part in parts})
        if sink is not None and failure is None:
            try:
                sink.write(bytes_of(window))
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure


class WindowFiller:
    """Fills windows of whole tensors, window after window, out of the pieces that ranks hold."""

    def __init__(self, channel: Channel, holders: Mapping[Piece, tuple[int, ...]], held: Held) -> None:
        """holders: the ranks that hold each piece. held: what this rank has."""
        self._channel = channel
        self._holders = holders
        self._held = held
        self._pieces: dict[str, list[Piece]] = {}
        for piece in holders:
            self._pieces.setdefault(piece.name, []).append(piece)
        self._indexes: dict[str, PieceIndex] = {}
        self._targets: Mapping[Piece, torch.Tensor] = {}
        self._mover: Mover[Piece, Piece] = Mover(
            channel,
            take=self._take,
            room=lambda piece: self._targets[piece],
            packs_on=torch.device("cpu"),
            purpose="window of whole tensors",
        )

    def fill(self, windows: Sequence[Sequence[Piece]], targets: Mapping[Piece, torch.Tensor]) -> None:
        """Fill the pieces of this rank's window, which are flat `targets`; all ranks help each other with theirs."""
        own = self._channel.rank
        given = (each for taker, window in enumerate(windows) for each in self._deliveries(window, taker))
        self._targets = targets
        self._mover.run(
            by_distance((each for each in given if own in (each.giver, each.taker)), self._channel), num_under_way=1
        )
        self._targets = {}

    def _deliveries(self, window: Sequence[Piece], taker: int) -> Iterator[Delivery[Piece, Piece]]:
        """What fills a window: from the rank itself where it holds a piece, else from the holders in turn."""
        for target in window:
            pieces = self._pieces[target.name]
            if target.name not in self._indexes:
                self._indexes[target.name] = PieceIndex(pieces)
            for at in self._indexes[target.name].overlapping(target):
                holders = self._holders[pieces[at]]
                giver = taker if taker in holders else holders[at % len(holders)]
                yield Delivery(giver, taker, pieces[at], target, torch_dtype(target.dtype), moves(pieces[at], target))

    def _take(self, piece: Piece, moves: Sequence[Move]) -> Iterable[torch.Tensor]:
        """Parts of what this rank holds, in the dtype of the piece: tensors that are still to be cast have another."""
        dtypes = [torch_dtype(each) for each in self._held.casts.get(piece, ())]
        return (cast_through(part, dtypes) for part in parts_of(self._held.tensors[piece], moves))


def _windows(file: DataFile) -> Iterator[list[Piece]]:
    """The pieces of a file window by window; a piece is cut where a window ends."""
    sizes = [(piece.num_elements, itemsize_bytes(piece.dtype)) for piece in file.pieces]
    for window in windows(sizes):
        yield [part_of_piece(file.pieces[at], start, stop) for at, start, stop in window]
