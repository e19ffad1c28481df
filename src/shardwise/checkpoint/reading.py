"""Reading: bytes of data files into memory, verified block by block, in bounded batches.

A batch is cut into stretches of a file, and a stretch into parts of 1 MiB. Each part is verified while it is in the
cache, before the next is read::

    file       ...| block | block | block | block | block | block |...
    stretch       [ span of one piece             | span          ]      one request to a remote store
    part          [ read | verify ][ read | verify ][ read ...           one after the other
"""

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import xxhash

from shardwise.checkpoint.blocks import damaged_blocks
from shardwise.checkpoint.contents import Contents, StoredPiece
from shardwise.checkpoint.read_plan import BlockSpan
from shardwise.checkpoint.stores import Reader, Store, open_data, reason
from shardwise.comm.local_tensors import bytes_of, torch_dtype
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import aligned, itemsize_bytes

_STRETCH_BYTES = 4 << 20
"""Spans that follow one another are asked of the store together, up to so much."""


_PART_BYTES = 1 << 20
"""Where reading costs no waiting, so much is read at a time, and verified while it is in the cache."""


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
class _FileStretch:
    """Consecutive spans of one file, and their places in the buffer."""

    file: str
    start: int
    stop: int
    at: int
    """First byte in the buffer, which is congruent to `start`, so that elements aligned in the file are in memory."""
    spans: list[BlockSpan]


def batches_of(
    spans: Sequence[BlockSpan], stored: Sequence[StoredPiece], *, block_bytes: int, max_bytes: int
) -> list[list[BlockSpan]]:
    """The spans in batches of at most `max_bytes` each (one block at least); long spans are cut between blocks."""
    batches: list[list[BlockSpan]] = []
    room = 0
    for span in spans:
        first = span.first_block
        while first < span.last_block:
            if room < block_bytes:
                batches.append([])
                # A block is verified as a whole, so that a batch has room for one, however small the batch.
                room = max(max_bytes, block_bytes)
            last = min(span.last_block, first + room // block_bytes)
            part = BlockSpan(span.ordinal, first, last)
            batches[-1].append(part)
            start, stop = _bytes_of_span(part, stored[span.ordinal], block_bytes)
            # What lies between two stretches of a file is not read, but alignment may cost that much.
            room -= stop - start + (0 if first > span.first_block else _ALIGNMENT_BYTES)
            first = last
    return batches


class OpenFiles:
    """Data files of a store that are open for reading; a save of a thousand ranks has more than a process may have."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers: dict[str, Reader] = {}

    def __getitem__(self, name: str) -> Reader:
        if name not in self._readers:
            self._readers[name] = open_data(self._store, name)
        return self._readers[name]

    def trim(self) -> None:
        """Give back those that are too many, the first ones first: the next reads are of the last ones."""
        while len(self._readers) > _MAX_OPEN_FILES:
            self._readers.pop(next(iter(self._readers))).close()

    def close(self) -> None:
        """Give all back."""
        while self._readers:
            self._readers.popitem()[1].close()


class BatchReader:
    """Reads batches of spans and verifies them."""

    def __init__(
        self,
        store: Store,
        contents: Contents,
        stored: Sequence[StoredPiece],
        *,
        verify: bool,
        buffer: GrowingBuffer | None = None,
    ) -> None:
        """`buffer` is memory for batches that others had before; None: it has its own."""
        self.read_bytes = 0
        """Bytes of data files read so far."""
        self._store = store
        self._contents = contents
        self._stored = stored
        self._verify = verify
        self._buffer = buffer or GrowingBuffer()
        self._files = OpenFiles(store)
        self._threads: ThreadPoolExecutor | None = None
        if store.parallel_reads > 1:
            self._threads = ThreadPoolExecutor(store.parallel_reads, thread_name_prefix="shardwise-read")

    def close(self) -> None:
        """Give back the threads and the files."""
        self._files.close()
        if self._threads is not None:
            self._threads.shutdown()

    def read(self, batch: Sequence[BlockSpan], buffer: torch.Tensor | None = None) -> dict[BlockSpan, torch.Tensor]:
        """The elements of every span, flat, in the dtype in which they are stored.

        They are views of `buffer` (at least `buffer_bytes` of the batch), or of one that the next batch takes over.
        Raises CheckpointError with every file that cannot be read and every block that is damaged.
        """
        stretches = list(_stretches(batch, self._stored, self._contents.block_bytes))
        if buffer is None:
            buffer = self._buffer.room(_end(stretches))
        findings = self._fill(stretches, buffer)
        if findings:
            raise CheckpointError(*findings)
        self.read_bytes += sum(each.stop - each.start for each in stretches)
        return elements_of(batch, buffer, self._stored, block_bytes=self._contents.block_bytes)

    def read_to(self, span: BlockSpan, memory: torch.Tensor) -> None:
        """Read a span straight to where its bytes are wanted, and verify it there.

        Raises CheckpointError as `read` does; damaged bytes have been written by then.
        """
        start, stop = _bytes_of_span(span, self._stored[span.ordinal], self._contents.block_bytes)
        findings = self._fill([_FileStretch(self._stored[span.ordinal].file, start, stop, 0, [span])], memory)
        if findings:
            raise CheckpointError(*findings)
        self.read_bytes += stop - start

    def _fill(self, stretches: Sequence[_FileStretch], buffer: torch.Tensor) -> list[str]:
        findings: list[str] = []
        jobs = []
        try:
            for stretch in stretches:
                try:
                    reader = self._files[stretch.file]
                except OSError as error:
                    findings.append(f"{self._store.location}/{stretch.file} cannot be read: {reason(error)}")
                else:
                    # Over a network each request waits as long as many bytes travel: there a part is one request, and
                    # many are under way.
                    part_bytes = _PART_BYTES if self._threads is None else _STRETCH_BYTES
                    parts = _parts(stretch, self._stored, self._contents.block_bytes, part_bytes)
                    jobs += [(part, reader) for part in parts]

            def fill(job: tuple[_FileStretch, Reader]) -> list[str]:
                return self._fill_one(*job, buffer)

            done = map(fill, jobs) if self._threads is None else self._threads.map(fill, jobs)
            for each in done:
                findings += each
        finally:
            self._files.trim()
        # A file that cannot be read is found by each of its stretches, and named once.
        return list(dict.fromkeys(findings))

    def _fill_one(self, part: _FileStretch, reader: Reader, buffer: torch.Tensor) -> list[str]:
        memory = bytes_of(buffer[part.at : part.at + part.stop - part.start])
        try:
            reader.read_into(memory, part.start)
        except (OSError, EOFError) as error:
            return [f"{self._store.location}/{part.file} cannot be read: {reason(error)}"]
        return [each for span in part.spans for each in self._damage(span, part, memory)] if self._verify else []

    def _damage(self, span: BlockSpan, stretch: _FileStretch, memory: memoryview) -> list[str]:
        stored = self._stored[span.ordinal]
        if stored.checksums is None:
            return []
        size = self._contents.block_bytes
        start, stop = _bytes_of_span(span, stored, size)
        data = memory[start - stretch.start : stop - stretch.start]
        damaged = damaged_blocks(data, stored.checksums, first_block=span.first_block, block_bytes=size)
        return [damage_finding(stored, block, self._contents, self._store.location) for block in damaged]


def _parts(
    stretch: _FileStretch, stored: Sequence[StoredPiece], block_bytes: int, part_bytes: int
) -> Iterator[_FileStretch]:
    """A stretch in parts of about so many bytes: a long span is cut between blocks, short ones stay together."""
    # Several spans in a stretch are mostly small tensors: a call of the system for each would cost more than its bytes.
    if len(stretch.spans) > 1 or stretch.stop - stretch.start <= part_bytes:
        yield stretch
        return
    (span,) = stretch.spans
    step = max(1, part_bytes // block_bytes)
    for first in range(span.first_block, span.last_block, step):
        part = BlockSpan(span.ordinal, first, min(first + step, span.last_block))
        start, stop = _bytes_of_span(part, stored[span.ordinal], block_bytes)
        yield _FileStretch(stretch.file, start, stop, stretch.at + start - stretch.start, [part])


def buffer_bytes(batch: Sequence[BlockSpan], stored: Sequence[StoredPiece], *, block_bytes: int) -> int:
    """Bytes of the buffer into which a batch is read."""
    return _end(list(_stretches(batch, stored, block_bytes)))


def elements_of(
    batch: Sequence[BlockSpan], buffer: torch.Tensor, stored: Sequence[StoredPiece], *, block_bytes: int
) -> dict[BlockSpan, torch.Tensor]:
    """The elements of every span of a batch, in the buffer into which any rank has read it."""
    found = {}
    # Of the batch alone, not of the reader: in shared memory other ranks find the elements by the same rule.
    for stretch in _stretches(batch, stored, block_bytes):
        for span in stretch.spans:
            piece = stored[span.ordinal]
            start, stop = _bytes_of_span(span, piece, block_bytes)
            first = stretch.at + start - stretch.start
            data = buffer[first : first + stop - start]
            if first % itemsize_bytes(piece.piece.dtype):
                data = data.clone()  # files of other formats need not align their tensors
            found[span] = data.view(torch_dtype(piece.piece.dtype))
    return found


def _stretches(batch: Sequence[BlockSpan], stored: Sequence[StoredPiece], block_bytes: int) -> Iterator[_FileStretch]:
    """Spans that follow one another in a file are read together, up to a limit."""
    current: _FileStretch | None = None
    end = 0
    for span in batch:
        piece = stored[span.ordinal]
        start, stop = _bytes_of_span(span, piece, block_bytes)
        follows = current is not None and (current.file, current.stop) == (piece.file, start)
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
        current = _FileStretch(piece.file, start, stop, at, [span])
    if current is not None:
        yield current


def _end(stretches: Sequence[_FileStretch]) -> int:
    """The byte of the buffer after the last stretch."""
    return stretches[-1].at + stretches[-1].stop - stretches[-1].start if stretches else 0


def check_file(store: Store, contents: Contents, name: str, *, head: bool) -> tuple[bool, list[str]]:
    """Whether a data file is there with the size that it was written with; and what is wrong with it.

    head: its first bytes are compared with their checksum as well.
    """
    where = f"{store.location}/{name}"
    try:
        reader = open_data(store, name)
    except OSError as error:
        return False, [f"{where} cannot be read: {reason(error)}"]
    try:
        # The size costs no reading, and finds most of what happens to files: truncation, and another save's file in
        # its place.
        if reader.size != contents.file_sizes[name]:
            return False, [
                f"{where} has {reader.size} bytes, but {contents.file_sizes[name]} were written; it was truncated, "
                "grown, or swapped for another file"
            ]
        if head and name in contents.file_heads:
            num_bytes, expected = contents.file_heads[name]
            if _checksum_of(reader, num_bytes) != expected:
                return True, [f"{where} is damaged: its header of {num_bytes} bytes does not have its checksum"]
    except (OSError, EOFError) as error:
        return True, [f"{where} cannot be read: {reason(error)}"]
    finally:
        reader.close()
    return True, []


def _checksum_of(reader: Reader, num_bytes: int) -> bytes:
    """The checksum of the first bytes of a file; few of them are in memory at a time."""
    sum_so_far = xxhash.xxh3_64()
    part = memoryview(bytearray(min(num_bytes, _PART_BYTES)))
    for start in range(0, num_bytes, _PART_BYTES):
        part = part[: num_bytes - start]
        reader.read_into(part, start)
        sum_so_far.update(part)
    return sum_so_far.digest()


def damage_finding(stored: StoredPiece, block: int, contents: Contents, location: str) -> str:
    """What is wrong, and where: the file, the tensor, the piece and the bytes."""
    start = stored.start + block * contents.block_bytes
    stop = min(start + contents.block_bytes, stored.start + stored.num_bytes)
    return (
        f"{location}/{stored.file} is damaged: bytes {start} to {stop}, which belong to {stored.piece}, do not have "
        "the checksum recorded when they were written"
    )


def _bytes_of_span(span: BlockSpan, stored: StoredPiece, block_bytes: int) -> tuple[int, int]:
    """The place of a span in its file."""
    start = stored.start + span.first_block * block_bytes
    return start, min(stored.start + span.last_block * block_bytes, stored.start + stored.num_bytes)
