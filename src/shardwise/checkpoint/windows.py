"""Windows: any parts of a checkpoint, or of what a rewrite makes of it, in one process and in bounded memory.

They are read one after the other, and verified.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from shardwise.checkpoint.buffers import GrowingBuffer
from shardwise.checkpoint.contents import Contents, StoredPiece, StoredTensor
from shardwise.checkpoint.read_plan import Wanted, plan_reads
from shardwise.checkpoint.read_targets import ReadTarget, joined
from shardwise.checkpoint.reading import BatchReader, batches_of
from shardwise.checkpoint.safetensors_files import cast_through
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.strided_copies import copy_strided
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import CheckpointError
from shardwise.moving.parts import part_of
from shardwise.plan.dtypes import ALIGNMENT_BYTES, aligned, itemsize_bytes
from shardwise.space import Piece, check_cover

__all__ = [
    "BATCH_BYTES",
    "LARGE_WINDOW_BYTES",
    "WINDOW_BYTES",
    "PieceReader",
    "Stretch",
    "check_whole",
    "part_of_piece",
    "windows",
]

WINDOW_BYTES = 8 << 20
"""So much is in memory at a time, beside the batch that is being read."""

LARGE_WINDOW_BYTES = 32 << 20
"""So much is put together at a time where smaller parts would read blocks again and again."""

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


TargetsOf = Callable[[Piece, torch.Tensor], Iterable[ReadTarget]]
"""The stored pieces that make up a piece, and where in its memory each goes."""


class PieceReader:
    """Reads pieces of stored tensors, or of what a rewrite makes of them, into a buffer of its own.

    Each call takes the buffer over from the one before. Every block of which a call needs something is read once,
    verified, and copied to all the places in the pieces where its elements go.
    """

    def __init__(
        self,
        store: Store,
        contents: Contents,
        targets_of: TargetsOf | None = None,
        *,
        batch: GrowingBuffer | None = None,
    ) -> None:
        """targets_of: what stored pieces make up a piece, where a rewrite is between; None: pieces of stored tensors.

        batch: memory that it shares with readers which read when it does not.
        """
        self.contents = contents
        """What the checkpoint holds."""
        self.read_bytes = 0
        """Bytes of data files read so far."""
        self._store = store
        self._targets_of = targets_of
        self._buffer = GrowingBuffer(WINDOW_BYTES if targets_of is None else LARGE_WINDOW_BYTES)
        self._batch = batch or GrowingBuffer(BATCH_BYTES)

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The elements of each piece, flat, in its dtype; they hold until the next call.

        Verified where the format has checksums; raises CheckpointError for damage and for what cannot be read. What no
        file holds is left as it is: see `check_whole`.
        """
        parts = self._parts(pieces)
        targets = [target for piece, part in zip(pieces, parts, strict=True) for target in self._targets(piece, part)]
        targets = targets if self._targets_of is None else joined(targets)
        wanted = [Wanted(target.source, target.source.name) for target in targets]
        stored = [each for name in dict.fromkeys(want.tensor for want in wanted) for each in self._stored(name)]
        block_bytes = self.contents.block_bytes
        plan = plan_reads(stored, [wanted], 0, block_bytes=block_bytes, readers={0})
        reader = BatchReader(self._store, self.contents, stored, verify=True, buffer=self._batch)
        try:
            for batch in batches_of(plan.reads, stored, block_bytes=block_bytes, max_bytes=BATCH_BYTES):
                for span, elements in reader.read(batch).items():
                    for index, moves in plan.transfers(span, 0):
                        each = targets[index]
                        for move in moves:
                            taken = part_of(elements, move.source, move.shape)
                            for memory, source in each.copies(move, taken):
                                _copy(memory, source, each.dtypes)
        finally:
            self.read_bytes += reader.read_bytes
            reader.close()
        return parts

    def _stored(self, name: str) -> Sequence[StoredPiece]:
        return self.contents.tensors[name].pieces

    def _targets(self, piece: Piece, part: torch.Tensor) -> Iterable[ReadTarget]:
        """The stored pieces that make up a piece, and where in its flat memory each goes."""
        if self._targets_of is None:
            return [ReadTarget(piece, part, (piece.dtype,))]
        return self._targets_of(piece, part if piece.run is not None else part.view(piece.shape))

    def _parts(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Room in the buffer for every piece."""
        sizes = [piece.num_elements * itemsize_bytes(piece.dtype) for piece in pieces]
        memory = self._buffer.room(sum(map(aligned, sizes)))
        parts = []
        start = 0
        for piece, num_bytes in zip(pieces, sizes, strict=True):
            parts.append(memory[start : start + num_bytes].view(torch_dtype(piece.dtype)))
            start += aligned(num_bytes)
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


def _copy(target: torch.Tensor, source: torch.Tensor, dtypes: Sequence[str]) -> None:
    """Copy through the dtypes; the last cast is the copy."""
    if len(dtypes) == 1:
        bits = _BITS[source.element_size()]
        copy_strided(target.view(bits), source.view(bits))
        return
    copy_strided(target, cast_through(source, map(torch_dtype, dtypes[1:-1])))
