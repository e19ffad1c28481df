"""Who reads which blocks of a checkpoint, and who gets what of them, decided by every rank alone and alike.

A block is what one checksum covers, so that it is read whole. Blocks without a reader stay unread, and each other block
is read once, by a rank that needs it. The ranks that need the same stretch of blocks deal it out among them: in equal
parts, but a part is no smaller than what each part costs besides its bytes is worth.

Figure 1. A stored piece of 9 blocks. Rank 0 wants columns of it, rank 1 and rank 2 want rows. The stretches end where
the set of needers changes; the letters say who reads::

    needed by 0    0 0 0 0 0 0 0 0 0
    needed by 1    1 1 1 1
    needed by 2          2 2 2
    read by        a b b|b|a c|a a a      a: rank 0, b: rank 1, c: rank 2

A rank looks once at everything that is stored and wanted, but plans only for the stored pieces that it needs itself
(and, if some ranks do not see the storage, for what those need): its work hardly grows with the number of ranks.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise, product

from shardwise.checkpoint.contents import StoredPiece
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.routes.holders import Holders, holders_by_tensor
from shardwise.space import Move, Piece, Run, moves
from shardwise.space.boxes import row_major_strides
from shardwise.space.pieces import known_part


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """Bytes of a stored piece: whole blocks, of which the last one of the piece may be shorter."""

    ordinal: int
    """The position of the stored piece."""
    start: int
    """The first byte in the piece."""
    stop: int
    """The byte after the last."""
    stored: StoredPiece = field(compare=False, repr=False)

    @property
    def place(self) -> tuple[str, int]:
        """The file, and the first byte in it."""
        return self.stored.file, self.stored.start + self.start


def plan_reads(
    stored: Sequence[StoredPiece],
    wanted: Sequence[Sequence[Piece]],
    rank: int,
    *,
    block_bytes: int,
    readers: Collection[int],
) -> "ReadPlan":
    """Plan what `rank` reads, so that the reads of all ranks make up what anybody needs.

    `wanted` has a list per rank, of pieces under the names that their tensors have in the checkpoint; `readers` are the
    ranks that see the storage. All ranks give the same arguments, save for `rank`. A block goes to one of the readers
    that need it, and to one of all readers when no needer is one.
    Stored pieces of one tensor are disjoint, every piece has elements, and `block_bytes` is a multiple of every
    element's size. Raises KeyError when a wanted tensor is not stored.
    """
    return ReadPlan(stored, wanted, rank, block_bytes=block_bytes, readers=frozenset(readers))


_PART_BYTES = 4 << 20
"""A stretch of fewer bytes is not dealt out in parts, where there is much else to read."""

_LEAST_PARTS = 16
"""So many parts for each rank even out what one reads."""

_MAX_KNOWN = 4096
"""So many moves are remembered at most."""


class ReadPlan:
    """What one rank reads, and what any rank gets of any span. Made by `plan_reads`."""

    def __init__(
        self,
        stored: Sequence[StoredPiece],
        wanted: Sequence[Sequence[Piece]],
        rank: int,
        *,
        block_bytes: int,
        readers: frozenset[int],
    ) -> None:
        self._stored = stored
        self._rank = rank
        self._block_bytes = block_bytes
        self._readers = readers
        num_bytes = sum(each.num_bytes for each in stored) if len(readers) > 1 else 0
        self._part_blocks = max(1, min(_PART_BYTES, num_bytes // (_LEAST_PARTS * len(readers))) // block_bytes)
        """Blocks of the smallest part in which a stretch is dealt out, the same on all ranks."""
        self._all_readers = tuple(sorted(readers))
        self._wanted = holders_by_tensor(wanted)
        in_files = _by_ordinal(stored)
        if unknown := self._wanted.keys() - in_files.keys():
            raise KeyError(min(unknown))
        self._meeting: _SpanNeeds | None = None
        self._known_moves = _Moves()
        self._needed = {
            ordinal
            for name in {piece.name for piece in wanted[rank]}
            for piece in self._wanted[name].of_rank(rank)
            for ordinal in in_files[name].positions_overlapping(piece)
        }
        """Stored pieces with elements that this rank needs."""
        self._in_files = in_files
        self._names_of_others = {
            piece.name for other, wants in enumerate(wanted) if other not in readers for piece in wants
        }
        """Tensors that ranks without sight of the storage want."""

    @cached_property
    def _found(self) -> list[tuple[StoredSpan, bool]]:
        """What this rank reads, and whether others need something of it; ranks that read exactly never ask."""
        # Blocks that only ranks without sight of the storage need are dealt out among all readers, so that every
        # reader has to know them.
        examined = set[int]()
        if self._rank in self._readers:
            examined = self._needed.union(
                ordinal
                for name in self._names_of_others
                for piece in self._wanted[name].of_none_of(self._readers)
                for ordinal in self._in_files[name].positions_overlapping(piece)
            )
        found = [each for ordinal in examined for each in self._spans(ordinal)]
        # In the order of the files: what follows one another is read together, and the kernel reads ahead.
        found.sort(key=lambda each: each[0].place)
        return found

    @cached_property
    def own_reads(self) -> tuple[StoredSpan, ...]:
        """What this rank reads for itself alone, in order of file and byte. Spans are disjoint."""
        return tuple(span for span, is_handed_on in self._found if not is_handed_on)

    @cached_property
    def handed_reads(self) -> tuple[StoredSpan, ...]:
        """What this rank reads and others need something of, in the same order."""
        return tuple(span for span, is_handed_on in self._found if is_handed_on)

    @property
    def read_bytes(self) -> int:
        """Bytes of all that this rank reads."""
        return sum(span.stop - span.start for span in (*self.own_reads, *self.handed_reads))

    def files(self, *, read_for_others: bool) -> set[str]:
        """Data files from which this rank reads: its share of all, or all that it needs itself."""
        ordinals = {span.ordinal for span, _ in self._found} if read_for_others else self._needed
        return {self._stored[ordinal].file for ordinal in ordinals}

    @property
    def reads(self) -> tuple[StoredSpan, ...]:
        """All that this rank reads, in order of file and byte. Spans are disjoint."""
        return tuple(sorted((*self.own_reads, *self.handed_reads), key=lambda span: span.place))

    def needers(self, span: StoredSpan) -> tuple[int, ...]:
        """Return the ranks that need something of the span, in increasing order."""
        return tuple(sorted(self._met(span).needers()))

    def transfers(self, span: StoredSpan, rank: int) -> list[tuple[int, list[Move]]]:
        """Return what `rank` needs of the span: (index into its wanted list, moves into that piece), in order.

        The source of the moves is the span, read as the flat storage of its elements. The answer does not depend on
        the rank that asks. It is fastest for a rank that asks for itself, and for all ranks of a span in succession.
        """
        if rank == self._rank and span.ordinal not in self._needed:
            return []
        return self._met(span).transfers(rank)

    def _met(self, span: StoredSpan) -> "_SpanNeeds":
        # One span at a time is asked about, by all ranks in succession: what was found for the last one suffices.
        if self._meeting is None or self._meeting.span != span:
            self._meeting = _SpanNeeds(span, self._wanted[span.stored.piece.name], self._known_moves)
        return self._meeting

    def _spans(self, ordinal: int) -> Iterator[tuple[StoredSpan, bool]]:
        """What this rank reads of one stored piece, and whether others need something of it; as long as possible."""
        stored = self._stored[ordinal]
        wanted = self._wanted[stored.piece.name]
        found = wanted.overlapping(stored.piece)
        ranks_of = [wanted.positions_of(at).keys() for at in found]
        if stored.num_bytes <= self._block_bytes:
            stretches = iter([(0, 1, tuple(range(len(found))))])
        else:
            stretches = _stretches([self._touched_blocks(stored.piece, wanted.pieces[at]) for at in found])
        parties: dict[tuple[int, ...], tuple[tuple[int, ...], bool]] = {}
        begun = end = 0
        was_handed_on = False
        for first, last, active in stretches:
            if active not in parties:
                parties[active] = self._parties({rank for at in active for rank in ranks_of[at]})
            readers, is_handed_on = parties[active]
            num_parts = min(len(readers), max(1, round((last - first) / self._part_blocks)))
            low, high = _dealt(first, last, readers, num_parts, self._rank, ordinal)
            # Stretches that meet, and that are handed on alike, are one span: a rank reads them with one call.
            if low < high:
                if low != end or is_handed_on != was_handed_on:
                    if begun < end:
                        yield self._span(ordinal, begun, end), was_handed_on
                    begun, was_handed_on = low, is_handed_on
                end = high
        if begun < end:
            yield self._span(ordinal, begun, end), was_handed_on

    def _span(self, ordinal: int, first_block: int, last_block: int) -> StoredSpan:
        stored, size = self._stored[ordinal], self._block_bytes
        return StoredSpan(ordinal, first_block * size, min(last_block * size, stored.num_bytes), stored)

    def _parties(self, needers: set[int]) -> tuple[tuple[int, ...], bool]:
        """The ranks among which blocks that some ranks need are dealt out, in increasing order.

        And whether a rank besides this one needs them.
        """
        # A rank that needs a block and sees it reads it: what one needs alone is never sent. Else any reader does.
        readers = tuple(sorted(needers & self._readers)) or self._all_readers
        return readers, not needers <= {self._rank}

    def _touched_blocks(self, stored: Piece, wanted: Piece) -> list[tuple[int, int]]:
        """The blocks of a stored piece that have an element of a wanted one: ranges, in order, the longest possible."""
        item_bytes = itemsize_bytes(stored.dtype)
        ranges: list[tuple[int, int]] = []
        begun, end = -1, -1
        for move in moves(stored, wanted):
            for first, last in _block_ranges(move, item_bytes, self._block_bytes):
                if first > end:
                    if begun >= 0:
                        ranges.append((begun, end))
                    begun = first
                end = last
        return [*ranges, (begun, end)]


def _by_ordinal(stored: Sequence[StoredPiece]) -> dict[str, Holders]:
    """Where each tensor is stored: a position in the one list is the ordinal of a stored piece."""
    return holders_by_tensor([[each.piece for each in stored]])


def exact_moves(stored: Sequence[StoredPiece], wanted: Sequence[Piece]) -> Iterator[tuple[int, int, list[Move]]]:
    """Find what one rank reads when it reads exactly the elements that it wants, whatever the blocks.

    Gives (ordinal, index into `wanted`, moves from the stored piece's storage to the wanted one's), for one wanted
    piece after the other, and for each in the order of the stored pieces. Raises KeyError when a wanted tensor is not
    stored.
    """
    in_files = _by_ordinal(stored)
    between = _Moves().between if len(wanted) > 1 else moves
    for index, piece in enumerate(wanted):
        for ordinal in in_files[piece.name].positions_overlapping(piece):
            if found := between(stored[ordinal].piece, piece):
                yield ordinal, index, found


def extent(moves: Iterable[Move]) -> Run:
    """The elements of the source's storage from the first that some moves take to the last."""
    firsts, lasts = [], []
    for move in moves:
        strides = row_major_strides(move.source.block)
        firsts.append(move.source.first)
        lasts.append(firsts[-1] + sum((size - 1) * stride for size, stride in zip(move.shape, strides, strict=True)))
    return Run(min(firsts), max(lasts) + 1)


def missing(stored: Sequence[StoredPiece], wanted: Piece) -> int:
    """Return how many elements of `wanted` none of the stored pieces of its tensor has.

    It is exact also where stored pieces have elements in common, as those of a wrong manifest may.
    """
    in_files = _by_ordinal(stored).get(wanted.name)
    return wanted.num_elements if in_files is None else in_files.num_lacking(wanted)


class _SpanNeeds:
    """A span, and who needs what of it."""

    __slots__ = ("_found", "_known", "_source", "_wanted", "span")

    def __init__(self, span: StoredSpan, wanted: Holders, known: "_Moves") -> None:
        self.span = span
        self._source, self._wanted, self._known = _piece_of_span(span), wanted, known
        self._found = wanted.near(self._source)

    def needers(self) -> set[int]:
        """The ranks that need something of it."""
        return {rank for at in self._found if self._moves(at) for rank in self._wanted.positions_of(at)}

    def transfers(self, rank: int) -> list[tuple[int, list[Move]]]:
        """What `rank` needs: (position in its wanted list, moves into that piece), in order."""
        found = []
        for at in self._found:
            positions = self._wanted.positions_of(at).get(rank)
            if positions is not None and (moved := self._moves(at)):
                found += [(position, moved) for position in positions]
        found.sort(key=lambda transfer: transfer[0])
        return found

    def _moves(self, at: int) -> list[Move]:
        return self._known.between(self._source, self._wanted.pieces[at])


class _Moves:
    """Moves that were found before. Tensors that are cut alike are moved alike, whatever they are called.

    To find the moves of a span takes 30 to 60 microseconds, in which a rank copies 300 KiB. Most states have few
    shapes, and many tensors of each.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[Move]] = {}

    def between(self, source: Piece, target: Piece) -> list[Move]:
        """`space.moves` of two pieces of one tensor."""
        key = (source.global_shape, source.offset, source.shape, source.run, target.offset, target.shape, target.run)
        found = self._known.get(key)
        if found is None:
            # Rather forget all than grow with a state of a hundred thousand different shapes.
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            found = self._known[key] = moves(source, target)
        return found


def _piece_of_span(span: StoredSpan) -> Piece:
    """The elements of a stored piece in a span."""
    piece = span.stored.piece
    item_bytes = itemsize_bytes(piece.dtype)
    start, stop = span.start // item_bytes, span.stop // item_bytes
    if stop - start == piece.num_elements:
        return piece
    first = piece.elements.start
    row = math.prod(piece.shape[1:])
    if piece.shape and not (first + start) % row and not (first + stop) % row:
        # Whole rows are a box of their own, which is planned fastest.
        offset = (piece.offset[0] + (first + start) // row, *piece.offset[1:])
        return known_part(piece, offset, ((stop - start) // row, *piece.shape[1:]), None)
    return known_part(piece, piece.offset, piece.shape, Run(first + start, first + stop))


def _block_ranges(move: Move, item_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """The blocks of the source that one move touches: ranges in order, which may meet and share a block.

    Dims are joined from the innermost outwards while no block fits in the gaps between two steps. Then every block from
    the first to the last is touched, at any start of blocks. Steps further apart are separate ranges: there are never
    many more of them than the source has blocks.
    """
    begin = move.source.first * item_bytes
    stride = extent = item_bytes
    steps: list[range] = []
    for size, block in zip(reversed(move.shape), reversed(move.source.block), strict=True):
        if size > 1:
            # No block fits into the gap between two steps, so that none is skipped: one range from the first step to
            # the last.
            if stride - extent < block_bytes:
                extent += (size - 1) * stride
            else:
                steps.append(range(0, size * stride, stride))
        stride *= block
    for step in product(*reversed(steps)):
        first = begin + sum(step)
        yield first // block_bytes, (first + extent - 1) // block_bytes + 1


def _stretches(touched: Sequence[list[tuple[int, int]]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Cut blocks where the set of shares that touch them changes: (first, last, the positions of these shares)."""
    changes: dict[int, set[int]] = {}
    for at, ranges in enumerate(touched):
        for border in chain.from_iterable(ranges):
            changes.setdefault(border, set()).add(at)
    active = set[int]()
    for first, last in pairwise(sorted(changes)):
        # A share that ends and one that begins at the same border change places here at once.
        active ^= changes[first]
        if active:
            yield first, last, tuple(sorted(active))


_SCATTER = 2654435769
"""2**32 divided by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4): neighbours land far apart."""


def _dealt(first: int, last: int, ranks: tuple[int, ...], num_parts: int, rank: int, ordinal: int) -> tuple[int, int]:
    """The part of the blocks `first` to `last` that `rank` gets when some of `ranks` get equal parts.

    The ranks that get one, and the rank with the larger part, change from stretch to stretch, out of step with the
    pieces (weight, bias, weight, bias, ...).
    """
    at = bisect_left(ranks, rank)
    if at == len(ranks) or ranks[at] != rank:
        return first, first
    # Counted off, the first stretch of every tensor would go to the same rank, and with it all that is one block.
    scattered = ((ordinal + first) * _SCATTER % 2**32) * len(ranks) >> 32
    turn = (at - scattered) % len(ranks) - (len(ranks) - num_parts)
    if turn < 0:
        return first, first
    return first + (last - first) * turn // num_parts, first + (last - first) * (turn + 1) // num_parts
