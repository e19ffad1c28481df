"""Quantised outputs: what a rewrite quantises is read as float32, block by block, on the way into the window."""

from collections.abc import Sequence

import torch

from shardwise.checkpoint.block_scales import boxes_of_grid, grid_around, quantise
from shardwise.checkpoint.reading import GrowingBuffer
from shardwise.checkpoint.windows import PieceReader
from shardwise.comm.local_tensors import torch_dtype
from shardwise.moving.copies import put
from shardwise.rewrite import Checked
from shardwise.space import Box, Piece
from shardwise.space.pieces import blocks_of


class QuantisingReader:
    """Reads pieces of outputs, some of them quantised, into its own buffer, as `PieceReader` does.

    Elements and scales of a tensor are each made of all its values, which are read for both.
    """

    def __init__(self, checked: Checked, plain: PieceReader, wide: PieceReader) -> None:
        """`plain` reads what is not quantised, and `wide` reads float32 that is quantised here."""
        self._checked = checked
        self._plain, self._wide = plain, wide
        self._buffer = GrowingBuffer()

    @property
    def read_bytes(self) -> int:
        """Bytes of data files read so far."""
        return self._plain.read_bytes + self._wide.read_bytes

    def read(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The elements of each piece, flat, in its dtype; they hold until the next call. See `PieceReader.read`."""
        made = [piece for piece in pieces if self._checked.quantised(piece.name) is not None]
        room = self._buffer.parts([(each.num_elements, torch_dtype(each.dtype)) for each in made])
        parts = dict(zip(made, room, strict=True))
        for piece, part in parts.items():
            for first, shape, offset in blocks_of(piece):
                box = Box(offset, shape)
                self._make(piece.name, box, part[first : first + box.num_elements].view(shape))
        plain = [piece for piece in pieces if piece not in parts]
        parts.update(zip(plain, self._plain.read(plain), strict=True))
        return [parts[piece] for piece in pieces]

    def _make(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Fill a box of quantised elements, or of scales."""
        step, meta = self._checked.quantised(name), self._checked.elements_of(name)
        assert step is not None, "only such pieces are made"
        is_scales = self._checked.is_scales(name)
        if is_scales:  # with the dims that are left out
            more = len(meta.shape) - len(box.shape)
            box = Box((*box.offset, *[0] * more), (*box.shape, *[1] * more))
            target = target.view(box.shape)
        for grid, values in boxes_of_grid(box if is_scales else grid_around(box, step.block), meta, step.block):
            piece = Piece(name=name, dtype="float32", global_shape=meta.shape, offset=values.offset, shape=values.shape)
            (read,) = self._wide.read([piece])
            elements, scales = quantise(read.view(values.shape), step, name=name)
            made, place = (scales, grid) if is_scales else (elements, values)
            shared = box.intersect(place)
            assert shared is not None, "blocks are those around the box"
            ours, theirs = (shared.relative_to(each.offset).slices() for each in (box, place))
            put(target[ours], made[theirs])
