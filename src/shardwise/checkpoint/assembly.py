"""Assembly: any part of what a rewrite makes of a checkpoint, put together from its files in one process."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from shardwise.checkpoint.buffers import Buffer
from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.read_plan import Wanted, plan_reads
from shardwise.checkpoint.reading import BatchReader, batches_of
from shardwise.checkpoint.rewrite_view import slots_of
from shardwise.checkpoint.slots import Slot, together
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.strided_copies import copy_strided
from shardwise.checkpoint.transfers import cast_through
from shardwise.checkpoint.windows import BATCH_BYTES
from shardwise.comm.dtypes import torch_dtype
from shardwise.moving.parts import part_of
from shardwise.plan.dtypes import aligned, itemsize_bytes
from shardwise.rewrite import Checked
from shardwise.space import Piece

__all__ = ["LARGE_WINDOW_BYTES", "AssembledReader", "is_cheap_to_cut", "unchanged_source"]

LARGE_WINDOW_BYTES = 32 << 20
"""So much is put together at a time where smaller parts would read blocks again and again."""

_MANY = 64
"""Views side by side."""


class AssembledReader:
    """Reads pieces of a rewrite's outputs into a buffer of its own, which each call takes over from the one before.

    Every block of the stored tensors of which a call needs something is read once, verified, and copied to all the
    places in the pieces where its elements go.
    """

    def __init__(self, store: Store, contents: Contents, checked: Checked, batch: Buffer | None = None) -> None:
        """`batch` is memory that it shares with readers which read when it does not."""
        self.read_bytes = 0
        """Bytes of data files read so far."""
        self._store = store
        self._contents = contents
        self._checked = checked
        self._buffer = Buffer(LARGE_WINDOW_BYTES)
        self._batch = batch or Buffer(BATCH_BYTES)

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The elements of each piece, flat, in the dtype of the output; they hold until the next call.

        Raises CheckpointError for damage and for what cannot be read.
        """
        parts = self._parts(pieces)
        slots = together(slot for piece, part in zip(pieces, parts, strict=True) for slot in self._slots(piece, part))
        self._fill([Wanted(slot.source, slot.source.name) for slot in slots], slots)
        return parts

    def _slots(self, piece: Piece, part: torch.Tensor) -> Iterator[Slot]:
        """The stored pieces that make up a piece of an output, and where in its flat memory each goes."""
        memory = part if piece.run is not None else part.view(piece.shape)
        return slots_of(self._checked, piece, memory)

    def _fill(self, wanted: Sequence[Wanted], slots: Sequence[Slot]) -> None:
        stored = [each for name in _names(wanted) for each in self._contents.tensors[name].pieces]
        block_bytes = self._contents.block_bytes
        plan = plan_reads(stored, [wanted], 0, block_bytes=block_bytes, readers={0})
        reader = BatchReader(self._store, self._contents, stored, verify=True, buffer=self._batch)
        try:
            for batch in batches_of(plan.reads, stored, block_bytes=block_bytes, max_bytes=BATCH_BYTES):
                for span, elements in reader.read(batch).items():
                    for index, moves in plan.transfers(span, 0):
                        slot = slots[index]
                        for move in moves:
                            taken = part_of(elements, move.source, move.shape)
                            for target, source in slot.copies(move, taken):
                                _copy(target, source, slot.dtypes)
        finally:
            self.read_bytes += reader.read_bytes
            reader.close()

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


def unchanged_source(checked: Checked, name: str) -> str | None:
    """The source whose elements an output has, in the same shape and order, maybe in another dtype; or None."""
    value = checked.values[name]
    return next((each for each in checked.sources_of(name) if value.is_identity_of(each, checked.sources[each])), None)


def is_cheap_to_cut(checked: Checked, name: str) -> bool:
    """Whether an output can be read in parts, first elements first, without reading parts of its sources again.

    So it is where elements come in the order that they have in the sources, and each stretch of a source is used once.
    It is not where every part would have something of very many sources, which it takes long to find.
    """
    value = checked.values[name]
    if len(value.views) > _MANY and any(view.shape[1:] != value.shape[1:] for view in value.views):
        return False
    reaches: dict[str, list[tuple[int, int]]] = {}
    for view in value.views:
        steps = [(stride, size) for stride, size in zip(view.strides, view.shape, strict=True) if size > 1]
        if steps != sorted(steps, reverse=True):
            return False
        stop = view.base + 1 + sum((size - 1) * stride for stride, size in steps)
        reaches.setdefault(view.source, []).append((view.base, stop))
    return all(stop <= start for each in reaches.values() for (_, stop), (start, _) in pairwise(sorted(each)))


def _copy(target: torch.Tensor, source: torch.Tensor, dtypes: Sequence[str]) -> None:
    """Copy through the dtypes; the last cast is the copy."""
    if len(dtypes) == 1:
        bits = _BITS[source.element_size()]
        copy_strided(target.view(bits), source.view(bits))
        return
    copy_strided(target, cast_through(source, map(torch_dtype, dtypes[1:-1])))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Copied as these, for torch cannot copy every dtype. By bytes of an element."""


def _names(wanted: Sequence[Wanted]) -> dict[str, None]:
    return dict.fromkeys(each.tensor for each in wanted)
