"""Demand: which pieces ranks want of each stored tensor, indexed so that a search does not ask all of them."""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shardwise.checkpoint.contents import StoredPiece
from shardwise.space import Piece, PieceIndex

__all__ = ["Demand", "Wanted", "WantedShare", "demands", "under_name"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A piece that a rank wants, and the stored tensor that has its elements; the shapes agree, the names may not."""

    piece: Piece
    tensor: str


@dataclass(slots=True)
class WantedShare:
    """A piece that somebody wants, under its stored name."""

    piece: Piece
    holders: dict[int, list[int]]
    """Who wants it: rank -> indices into the rank's wanted list."""


class Shares:
    """The different pieces that ranks want of one tensor. Replicas are one share, so that they cost no planning.

    All is kept in lists of plain numbers, for there may be millions and objects would keep the garbage collector busy.
    """

    __slots__ = ("_firsts", "_index", "_indices", "_next", "_pieces", "_ranks", "_share_of")

    def __init__(self, wanted: Sequence[Sequence[Wanted]], ranks: list[int], indices: list[int]) -> None:
        self._ranks, self._indices = ranks, indices
        self._pieces: list[Piece] = []
        self._firsts: list[int] = []
        """The first entry of each share."""
        self._share_of: list[int] = []
        """The share of each entry."""
        self._next: list[int] = [-1] * len(ranks)
        """The next entry of the same share, for each entry; -1 after the last."""
        lasts: list[int] = []
        known: dict[tuple[object, ...], int] = {}
        for entry, (rank, index) in enumerate(zip(ranks, indices, strict=True)):
            want = wanted[rank][index]
            piece = want.piece
            share = known.setdefault((piece.offset, piece.shape, piece.run), len(lasts))
            self._share_of.append(share)
            if share == len(lasts):
                self._pieces.append(under_name(piece, want.tensor))
                self._firsts.append(entry)
                lasts.append(entry)
            else:
                self._next[lasts[share]] = entry
                lasts[share] = entry
        self._index = PieceIndex(self._pieces)

    def overlapping(self, piece: Piece) -> list[WantedShare]:
        """The shares that have an element of `piece`."""
        return [WantedShare(self._pieces[share], self._holders(share)) for share in self._index.overlapping(piece)]

    def of_rank(self, rank: int) -> list[Piece]:
        """What `rank` wants."""
        entries = range(bisect_left(self._ranks, rank), bisect_left(self._ranks, rank + 1))
        return [self._pieces[self._share_of[entry]] for entry in entries]

    def of_none_of(self, ranks: Collection[int]) -> list[Piece]:
        """What somebody wants, but none of `ranks`."""
        theirs = {share for share, rank in zip(self._share_of, self._ranks, strict=True) if rank in ranks}
        return [piece for share, piece in enumerate(self._pieces) if share not in theirs]

    def _holders(self, share: int) -> dict[int, list[int]]:
        holders: dict[int, list[int]] = {}
        entry = self._firsts[share]
        while entry >= 0:
            holders.setdefault(self._ranks[entry], []).append(self._indices[entry])
            entry = self._next[entry]
        return holders


class Demand:
    """One stored tensor: where it lies, and who wants what of it. Indexes are built when first used."""

    __slots__ = ("_index", "_shares", "_stored", "_wanted", "indices", "ordinals", "ranks")

    def __init__(self, stored: Sequence[StoredPiece], wanted: Sequence[Sequence[Wanted]]) -> None:
        self._stored, self._wanted = stored, wanted
        self.ordinals: list[int] = []
        """The stored pieces of this tensor."""
        self.ranks: list[int] = []
        self.indices: list[int] = []
        """Entry i of what is wanted is `wanted[ranks[i]][indices[i]]`, in order of rank and index."""
        self._index: PieceIndex | None = None
        self._shares: Shares | None = None

    def ordinals_overlapping(self, piece: Piece) -> list[int]:
        """The stored pieces that have an element of `piece`."""
        if self._index is None:
            self._index = PieceIndex([self._stored[ordinal].piece for ordinal in self.ordinals])
        return [self.ordinals[at] for at in self._index.overlapping(piece)]

    @property
    def shares(self) -> Shares:
        """What is wanted."""
        if self._shares is None:
            self._shares = Shares(self._wanted, self.ranks, self.indices)
        return self._shares


def demands(stored: Sequence[StoredPiece], wanted: Sequence[Sequence[Wanted]]) -> dict[str, Demand]:
    """Return the demand for every stored tensor, by name; raises KeyError when a wanted tensor is not stored."""
    found: dict[str, Demand] = {}
    for ordinal, each in enumerate(stored):
        name = each.piece.name
        if name not in found:
            found[name] = Demand(stored, wanted)
        found[name].ordinals.append(ordinal)
    for rank, wants in enumerate(wanted):
        for index, want in enumerate(wants):
            demand = found[want.tensor]
            demand.ranks.append(rank)
            demand.indices.append(index)
    return found


def under_name(piece: Piece, name: str) -> Piece:
    """Return the same piece of the tensor `name`."""
    return piece if piece.name == name else replace(piece, name=name)
