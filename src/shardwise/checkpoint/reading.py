"""Reading: bytes of data files into memory, verified block by block, in bounded batches.

A batch is cut into stretches of a file, and a stretch into parts. Each part is one request, and is verified while it is
in the cache::

    file       ...| block | block | block | block | block | block |...
    stretch       [ span of one piece             | span          ]
    parts         [ request       | request       | request       ]

Of a store that is far the next batches are read while one is used. Of one at hand each is read when it is needed::

    far        read 0, 1, 2 | use 0, read 3 | use 1, read 4 | ...
    at hand    read 0 | use 0 | read 1 | use 1 | ...
"""

import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from shardwise.checkpoint.blocks import BlockSums, damaged_blocks
from shardwise.checkpoint.contents import Contents, StoredPiece
from shardwise.checkpoint.passing_digests import PassingDigests
from shardwise.checkpoint.read_plan import StoredSpan
from shardwise.checkpoint.stores import Reader, Store, open_data, reason
from shardwise.comm.local_tensors import bytes_of, torch_dtype
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import aligned, itemsize_bytes

T = TypeVar("T")

_STRETCH_BYTES = 4 << 20
"""Spans that follow one another are asked of the store together, up to so much."""


_PART_BYTES = 1 << 20
"""So much is asked for at least where there is more. At hand so much is read at a time, and verified in the cache."""


_ALIGNMENT_BYTES = 64

_MAX_OPEN_FILES = 64
"""So many files stay open between reads."""


class GrowingBuffer:
    """Memory that each use takes over from the one before, and that grows where one needs more.

    It is mapped for itself, not taken from the heap. glibc takes blocks of sizes that were freed before, up to 32 MiB,
    from the heap, and the heap shrinks only at its end. Small blocks that last leave no room for large ones where large
    ones were. So 20 MiB of buffers that came and went took 40 to 64 MiB.
    """

    def __init__(self, least_bytes: int = mmap.PAGESIZE) -> None:
        """It has room for `least_bytes` from its first use on: what is not used takes no memory."""
        self._least_bytes = least_bytes
        self._memory: torch.Tensor | None = None

    def room(self, num_bytes: int) -> torch.Tensor:
        """At least so many bytes; those of the last use hold until now."""
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = None  # goes before the next comes
            self._memory = _mapped(max(num_bytes, self._least_bytes))
        return self._memory

    def parts(self, wanted: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """A flat tensor for each (number of elements, dtype), aligned; those of the last use hold until now."""
        sizes = [num_elements * dtype.itemsize for num_elements, dtype in wanted]
        memory, start = self.room(sum(map(aligned, sizes))), 0
        parts = []
        for (_, dtype), num_bytes in zip(wanted, sizes, strict=True):
            parts.append(memory[start : start + num_bytes].view(dtype))
            start += aligned(num_bytes)
        return parts


def _mapped(num_bytes: int) -> torch.Tensor:
    """So many bytes in a separate mapping, which goes with the last view of it."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without them
            mapping.madvise(mmap.MADV_HUGEPAGE)  # a dozen conversions: 64,000 page faults, not 167,000
    return torch.frombuffer(mapping, dtype=torch.uint8)


@dataclass(slots=True)
class _PooledFile:
    """A data file that is open, or about to be."""

    opening: threading.Lock
    reader: Reader | None = None
    num_users: int = 0


class DataFiles:
    """The data files of a store: each is opened once, and as many requests are under way as the store takes.

    A save of a thousand ranks has more files than a process may have open. Those that were read last stay open, until
    `close` or until nobody has this any more.
    """

    def __init__(
        self, store: Store, *, turns_with: "DataFiles | None" = None, digests: PassingDigests | None = None
    ) -> None:
        """turns_with: files of another store, which never read while these do; both have one memory and its threads.

        digests: see all that readers of pieces read.
        """
        self.store = store
        self.digests = digests
        self.read_bytes = 0
        """Bytes of elements that were read so far."""
        self.num_ahead = store.parallel_reads if store.parallel_reads > 1 else 0
        """So many requests are begun before what they bring is needed; 0 where they cost no waiting."""
        self._turns_with = turns_with  # its threads end with it
        self.buffers: list[GrowingBuffer] = [] if turns_with is None else turns_with.buffers
        """Memory for the batch in use, and for those that are read meanwhile."""
        self.buffers += [GrowingBuffer() for _ in range(self.num_ahead + 1 - len(self.buffers))]
        self._files: dict[str, _PooledFile] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None if turns_with is None else turns_with._threads
        own: ThreadPoolExecutor | None = None
        if self.num_ahead and self._threads is None:
            self._threads = own = ThreadPoolExecutor(self.num_ahead, thread_name_prefix="shardwise-read")
        self.close = weakref.finalize(self, _close, self._files, own)
        """Give back the files and the threads."""

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[Reader]:
        """A file, open for reading. Several threads may ask for it. Raises OSError."""
        with self._lock:
            file = self._files.pop(name, None) or _PooledFile(threading.Lock())
            self._files[name] = file  # at the end: those that were read last stay open
            file.num_users += 1
        try:
            with file.opening:
                if file.reader is None:
                    file.reader = open_data(self.store, name)
            yield file.reader
        finally:
            with self._lock:
                file.num_users -= 1
                self._trim()

    def request_bytes(self, num_bytes: int) -> int:
        """How much is best asked for at a time, of so many bytes."""
        # Over a network each request waits as long as many bytes travel. At hand what is read stays in the cache.
        share = num_bytes // self.num_ahead if self.num_ahead else 0
        return min(max(_PART_BYTES, share), _STRETCH_BYTES)

    def begin(self, acts: Iterable[Callable[[], T]]) -> "list[Future[T]] | None":
        """Begin acts that read; None where each is best done when what it brings is needed."""
        return [self._threads.submit(act) for act in acts] if self._threads and self.num_ahead else None

    def in_order(self, acts: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What acts bring that read, in their order; as many are under way as the store takes."""
        ahead: deque[Future[T]] = deque()
        try:
            for act in acts:
                if self._threads is None or not self.num_ahead:
                    yield act()
                    continue
                ahead.append(self._threads.submit(act))
                if len(ahead) > self.num_ahead:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            abandon(ahead)

    def _trim(self) -> None:
        """Give back files that are too many, those first that were read longest ago."""
        if (num_more := len(self._files) - _MAX_OPEN_FILES) > 0:
            for name in [name for name, file in self._files.items() if not file.num_users][:num_more]:
                _close({name: self._files.pop(name)}, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(files: dict[str, _PooledFile], threads: ThreadPoolExecutor | None) -> None:
    if threads is not None:
        threads.shutdown()
    while files:
        reader = files.popitem()[1].reader
        if reader is not None:
            reader.close()


def abandon(futures: "Iterable[Future[Any]]") -> None:
    """Return when none is under way: it would go on writing to memory that is somebody else's by then."""
    futures = list(futures)
    for each in futures:
        each.cancel()
    wait(futures)


@dataclass(slots=True)
class _FileStretch:
    """Consecutive spans of one file, and their places in the buffer."""

    file: str
    start: int
    stop: int
    at: int
    """First byte in the buffer, which is congruent to `start`, so that elements aligned in the file are in memory."""
    spans: list[StoredSpan]


def batches_of(spans: Sequence[StoredSpan], *, block_bytes: int, max_bytes: int) -> list[list[StoredSpan]]:
    """The spans in batches of at most `max_bytes` each (one block at least); long spans are cut between blocks."""
    batches: list[list[StoredSpan]] = []
    room = 0
    place = "", 0
    for span in spans:
        start = span.start
        while start < span.stop:
            if room < block_bytes:
                batches.append([])
                # A block is verified as a whole, so that a batch has room for one, however small the batch.
                room = max(max_bytes, block_bytes)
            stop = min(span.stop, start + room // block_bytes * block_bytes)
            part = StoredSpan(span.ordinal, start, stop, span.stored)
            # What lies between two stretches of a file is not read, but alignment may cost that much.
            room -= stop - start + (_ALIGNMENT_BYTES if batches[-1] and place != part.place else 0)
            batches[-1].append(part)
            file, first = part.place
            place, start = (file, first + stop - start), stop
    return batches


Batch = tuple[Sequence[StoredSpan], torch.Tensor | None]
"""Spans that are read together, and of a single one maybe the memory where its bytes are wanted."""


@dataclass(frozen=True, slots=True)
class BegunRead:
    """A batch that is being read, or will be when it is finished."""

    batch: Batch
    memory: torch.Tensor
    parts: Sequence[_FileStretch]
    under_way: "Sequence[Future[list[str]]] | None"


class BatchReader:
    """Reads batches of spans, and verifies them. Nothing is under way when its context ends."""

    def __init__(self, files: DataFiles, contents: Contents, *, verify: bool) -> None:
        self._files = files
        self._contents = contents
        self._verify = verify
        self._begun: list[BegunRead] = []

    def ahead(self, batches: Iterable[Batch]) -> Iterator[BegunRead]:
        """Batches that are begun ahead. Each is to be finished, and used up, before the next is asked for."""
        buffers = self._files.buffers[: self._files.num_ahead + 1]  # files that these take turns with may have more
        ahead: deque[BegunRead] = deque()
        for number, batch in enumerate(batches):
            ahead.append(self._begin(batch, buffers[number % len(buffers)]))
            if len(ahead) == len(buffers):
                yield ahead.popleft()
        yield from ahead

    def begin(self, spans: Sequence[StoredSpan], memory: torch.Tensor) -> BegunRead:
        """Begin to read a batch, by many requests, into memory of at least `buffer_bytes`."""
        return self._begin((spans, None), memory)

    def _begin(self, batch: Batch, room: torch.Tensor | GrowingBuffer) -> BegunRead:
        spans, memory = batch
        stretches = list(_stretches(spans))
        if memory is not None:
            stretches[0].at = 0
        else:
            memory = room if isinstance(room, torch.Tensor) else room.room(_end(stretches))
        # What is read ahead is one request of many; what is read at once is many. At hand what others need too is read
        # as it is used: by spans.
        is_one = (self._files.num_ahead > 0) != isinstance(room, torch.Tensor)
        part_bytes = self._files.request_bytes(_end(stretches))
        parts = [part for each in stretches for part in ([each] if is_one else self._parts(each, part_bytes))]
        begun = BegunRead(batch, memory, parts, self._files.begin(partial(self._fill, each, memory) for each in parts))
        self._begun.append(begun)
        return begun

    def finish(
        self, begun: BegunRead, take: Callable[[dict[StoredSpan, torch.Tensor]], None] | None = None
    ) -> dict[StoredSpan, torch.Tensor]:
        """The elements of every span of a batch, flat, in the dtype in which they are stored; none of one in place.

        take: is given them part by part, where that is at hand, as soon as each is verified: it is in the cache then.

        Raises CheckpointError with every file that cannot be read and every block that is damaged. What is damaged in
        place has been written by then.
        """
        if begun.under_way is None:
            found = []
            for each in begun.parts:
                found.append(self._fill(each, begun.memory))
                if take is not None and not any(found):
                    take(elements_of(each.spans, begun.memory[each.at - each.at % _ALIGNMENT_BYTES :]))
        else:
            found = [each.result() for each in begun.under_way]
        self._begun.remove(begun)
        # A file that cannot be read is found by each of its parts, and named once.
        if findings := list(dict.fromkeys(chain.from_iterable(found))):
            raise CheckpointError(*findings)
        self._files.read_bytes += sum(each.stop - each.start for each in begun.parts)
        spans, in_place = begun.batch
        if in_place is not None:
            return {}
        return elements_of(spans, begun.memory)

    def _fill(self, part: _FileStretch, buffer: torch.Tensor) -> list[str]:
        memory = bytes_of(buffer[part.at : part.at + part.stop - part.start])
        try:
            with self._files.opened(part.file) as reader:
                reader.read_into(memory, part.start)
        except (OSError, EOFError) as error:
            return [f"{self._files.store.location}/{part.file} cannot be read: {reason(error)}"]
        return [each for span in part.spans for each in self._damage(span, part, memory)] if self._verify else []

    def _damage(self, span: StoredSpan, stretch: _FileStretch, memory: memoryview) -> list[str]:
        stored, size = span.stored, self._contents.block_bytes
        if stored.checksums is None:
            return []
        first = span.place[1] - stretch.start
        data = memory[first : first + span.stop - span.start]
        damaged = damaged_blocks(data, stored.checksums, first_block=span.start // size, block_bytes=size)
        return [damage_finding(stored, block, self._contents, self._files.store.location) for block in damaged]

    def _parts(self, stretch: _FileStretch, part_bytes: int) -> Iterator[_FileStretch]:
        """A stretch in parts of about so many bytes, cut between blocks."""
        start = stretch.start
        for spans in batches_of(stretch.spans, block_bytes=self._contents.block_bytes, max_bytes=part_bytes):
            stop = start + sum(span.stop - span.start for span in spans)
            yield _FileStretch(stretch.file, start, stop, stretch.at + start - stretch.start, spans)
            start = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        abandon(chain.from_iterable(each.under_way or () for each in self._begun))


def buffer_bytes(batch: Sequence[StoredSpan]) -> int:
    """Bytes of the buffer into which a batch is read."""
    return _end(list(_stretches(batch)))


def elements_of(batch: Sequence[StoredSpan], buffer: torch.Tensor) -> dict[StoredSpan, torch.Tensor]:
    """The elements of every span of a batch, in the buffer into which any rank has read it."""
    found = {}
    # Of the batch alone, not of the reader: in shared memory other ranks find the elements by the same rule.
    for stretch in _stretches(batch):
        first = stretch.at
        for span in stretch.spans:
            dtype = span.stored.piece.dtype
            data = buffer[first : first + span.stop - span.start]
            if first % itemsize_bytes(dtype):
                data = data.clone()  # files of other formats need not align their tensors
            found[span] = data.view(torch_dtype(dtype))
            first += span.stop - span.start
    return found


def _stretches(batch: Sequence[StoredSpan]) -> Iterator[_FileStretch]:
    """Spans that follow one another in a file are read together, up to a limit."""
    current: _FileStretch | None = None
    end = 0
    for span in batch:
        file, start = span.place
        stop = start + span.stop - span.start
        follows = current is not None and (current.file, current.stop) == (file, start)
        if current is not None and follows and stop - current.start <= _STRETCH_BYTES:
            current.stop = stop
            current.spans.append(span)
            continue
        if current is not None:
            end = current.at + current.stop - current.start
            yield current
        # The same remainder in memory as in the file. Files of ours align tensors, so that the bytes can be viewed as
        # elements without a copy.
        at = end + (start - end) % _ALIGNMENT_BYTES
        current = _FileStretch(file, start, stop, at, [span])
    if current is not None:
        yield current


def _end(stretches: Sequence[_FileStretch]) -> int:
    """The byte of the buffer after the last stretch."""
    return stretches[-1].at + stretches[-1].stop - stretches[-1].start if stretches else 0


def check_files(
    files: DataFiles, contents: Contents, names: Iterable[str], *, heads: Collection[str]
) -> Iterator[tuple[str, bool, list[str]]]:
    """For each data file whether it is there with the size that it was written with, and what is wrong with it.

    heads: of these the first bytes are compared with their checksum as well.
    """
    return files.in_order(partial(_checked, files, contents, name, head=name in heads) for name in names)


def _checked(files: DataFiles, contents: Contents, name: str, *, head: bool) -> tuple[str, bool, list[str]]:
    where = f"{files.store.location}/{name}"
    is_open = False
    try:
        with files.opened(name) as reader:
            is_open = True
            # The size costs no reading, and finds most of what happens to files: truncation, and another save's file
            # in its place.
            if reader.size != contents.file_sizes[name]:
                finding = (
                    f"{where} has {reader.size} bytes, but {contents.file_sizes[name]} were written; it was truncated, "
                    "grown, or swapped for another file"
                )
                return name, False, [finding]
            if head and name in contents.file_heads:
                num_bytes, expected = contents.file_heads[name]
                if _checksum_of(reader, num_bytes) != expected:
                    finding = f"{where} is damaged: its header of {num_bytes} bytes does not have its checksum"
                    return name, True, [finding]
    except (OSError, EOFError) as error:
        return name, is_open, [f"{where} cannot be read: {reason(error)}"]
    return name, True, []


def _checksum_of(reader: Reader, num_bytes: int) -> bytes:
    """The checksum of the first bytes of a file; few of them are in memory at a time."""
    sums = BlockSums(num_bytes)
    part = memoryview(bytearray(min(num_bytes, _PART_BYTES)))
    for start in range(0, num_bytes, _PART_BYTES):
        part = part[: num_bytes - start]
        reader.read_into(part, start)
        sums.add(part)
    return sums.finish()


def damage_finding(stored: StoredPiece, block: int, contents: Contents, location: str) -> str:
    """What is wrong, and where: the file, the tensor, the piece and the bytes."""
    start = stored.start + block * contents.block_bytes
    stop = min(start + contents.block_bytes, stored.start + stored.num_bytes)
    return (
        f"{location}/{stored.file} is damaged: bytes {start} to {stop}, which belong to {stored.piece}, do not have "
        "the checksum recorded when they were written"
    )
