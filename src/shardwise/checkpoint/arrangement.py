"""Arrangement: the files of a save, and which rank writes which piece. Pure: every rank decides the same.

A piece with one holder is written by it. The holders of replicas share them, so that all write about equally much::

    pieces of one rank   rank 0  ########     rank 1  ###          rank 2  #####
    a replica of 8       rank 0               rank 1     .....     rank 2       ...      filled up to one level
    written              rank 0  ########     rank 1  ########     rank 2  ########

A large replica on the border between two ranks is cut there, at the end of a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

from shardwise.checkpoint.contents import unwritable
from shardwise.checkpoint.safetensors_files import DataFile, lay_out
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.routes.holders import Holders, holders_by_tensor, in_order, shared_pieces
from shardwise.space import Piece, check_cover

FileLayout = Literal["pieces", "whole"]
"""`pieces`: each rank writes its own elements, without traffic; `whole`: every tensor is whole in one file."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Who writes what of a state that is held by several ranks."""

    file_layout: FileLayout
    tensors: Sequence[Piece]
    """The tensors, each as one whole piece, in the order in which ranks hold them."""
    written: Sequence[Sequence[Piece]]
    """For each rank the pieces that it writes."""
    holders: Mapping[str, Holders] = field(default_factory=dict)
    """Who holds what of each tensor. A conversion has none: nothing is held."""

    def __post_init__(self) -> None:
        # Names come out of files of other programs too, and out of rewrites.
        if problems := list(filter(None, (unwritable(each.name) for each in self.tensors))):
            raise CheckpointError(*problems)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.written)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.num_elements * itemsize_bytes(each.dtype) for each in self.tensors)

    @cached_property
    def shared(self) -> Sequence[tuple[Piece, Sequence[int]]]:
        """The pieces that several ranks hold, each with these ranks."""
        return shared_pieces(self.holders)

    @cached_property
    def _files(self) -> dict[int, DataFile]:
        return {}

    def file(self, rank: int) -> DataFile:
        """The file that `rank` writes."""
        # Rank 0 lays out all files when it commits, every other rank only its own: a header has a line per piece.
        if rank not in self._files:
            self._files[rank] = lay_out(self.written[rank])
        return self._files[rank]


def arrange(held: Sequence[Sequence[Piece]], file_layout: FileLayout, *, block_bytes: int) -> Arrangement:
    """Decide who writes what, from what every rank holds.

    Raises CheckpointError, with every finding, unless the pieces make up whole tensors: each element is held once, or
    by pieces that are alike (replicas).
    """
    holders = holders_by_tensor(held)
    # Pieces that overlap without being equal would be stored twice, with maybe two values; a hole would be loaded as
    # an error much later. Here every rank still has the same facts, and all refuse.
    if findings := check_cover(piece for each in holders.values() for piece in each.pieces):
        raise CheckpointError(*(f"the ranks together do not hold whole tensors: {each}" for each in findings))
    tensors = [each.tensor for each in holders.values()]
    if file_layout == "pieces":
        written = assign_pieces(holders, len(held), block_bytes=block_bytes)
    else:
        written = assign_tensors(tensors, len(held))
    return Arrangement(file_layout=file_layout, tensors=tensors, written=written, holders=holders)


_SPLIT_BYTES = 1 << 20
"""Replicas larger than this are cut where ranks' shares meet: shares differ by no more."""


def assign_pieces(holders: Mapping[str, Holders], num_ranks: int, *, block_bytes: int) -> list[list[Piece]]:
    """For each rank the pieces that it writes: parts of what it holds, about equally many bytes on all.

    Pieces of one holder are written by it. Replicas fill up the ranks that have less, in the order of the pieces. A
    large one on the border between two ranks is cut there, at a multiple of `block_bytes`.
    """
    written: list[list[Piece]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    # Replicas with the same holders are dealt out together: one by one, each would be rounded to whole pieces.
    shared: dict[tuple[int, ...], list[Piece]] = {}
    for piece, ranks in in_order(holders):
        if len(ranks) == 1:
            written[ranks[0]].append(piece)
            load[ranks[0]] += _num_bytes(piece)
        else:
            shared.setdefault(ranks, []).append(piece)
    # Those with fewest holders have the least choice, and go first.
    for ranks, pieces in sorted(shared.items(), key=lambda item: (len(item[0]), item[0])):
        room = _room(ranks, load, sum(map(_num_bytes, pieces)))
        for rank, share in zip(ranks, _deal(pieces, room, block_bytes), strict=True):
            written[rank] += share
            load[rank] += sum(map(_num_bytes, share))
    return written


def assign_tensors(tensors: Sequence[Piece], num_ranks: int) -> list[list[Piece]]:
    """For each rank the whole tensors that it writes: a stretch of the list, about equally many bytes each."""
    total = sum(map(_num_bytes, tensors))
    ends = accumulate(map(_num_bytes, tensors))
    written: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for tensor, end in zip(tensors, ends, strict=True):
        # By its middle: a tensor on the border of two shares goes to the rank that would have more of it.
        middle = end - _num_bytes(tensor) / 2
        written[min(num_ranks - 1, int(middle * num_ranks / total)) if total else 0].append(tensor)
    return written


def _num_bytes(piece: Piece) -> int:
    return piece.num_elements * itemsize_bytes(piece.dtype)


def _room(ranks: Sequence[int], load: Sequence[int], num_bytes: int) -> list[int]:
    """How many of `num_bytes` each rank takes so that their loads become as equal as can be (filling up from below)."""
    order = sorted(ranks, key=lambda rank: (load[rank], rank))
    level, rest = 0, num_bytes
    for count, rank in enumerate(order, 1):
        following = load[order[count]] if count < len(order) else None
        level = load[rank] + -(-rest // count)
        if following is None or level <= following:
            break
        rest -= (following - load[rank]) * count
    return [max(0, level - load[rank]) for rank in ranks]


def _deal(pieces: Sequence[Piece], room: Sequence[int], block_bytes: int) -> list[list[Piece]]:
    """Give the pieces, in order, to takers with so much room; the last taker takes what is left."""
    shares: list[list[Piece]] = [[] for _ in room]
    taker, left = 0, room[0]
    for piece in pieces:
        rest: Piece | None = piece
        while rest is not None:
            # A large piece is cut at blocks only, so that every part has the checksums of whole blocks of its own.
            least = block_bytes if _num_bytes(rest) > _SPLIT_BYTES else 1
            while left < least and taker < len(room) - 1:
                taker += 1
                left = room[taker]
            taken, rest = _cut(rest, left, block_bytes) if taker < len(room) - 1 else (rest, None)
            shares[taker].append(taken)
            left -= _num_bytes(taken)
    return shares


def _cut(piece: Piece, num_bytes: int, block_bytes: int) -> tuple[Piece, Piece | None]:
    """About the first `num_bytes` of a piece, and the rest; small pieces stay whole."""
    taken_bytes = num_bytes // block_bytes * block_bytes
    if _num_bytes(piece) <= _SPLIT_BYTES or not 0 < taken_bytes < _num_bytes(piece):
        return piece, None
    middle = piece.elements.start + taken_bytes // itemsize_bytes(piece.dtype)
    return piece.within(piece.elements.start, middle), piece.within(middle, piece.elements.stop)
