"""Holders: the different pieces of a tensor, and where each of them is. The one index that all planning asks.

    reshard       held by ranks                        what covers a target, and which holders could give it
    whole, full   held by ranks                        what a window overlaps, and which holder gives it
    save          held by ranks                        the different pieces, and all holders of each
    load          stored in files, wanted by ranks     what is stored of a target; who wants something of a block

Figure 1. Ranks 0 and 1 hold replicas, and rank 2 holds the rest. What the ranks hold are entries, equal entries are one
piece, and its entries are a chain through `_next`::

    rank    0         1         2                piece   0 = w[0:2]         1 = w[2:4]
    holds   w[0:2]    w[0:2]    w[2:4]           first   0                  2
    entry   0         1         2                chain   0 -> 1 -> none     2 -> none
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from shardwise.space import Box, Piece, PieceIndex, check_cover
from shardwise.space.moves import elements_in_both, shared_elements
from shardwise.space.pieces import Block, blocks_of, reach, taken_in_order

_FEW = 4
"""With so many pieces none is looked up in an index: each is asked."""

_NONE = -1
"""After the last entry of a piece."""

Covering = tuple[int, int, Box | None]
"""A piece that gives, by position, how many elements it gives, and in which box; None: all that it shares."""


class Holders:
    """The pieces of one tensor. Every replica is one piece, so that replicas cost no planning.

    Made by `holders_by_tensor`. Derived facts are found at the first request: a rank makes holders for all tensors, and
    asks those of the few that it holds or wants.
    """

    # Plain numbers, not an object per entry: a thousand ranks have millions of entries, and as many objects would keep
    # the garbage collector busy for longer than the planning takes.
    __slots__ = (
        "_blocks",
        "_firsts",
        "_index",
        "_is_disjoint",
        "_lists",
        "_next",
        "_piece_of",
        "_pieces",
        "positions",
        "ranks",
    )

    def __init__(self, lists: Sequence[Sequence[Piece]]) -> None:
        """lists: what each rank holds, of this tensor and of others."""
        self._lists = lists
        self.ranks: list[int] = []
        """The rank of each entry, in rank order."""
        self.positions: list[int] = []
        """Where each entry is in the list of its rank."""
        self._pieces: list[Piece] | None = None
        self._index: PieceIndex | None = None
        self._blocks: list[list[Block]] | None = None
        self._is_disjoint: bool | None = None

    def entries(self) -> Iterator[tuple[int, Piece]]:
        """(rank, piece) of every entry, in rank order; on a rank in the order of its list."""
        return ((rank, self._lists[rank][at]) for rank, at in zip(self.ranks, self.positions, strict=True))

    @property
    def pieces(self) -> Sequence[Piece]:
        """The different pieces, in the order of their first entries."""
        if self._pieces is None:
            self._pieces = self._find_pieces()
        return self._pieces

    @property
    def tensor(self) -> Piece:
        """All of the tensor, as one piece."""
        first = self.pieces[0]
        return Piece(name=first.name, dtype=first.dtype, global_shape=first.global_shape)

    def positions_of(self, at: int) -> dict[int, list[int]]:
        """Where the piece `at` is: rank -> positions in the list of that rank."""
        found: dict[int, list[int]] = {}
        for entry in self._entries_of(at):
            found.setdefault(self.ranks[entry], []).append(self.positions[entry])
        return found

    def first_place(self, at: int) -> tuple[int, int]:
        """The first rank that has the piece `at`, and its position in the list of that rank."""
        return self.ranks[self._firsts[at]], self.positions[self._firsts[at]]

    def of_rank(self, rank: int) -> list[Piece]:
        """What `rank` holds."""
        pieces = self.pieces
        entries = range(bisect_left(self.ranks, rank), bisect_left(self.ranks, rank + 1))
        return [pieces[self._piece_of[entry]] for entry in entries]

    def of_none_of(self, ranks: Collection[int]) -> list[Piece]:
        """What somebody holds, but none of `ranks`."""
        pieces = self.pieces
        theirs = {at for at, rank in zip(self._piece_of, self.ranks, strict=True) if rank in ranks}
        return [piece for at, piece in enumerate(pieces) if at not in theirs]

    def overlapping(self, piece: Piece) -> list[int]:
        """The pieces that share an element with `piece`, by position, in increasing order."""
        if self._index is None:
            self._index = PieceIndex(self.pieces)
        return self._index.overlapping(piece)

    def near(self, piece: Piece) -> Sequence[int]:
        """The pieces that may share an element with `piece`, by position: all, where to ask each is quicker."""
        return range(len(self.pieces)) if len(self.pieces) <= _FEW else self.overlapping(piece)

    def positions_overlapping(self, piece: Piece) -> list[int]:
        """Where the pieces that share an element with `piece` are in their lists, in increasing order."""
        return sorted(self.positions[entry] for at in self.overlapping(piece) for entry in self._entries_of(at))

    def givers(self, at: int, taker: int) -> list[int]:
        """The entries of the piece `at` from which a rank may get it: its own if it has one, else all.

        Whole tensors take them in turn (`at` modulo their number); a reshard takes the one with the least to send.
        """
        entries = list(self._entries_of(at))
        return next(([entry] for entry in entries if self.ranks[entry] == taker), entries)

    def cover(self, target: Piece, *, taker: int, turn: int) -> tuple[list[Covering], list[Box]]:
        """Shares that give every element of `target` once, and the boxes without a holder.

        taker: the rank that wants it; its own pieces go first. turn: where pieces overlap, a different one of the
        others goes first for each turn.
        """
        pieces = self.pieces
        found = self.near(target)
        if self._no_two_overlap():
            if self._blocks is None:
                self._blocks = [blocks_of(piece) for piece in pieces]
            # The blocks of a piece are found once for all targets: for runs they cost more than the comparison.
            own_blocks = blocks_of(target)
            shared = [(at, elements_in_both(self._blocks[at], own_blocks)) for at in found]
            met: list[Covering] = [(at, number, None) for at, number in shared if number]
        else:
            own = [at for at in found if any(self.ranks[entry] == taker for entry in self._entries_of(at))]
            others = [at for at in found if at not in own]
            first = turn % len(others) if others else 0
            order = [*own, *others[first:], *others[:first]]
            taken, _ = taken_in_order(target, [pieces[at] for at in order])
            met = [(order[at], box.num_elements, box) for at, box in taken]
        if sum(num_elements for _, num_elements, _ in met) == target.num_elements:
            return met, []
        return met, taken_in_order(target, [pieces[at] for at in found])[1]

    def num_lacking(self, target: Piece) -> int:
        """How many elements of `target` have no holder, also where pieces overlap."""
        found = [self.pieces[at] for at in self.overlapping(target)]
        # Only these pieces are looked at: that no two of all overlap takes longer to find out.
        if all(stop <= start for (_, stop), (start, _) in pairwise(sorted(map(reach, found)))):
            return target.num_elements - sum(shared_elements(each, target) for each in found)
        return sum(box.num_elements for box in taken_in_order(target, found)[1])

    def _entries_of(self, at: int) -> Iterator[int]:
        entry = self._firsts[at]
        while entry != _NONE:
            yield entry
            entry = self._next[entry]

    def _find_pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        lasts: list[int] = []
        known: dict[tuple[object, ...], int] = {}
        self._piece_of: list[int] = []
        """The piece of each entry."""
        self._firsts: list[int] = []
        """The first entry of each piece."""
        self._next = [_NONE] * len(self.ranks)
        """For each entry the next one of the same piece."""
        if len(self.ranks) == 1:  # most tensors of a checkpoint, and there may be a hundred thousand
            self._piece_of, self._firsts = [0], [0]
            return [self._lists[self.ranks[0]][self.positions[0]]]
        for entry, (_, piece) in enumerate(self.entries()):
            # Not the name: all are of one tensor. The dtype and the shape count, for ranks may disagree on these, and
            # `check_cover` has to see it.
            at = known.setdefault((piece.offset, piece.shape, piece.run, piece.dtype, piece.global_shape), len(lasts))
            self._piece_of.append(at)
            if at == len(lasts):
                pieces.append(piece)
                self._firsts.append(entry)
                lasts.append(entry)
            else:
                self._next[lasts[at]] = entry
                lasts[at] = entry
        return pieces

    def _no_two_overlap(self) -> bool:
        if self._is_disjoint is None:
            self._is_disjoint = not check_cover(self.pieces) or all(
                len(self.overlapping(piece)) <= 1 for piece in self.pieces
            )
        return self._is_disjoint


def holders_by_tensor(lists: Sequence[Sequence[Piece]]) -> dict[str, Holders]:
    """For each tensor who holds what of it, in the order of their first pieces. lists: what each rank holds."""
    found: dict[str, Holders] = {}
    for rank, pieces in enumerate(lists):
        for position, piece in enumerate(pieces):
            holders = found.get(piece.name)
            if holders is None:
                holders = found[piece.name] = Holders(lists)
            holders.ranks.append(rank)
            holders.positions.append(position)
    return found


def in_order(holders: Mapping[str, Holders]) -> list[tuple[Piece, tuple[int, ...]]]:
    """The different pieces of all tensors with the ranks that hold each, in the order in which ranks hold them."""
    places = sorted(
        (*each.first_place(at), name, at) for name, each in holders.items() for at in range(len(each.pieces))
    )
    return [(holders[name].pieces[at], tuple(holders[name].positions_of(at))) for _, _, name, at in places]


def shared_pieces(holders: Mapping[str, Holders]) -> list[tuple[Piece, tuple[int, ...]]]:
    """The pieces that several ranks hold, each with these ranks."""
    return [(piece, ranks) for piece, ranks in in_order(holders) if len(ranks) > 1 and piece.num_elements]
