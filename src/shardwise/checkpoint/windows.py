"""Windows: any parts of a checkpoint, one after the other and verified, in one process and in bounded memory."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from shardwise.checkpoint.buffers import Buffer
from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.read_plan import Wanted, plan_reads
from shardwise.checkpoint.reading import BatchReader, batches_of
from shardwise.checkpoint.stores import Store
from shardwise.comm.dtypes import torch_dtype
from shardwise.errors import CheckpointError
from shardwise.moving.parts import copy_moves
from shardwise.plan.dtypes import ALIGNMENT_BYTES, aligned, itemsize_bytes
from shardwise.space import Piece, check_cover

__all__ = ["BATCH_BYTES", "WINDOW_BYTES", "PieceReader", "Stretch", "check_whole", "part_of_piece", "windows"]

WINDOW_BYTES = 8 << 20
"""So much is in memory at a time, beside the batch that is being read."""

BATCH_BYTES = 4 << 20
"""So much is read at a time: it is verified and copied while it is in the cache."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Copied as these, for torch cannot copy every dtype. By bytes of an element."""

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
            if room < ALIGNMENT_BYTES:
                yield window
                window, room = [], max_bytes
            stop = min(num_elements, start + room // itemsize)
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


class PieceReader:
    """Reads pieces of stored tensors into a buffer of its own, which each call takes over from the one before."""

    def __init__(self, store: Store, contents: Contents, batch: Buffer | None = None) -> None:
        """`batch` is memory that it shares with readers which read when it does not."""
        self.contents = contents
        """What the checkpoint holds."""
        self.read_bytes = 0
        """Bytes of data files read so far."""
        self._store = store
        self._buffer = Buffer(WINDOW_BYTES)
        self._batch = batch or Buffer(BATCH_BYTES)

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The elements of each piece, flat, in the dtype in which they are stored; they hold until the next call.

        The pieces name tensors as they are stored. Verified where the format has checksums; raises CheckpointError for
        damage and for what cannot be read. What no file holds is left as it is: see `check_whole`.
        """
        parts = self._parts(pieces)
        stored = [each for name in _names(pieces) for each in self.contents.tensors[name].pieces]
        wanted = [Wanted(piece, piece.name) for piece in pieces]
        block_bytes = self.contents.block_bytes
        plan = plan_reads(stored, [wanted], 0, block_bytes=block_bytes, readers={0})
        reader = BatchReader(self._store, self.contents, stored, verify=True, buffer=self._batch)
        try:
            for batch in batches_of(plan.reads, stored, block_bytes=block_bytes, max_bytes=BATCH_BYTES):
                for span, elements in reader.read(batch).items():
                    source = elements.view(_BITS[elements.element_size()])
                    for index, moves in plan.transfers(span, 0):
                        copy_moves(moves, source, parts[index])
        finally:
            self.read_bytes += reader.read_bytes
            reader.close()
        return [part.view(torch_dtype(piece.dtype)) for part, piece in zip(parts, pieces, strict=True)]

    def _parts(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Room in the buffer for every piece."""
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + aligned(piece.num_elements * itemsize_bytes(piece.dtype)))
        memory = self._buffer.room(starts[-1])
        parts = []
        for start, piece in zip(starts[:-1], pieces, strict=True):
            itemsize = itemsize_bytes(piece.dtype)
            parts.append(memory[start : start + piece.num_elements * itemsize].view(_BITS[itemsize]))
        return parts


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


def _names(pieces: Sequence[Piece]) -> Iterable[str]:
    return dict.fromkeys(piece.name for piece in pieces)
