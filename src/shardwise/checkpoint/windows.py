"""Windows: any parts of a checkpoint, or of what a rewrite makes of it, in one process and in bounded memory.

A `PieceReader` reads one window after the other, verified. Where elements go is a list of `ReadTarget`s, whether they
stay as they are, become columns, or are cast. Neighbours are joined first: a tensor that is split into thousands of
columns is thousands of stored pieces, and planned one by one they cost more than their bytes.

Figure 1. Outputs `a`, `b`, `c` are columns of `w`, two each. They follow one another in memory at a distance of 10::

    w (4, 6)      a a b b c c
    memory        [a: 4 x 2, spare 2][b: 4 x 2, spare 2][c: 4 x 2, spare 2]
    one target    w[:, 0:6] as (4, 3, 2) with strides (2, 10, 1): the dim of 6 is folded in two
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self, TypeAlias

import torch

from shardwise.checkpoint.contents import Contents, Place, StoredPiece, StoredTensor
from shardwise.checkpoint.read_plan import exact_moves, extent, plan_reads
from shardwise.checkpoint.reading import BatchReader, DataFiles, GrowingBuffer, batches_of
from shardwise.checkpoint.safetensors_files import cast_through, is_plain, plain_bytes
from shardwise.checkpoint.stores import mapped, refusals
from shardwise.comm.local_tensors import bytes_of, torch_dtype
from shardwise.errors import CheckpointError
from shardwise.moving.copies import fill, part_of, parts_of, put
from shardwise.plan.dtypes import ALIGNMENT_BYTES, aligned, itemsize_bytes
from shardwise.rewrite.metas import KEPT_FILL, needed_casts, number_of
from shardwise.space import Move, Piece, Run, check_cover, moves
from shardwise.space.moves import elements_together, moves_between, runs_of

WINDOW_BYTES = 8 << 20
"""So much is in memory at a time, in addition to the batch that is being read."""


LARGE_WINDOW_BYTES = 32 << 20
"""So much is put together at a time where smaller parts would read blocks again and again."""


BATCH_BYTES = 4 << 20
"""So much is read at a time: it is verified and copied while it is in the cache."""


_STRIP_BYTES = 16 << 10
"""Below so many bytes a read costs more than the bytes that it brings."""

_FEW_STRIPS = 256
"""Up to so many take some milliseconds, and are read alone."""

_READ_LIMIT = 1.05
"""So many times the bytes that are needed may be read for few strips."""


_MAPPED_LIMIT = 4
"""In so many times the bytes that are needed strips are looked for where the kernel has the file.

Of one tensor in LARGE_WINDOW_BYTES at a time.
"""


Stretch = tuple[int, int, int]
"""(position in the list, first element, the element after the last)."""


def windows(
    sizes: Iterable[tuple[int, int]], *, max_bytes: int | None = None, grains: Sequence[int] = ()
) -> Iterator[list[Stretch]]:
    """Cut a list of (number of elements, bytes of one) into windows of at most `max_bytes` (WINDOW_BYTES), in order.

    grains: each is cut after a multiple of so many elements, where a window has room for as many.

    >>> list(windows([(3, 4), (0, 4), (2, 8)]))
    [[(0, 0, 3), (2, 0, 2)]]
    >>> list(windows([(25, 4)], max_bytes=64, grains=[5]))
    [[(0, 0, 15)], [(0, 15, 25)]]
    """
    window: list[Stretch] = []
    max_bytes = max_bytes or WINDOW_BYTES
    room = max_bytes
    for at, (num_elements, itemsize) in enumerate(sizes):
        start = 0
        while start < num_elements:
            # A window with room for less than one element of the widest dtype is full.
            if room < ALIGNMENT_BYTES:
                yield window
                window, room = [], max_bytes
            stop = min(num_elements, start + room // itemsize)
            # Cut between whole rows where the window has room for one: a part of a row, rows and a part of another are
            # planned and copied as three boxes, whole rows as one.
            if grains and stop < num_elements:
                whole = stop - stop % grains[at]
                if whole <= start and window:
                    room = 0
                    continue
                stop = whole if whole > start else stop
            window.append((at, start, stop))
            room -= aligned((stop - start) * itemsize)
            start = stop
    if window:
        yield window


def part_of_piece(piece: Piece, start: int, stop: int) -> Piece:
    """The piece's elements from `start` to `stop`; all of them are the piece itself, which is planned fastest."""
    if stop - start == piece.num_elements:
        return piece
    first = piece.elements.start
    return piece.within(first + start, first + stop)


def pieces_in_windows(
    pieces: Sequence[Piece], *, max_bytes: int | None = None, grains: Sequence[int] = ()
) -> Iterator[list[Piece]]:
    """Pieces in `windows`, of whose arguments these are: a piece is cut where a window ends."""
    sizes = [(piece.num_elements, itemsize_bytes(piece.dtype)) for piece in pieces]
    for window in windows(sizes, max_bytes=max_bytes, grains=grains):
        yield [part_of_piece(pieces[at], start, stop) for at, start, stop in window]


class Scales(Protocol):
    """By what elements of a piece are multiplied as they are read: see `block_scales`."""

    @property
    def scales(self) -> Piece:
        """What is needed of them: a stored piece."""

    @property
    def values(self) -> torch.Tensor:
        """The memory that takes it."""

    def products(
        self, view: torch.Tensor, move: Move, taken: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied, (target, source), where `taken` are the elements of a move into the piece; part by part."""


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A stored piece, and the memory that takes its elements."""

    source: Piece
    view: torch.Tensor
    """Of the shape of the piece, with the strides that it has in the output."""
    dtypes: tuple[str, ...]
    """Those that the values pass through, from the stored one to that of the view; one only: they are copied."""
    folded: int | None = None
    """A dim of the piece that is two of the view: which of several outputs, and the index in it."""
    scales: Scales | None = None
    """By what elements are multiplied, before the casts that follow the second dtype, float32."""

    def memory(self, dtype: str) -> torch.Tensor | None:
        """The view, where its bytes are just the stored ones in their order, so that a file can be read into it."""
        is_plainly_stored = len(self.dtypes) == 1 and self.view.dtype == torch_dtype(dtype) and self.folded is None
        return self.view if is_plainly_stored and is_plain(self.view) else None

    def fill(self, moves: Iterable[Move], elements: Iterable[torch.Tensor]) -> None:
        """Put the elements of each of some moves into the piece where they belong, cast as they have to be."""
        if self.folded is None and self.scales is None and len(self.dtypes) <= 2:
            fill(self.view, moves, elements)
            return
        # The last cast is the copy itself. The others are made here, of a part at a time: a chain such as float32 ->
        # bfloat16 -> float32 rounds, which no single cast does.
        between = [torch_dtype(each) for each in self.dtypes[1:-1]]
        for move, taken in zip(moves, elements, strict=True):
            copies = self.copies(move, taken) if self.scales is None else self.scales.products(self.view, move, taken)
            for memory, source in copies:
                put(memory, cast_through(source, between))

    def copies(self, move: Move, taken: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied, (target, source), where `taken` are the elements of a move into the piece."""
        if self.folded is None:
            yield part_of(self.view, move.target, move.shape), taken
            return
        dim = self.folded
        box = [slice(first, first + size) for first, size in zip(move.target.offset, move.shape, strict=True)]
        view = self.view[(*box[:dim], slice(None), slice(None), *box[dim + 1 :])]
        size = view.shape[dim + 1]
        begin, stop = box[dim].start, box[dim].stop
        start = begin
        while start < stop:  # a part of one output, several whole ones, a part
            at, first = divmod(start, size)
            whole = 0 if first else (stop - start) // size
            length = whole * size or min(size - first, stop - start)
            source = taken.narrow(dim, start - begin, length)
            if whole:
                # Output by output: one copy of all, over a dim more, takes three times as long.
                yield from zip(view.narrow(dim, at, whole).unbind(dim), source.split(size, dim), strict=True)
            else:
                yield view.select(dim, at).narrow(dim, first, length), source
            start += length


def pieces_of_scales(contents: Contents, places: Iterable[Place]) -> list[Piece]:
    """What places need of scales."""
    # There may be a million of them, nearly all of one dtype.
    some = (place for place in places if len(place.dtypes) > 1)
    return [found.scales for place in some if (found := _scales_of(contents, place)) is not None]


def _scales_of(contents: Contents, place: Place) -> Scales | None:
    if (by := place.scales) is None:
        return None
    from shardwise.checkpoint.block_scales import BlockScales  # the core works without it

    return BlockScales.of(place.piece, by.block, contents.stored.tensors[by.source])


def targets_of_scales(targets: Iterable[ReadTarget]) -> list[ReadTarget]:
    """What has to be read before: the scales by which elements are multiplied."""
    found = [each.scales for each in targets if each.scales is not None]
    return [ReadTarget(each.scales, each.values, (each.scales.dtype,)) for each in found]


def targets_at(
    contents: Contents, places: Iterable[Place], memory: torch.Tensor, dtype: str, *, keeps: bool = False
) -> tuple[list[ReadTarget], list[Callable[[], None]]]:
    """What takes the elements of the places of a piece, and what writes those that are in no file.

    memory: in the shape of the piece's box with any strides, or flat for a run; of this dtype. keeps: whether it is
    that of a target.
    """
    targets: list[ReadTarget] = []
    paddings: list[Callable[[], None]] = []
    for place in places:
        view = place.view(memory)
        if (scales := _scales_of(contents, place)) is not None:
            dtypes = (place.dtypes[0], *needed_casts((*place.dtypes[2:], dtype)))
            targets.append(ReadTarget(place.piece, view, dtypes, scales=scales))
            continue
        dtypes = needed_casts((*place.dtypes, dtype))
        if place.fill is None:
            targets.append(ReadTarget(place.piece, view, dtypes))
        elif not (keeps and place.fill == KEPT_FILL):
            paddings.append(partial(put, view, padding_value(place.fill, dtypes).expand(view.shape)))
    return targets, paddings


def padding_value(number: str, dtypes: Sequence[str]) -> torch.Tensor:
    """A number (see `number_text`) as a tensor without dims: in the first of some dtypes, and cast to each of them.

    What a target keeps is 0 where there is no target.
    """
    first, *others = map(torch_dtype, dtypes)
    value = 0 if number == KEPT_FILL else number_of(number)
    # torch makes no tensor of float4: its zero, the only value that it is padded with, has no bits.
    zero = torch.zeros((), dtype=torch.uint8)
    made = zero.view(first) if first == torch.float4_e2m1fn_x2 else torch.tensor(value, dtype=first)
    return cast_through(made, others)


class _Neighbours:
    """Targets that follow one another along a dim of their source, at even distances in memory."""

    __slots__ = ("_dim", "_distance", "_first", "_last", "_num")

    def __init__(self, target: ReadTarget) -> None:
        self._first = self._last = target
        self._num = 1
        self._dim = self._distance = 0
        """Known from the second target on."""

    def takes(self, target: ReadTarget) -> bool:
        """Add a target, if it is the next one."""
        last = self._last
        ours, theirs = last.source, target.source
        if last.scales is not None or target.scales is not None:
            return False
        if ours.shape != theirs.shape or ours.run is not None or theirs.run is not None or last.dtypes != target.dtypes:
            return False
        if last.view.dtype != target.view.dtype or last.view.stride() != target.view.stride():
            return False
        steps = [dim for dim, (a, b) in enumerate(zip(ours.offset, theirs.offset, strict=True)) if a != b]
        if len(steps) != 1 or theirs.offset[steps[0]] != ours.offset[steps[0]] + ours.shape[steps[0]]:
            return False
        distance = int(target.view.storage_offset()) - int(last.view.storage_offset())
        if distance <= 0 or (self._num > 1 and (self._dim, self._distance) != (steps[0], distance)):
            return False
        self._dim, self._distance = steps[0], distance
        self._last = target
        self._num += 1
        return True

    def target(self) -> ReadTarget:
        """All of them as one."""
        first, dim = self._first, self._dim
        if self._num == 1:
            return first
        shape, strides = first.source.shape, tuple(first.view.stride())
        source = replace(first.source, shape=(*shape[:dim], self._num * shape[dim], *shape[dim + 1 :]))
        if shape[dim] == 1:
            strides = (*strides[:dim], self._distance, *strides[dim + 1 :])
        elif self._distance != shape[dim] * strides[dim]:
            view = first.view.as_strided(
                (*shape[:dim], self._num, *shape[dim:]), (*strides[:dim], self._distance, *strides[dim:])
            )
            return replace(first, source=source, view=view, folded=dim)
        return replace(first, source=source, view=first.view.as_strided(source.shape, strides))


def joined(targets: Iterable[ReadTarget]) -> list[ReadTarget]:
    """The same elements in as few targets as neighbours allow. All are in one memory."""
    rows: list[_Neighbours] = []
    latest: dict[str, _Neighbours] = {}
    for target in targets:
        # Only the latest row of each tensor is asked: targets come in the order of the output, in which neighbours
        # follow one another.
        row = latest.get(target.source.name)
        if row is None or not row.takes(target):
            row = latest[target.source.name] = _Neighbours(target)
            rows.append(row)
    return [row.target() for row in rows]


@dataclass(frozen=True, slots=True)
class ExactMoves:
    """What a target takes of a stored piece."""

    stored: StoredPiece
    target: ReadTarget
    moves: list[Move]
    num_bytes: int
    num_ranges: int
    """Of bytes that are together in the memory of both."""
    taken: Run | None
    """Of many short ranges the elements of the stored piece from the first to the last, where little is between."""

    @classmethod
    def of(cls, stored: Sequence[StoredPiece], targets: Sequence[ReadTarget]) -> "list[ExactMoves]":
        """What all targets take. Raises KeyError when a wanted tensor is not stored."""
        found = []
        for ordinal, index, moved in exact_moves(stored, [each.source for each in targets]):
            whole = cls._of(stored[ordinal], targets[index], moved)
            if whole.taken is None:
                found.append(whole)
                continue
            # What is looked at in memory is in memory, and a process that wants to write to it waits.
            room = LARGE_WINDOW_BYTES // (_MAPPED_LIMIT * itemsize_bytes(whole.stored.piece.dtype))
            num_elements = sum(move.num_elements for move in moved)
            if num_elements <= room:
                found.append(whole)
                continue
            for start in range(0, num_elements, room):
                part = moves_between(moved, start, min(start + room, num_elements))
                found.append(cls._of(whole.stored, whole.target, list(part)))
        return found

    @classmethod
    def _of(cls, stored: StoredPiece, target: ReadTarget, moved: list[Move]) -> Self:
        itemsize = itemsize_bytes(stored.piece.dtype)
        num_ranges = num_bytes = 0
        for move in moved:
            num_elements = move.num_elements
            num_ranges += num_elements // elements_together(move)
            num_bytes += num_elements * itemsize
        taken = None
        # Files of other formats need not align their tensors.
        if num_bytes < num_ranges * _STRIP_BYTES and num_ranges > 1 and not stored.start % itemsize:
            taken = extent(moved)
            taken = taken if taken.num_elements * itemsize <= _MAPPED_LIMIT * num_bytes else None
        return cls(stored, target, moved, num_bytes, num_ranges, taken)

    @property
    def place(self) -> tuple[str, int, int]:
        """The file, and its bytes from the first that is taken to the last; of those that are `taken`."""
        assert self.taken is not None
        itemsize = itemsize_bytes(self.stored.piece.dtype)
        start = self.stored.start + self.taken.start * itemsize
        return self.stored.file, start, start + self.taken.num_elements * itemsize

    def fill_from(self, memory: memoryview, at: int) -> None:
        """Fill the target from a file in memory, which begins with byte `at`: each move at once."""
        assert self.taken is not None
        dtype = torch_dtype(self.stored.piece.dtype)
        elements = torch.frombuffer(memory, dtype=dtype, count=self.taken.num_elements, offset=self.place[1] - at)
        sources = [replace(each.source, start=each.source.start - self.taken.start) for each in self.moves]
        moved = [replace(each, source=source) for each, source in zip(self.moves, sources, strict=True)]
        self.target.fill(moved, parts_of(elements, moved))


def fill_exactly(files: DataFiles, wanted: Iterable[ExactMoves]) -> None:
    """Fill targets from just the byte ranges that they need, unverified.

    Digests of the files see what is read straight into the memory of a target. Raises CheckpointError for what cannot
    be read.
    """
    others: list[ExactMoves] = []
    near: list[ExactMoves] = []
    for each in wanted:
        # Digests are of stretches that are read, and at a distance nothing is mapped.
        is_read = each.taken is None or files.digests is not None or files.num_ahead
        (others if is_read else near).append(each)
    for group in _mapped_together(near):
        (name, start, _), stop = group[0].place, max(each.place[2] for each in group)
        with (
            refusals(f"{files.store.location}/{name} cannot be read"),
            files.opened(name) as reader,
            mapped(reader, start, stop - start) as memory,
        ):
            if memory is None:
                others += group
                continue
            for each in group:
                each.fill_from(memory, start)
                files.read_bytes += each.num_bytes
    for read, found in files.in_order(partial(each.carried_out, files) for each in _exact_reads(others)):
        piece, target = read.stored.piece, read.target
        for (first, run), elements in zip(read.runs, found, strict=True):
            files.read_bytes += elements.nbytes
            if not read.is_straight:
                start = target.source.elements.start
                moved = moves(target.source.within(start + run.start, start + run.stop), target.source)
                target.fill(moved, parts_of(elements, moved))
            elif files.digests is not None:
                files.digests.see(piece, elements, first * elements.itemsize)


def _mapped_together(near: Iterable[ExactMoves]) -> Iterator[list[ExactMoves]]:
    """What follows one another in a file, as it is looked at in one piece of memory."""
    group: list[ExactMoves] = []
    name, begin, end = "", 0, 0
    for each in sorted(near, key=lambda one: one.place):
        file, start, stop = each.place
        if group and (file != name or start > end + _STRIP_BYTES or stop > begin + LARGE_WINDOW_BYTES):
            yield group
            group = []
        if not group:
            name, begin, end = file, start, stop
        group.append(each)
        end = max(end, stop)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _ExactRead:
    """Runs of a stored piece that a target takes, read together."""

    stored: StoredPiece
    target: ReadTarget
    is_straight: bool
    """Whether the target takes the bytes as they are, where it has them."""
    runs: list[tuple[int, Run]] = field(default_factory=list)
    """The first element in the stored piece, and which elements of the target's piece."""

    def carried_out(self, files: DataFiles) -> tuple["_ExactRead", list[torch.Tensor]]:
        """Read; the elements of each run, where the target has them if that is straight."""
        dtype = self.stored.piece.dtype
        memory = self.target.memory(dtype) if self.is_straight else None
        found = []
        name = self.stored.file
        with refusals(f"{files.store.location}/{name} cannot be read"), files.opened(name) as reader:
            for first, run in self.runs:
                if memory is None:
                    elements = torch.empty(run.num_elements, dtype=torch_dtype(dtype))
                else:
                    elements = plain_bytes(memory, run.start, run.stop).view(torch_dtype(dtype))
                start = self.stored.start + first * itemsize_bytes(dtype)
                reader.read_into(bytes_of(elements.view(torch.uint8)), start)
                found.append(elements)
        return self, found


def _exact_reads(wanted: Iterable[ExactMoves]) -> Iterator[_ExactRead]:
    """The runs that targets take, up to BATCH_BYTES of one piece together."""
    for each in wanted:
        itemsize = itemsize_bytes(each.stored.piece.dtype)
        is_straight = each.target.memory(each.stored.piece.dtype) is not None
        read, room = _ExactRead(each.stored, each.target, is_straight), max(BATCH_BYTES, itemsize)
        for source, run in runs_of(each.moves):
            start = 0
            while start < run.num_elements:
                if room < itemsize:
                    yield read
                    read, room = _ExactRead(each.stored, each.target, is_straight), max(BATCH_BYTES, itemsize)
                stop = min(run.num_elements, start + room // itemsize)
                read.runs.append((source.start + start, Run(run.start + start, run.start + stop)))
                room -= (stop - start) * itemsize
                start = stop
        if read.runs:
            yield read


Read: TypeAlias = Callable[[Sequence[Piece]], Sequence[torch.Tensor]]
"""Reads the elements of pieces, flat; they hold until the next call."""


class PieceReader:
    """Reads pieces of stored tensors, or of a rewrite's outputs, into its own buffer.

    Each call takes the buffer over from the one before. Every block that a call needs is read once, verified, and
    copied to all places of its elements in the pieces.
    """

    def __init__(self, files: DataFiles, contents: Contents, *, window: GrowingBuffer | None = None) -> None:
        """contents: what the checkpoint holds, or what a rewrite makes of it.

        window: its own buffer, which it shares with readers that read when what it has read is used up.
        """
        self.contents = contents
        self._files = files
        self._in_files = contents.stored.tensors
        self._is_stored = contents.stored is contents
        self._buffer = window or GrowingBuffer(WINDOW_BYTES if self._is_stored else LARGE_WINDOW_BYTES)

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The elements of each piece, flat, in its dtype; they hold until the next call.

        Verified where the format has checksums; raises CheckpointError for damage and for what cannot be read. What no
        file holds is left as it is: see `check_whole`.
        """
        parts = self._buffer.parts([(each.num_elements, torch_dtype(each.dtype)) for each in pieces])
        targets: list[ReadTarget] = []
        for piece, part in zip(pieces, parts, strict=True):
            memory = part if piece.run is not None else part.view(piece.shape)
            places = self.contents.places(piece, piece.name)
            found, paddings = targets_at(self.contents, places, memory, piece.dtype)
            targets += found
            for pad in paddings:
                pad()
        # Without a rewrite each piece is one target already.
        targets = targets if self._is_stored else joined(targets)
        # Scales before the elements that are multiplied by them.
        if scales := targets_of_scales(targets):
            self._fill(scales)
        self._fill(self._after_straight(targets))
        return parts

    def _after_straight(self, targets: Sequence[ReadTarget]) -> list[ReadTarget]:
        """Fill those whose bytes can be read straight to where they belong; returns the others.

        That saves a copy, and the blocks around what is needed. Where blocks are verified they are read as a whole, and
        a store that is far reads many at a time.
        """
        if self.contents.verifiable or self._files.num_ahead:
            return list(targets)
        straight, others = list[ExactMoves](), list[ReadTarget]()
        for target in targets:
            stored = self._stored(target.source.name)
            # All pieces of a tensor are stored in its dtype.
            is_plain_copy = stored and target.memory(stored[0].piece.dtype) is not None
            wanted = ExactMoves.of(stored, [target]) if is_plain_copy else []
            if is_plain_copy and not is_in_strips(wanted)[0]:
                straight += wanted
            else:
                others.append(target)
        fill_exactly(self._files, straight)
        return others

    def _fill(self, targets: Sequence[ReadTarget]) -> None:
        wanted = [target.source for target in targets]
        # Of these tensors alone: a plan for all that is stored would take longer than the window.
        stored = [each for name in dict.fromkeys(piece.name for piece in wanted) for each in self._stored(name)]
        block_bytes = self.contents.block_bytes
        plan = plan_reads(stored, [wanted], 0, block_bytes=block_bytes, readers={0})
        max_bytes = self._files.request_bytes(plan.read_bytes) if self._files.num_ahead else BATCH_BYTES
        batches = batches_of(plan.reads, block_bytes=block_bytes, max_bytes=max_bytes)
        with BatchReader(self._files, self.contents, verify=True) as reader:
            for begun in reader.ahead((batch, None) for batch in batches):
                for span, elements in reader.finish(begun).items():
                    # Right after it was verified, so that the copy finds it in the cache.
                    if self._files.digests is not None:
                        self._files.digests.see(span.stored.piece, elements, span.start)
                    for index, moves in plan.transfers(span, 0):
                        targets[index].fill(moves, parts_of(elements, moves))

    def _stored(self, name: str) -> Sequence[StoredPiece]:
        return self._in_files[name].pieces


def is_in_strips(wanted: Sequence[ExactMoves], files: DataFiles | None = None) -> tuple[bool, int]:
    """Whether pieces are stored in ranges so short that it costs more to read each alone.

    And the bytes of blocks that take no longer. files: those in which strips need not be read, where they are near.
    """
    num_ranges = num_bytes = 0
    for each in wanted:
        num_ranges += each.num_ranges
        num_bytes += each.num_bytes
    if files is not None:
        near = [each for each in wanted if each.taken is not None]
        if all(_can_map(files, name) for name in {each.stored.file for each in near}):
            num_ranges -= sum(each.num_ranges for each in near)
    many = num_ranges * _STRIP_BYTES if num_ranges > _FEW_STRIPS else 0
    return num_bytes < num_ranges * _STRIP_BYTES, max(int(_READ_LIMIT * num_bytes), many)


def _can_map(files: DataFiles, name: str) -> bool:
    """Whether bytes of a file can be had where the kernel has them; not of one that cannot be opened."""
    if files.num_ahead:
        return False
    try:
        with files.opened(name) as reader, mapped(reader, 0, 1) as memory:
            return memory is not None
    except OSError:
        return False


def check_whole(contents: Contents, tensors: Iterable[StoredTensor]) -> None:
    """Raise CheckpointError, with every finding, unless the stored pieces of each tensor make it up."""
    findings = []
    for tensor in tensors:
        if tensor.pieces:
            findings += check_cover(each.piece for each in tensor.pieces)
        elif tensor.num_bytes:
            findings.append(f"{tensor.name}: its {tensor.num_bytes:,} bytes are in no file")
    if findings:
        raise CheckpointError(*findings, about=f"{contents.location} is incomplete")
