"""Block scales: narrow floats that are multiplied by scales as they are read, and floats that are quantised by blocks.

Figure 1. Elements of shape (5, 6) in blocks of (2, 4) have scales of shape (3, 2)::

    a a a a b b
    a a a a b b     a, b, ... f: one scale each. The last blocks of a dim may be smaller.
    c c c c d d
    c c c c d d
    e e e e f f

Dequantised: element times scale in float32, rounded once, and then cast as the rewrite says. That is what transformers
(FineGrainedFP8) and DeepSeek do. Quantised: the scale is the largest magnitude of the block over the largest of the
dtype, and a scale that is a power of two is the next larger one, so that no element is cut off. That is done on the way
into a window of outputs, out of float32 that is read block by block.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.checkpoint.contents import StoredTensor
from shardwise.checkpoint.reading import GrowingBuffer
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import CheckpointError
from shardwise.moving.copies import part_of, put
from shardwise.rewrite import Checked, TensorMeta
from shardwise.rewrite.verbs.quantise import Rescaling
from shardwise.space import Box, Move, Piece
from shardwise.space.pieces import blocks_of

_AT_ONCE = 1 << 18
"""Elements that are multiplied while they are in the cache."""

_READ_AT_ONCE = 1 << 20
"""Elements of float32 that are read to be quantised: 4 MiB, or one block where that is larger."""


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The scales of a piece of elements, once they are read."""

    elements: Piece
    """A box."""
    block: tuple[int, ...]
    scales: Piece
    """What is needed of the scales: a box, of their own dims."""
    grid: Box
    """The same as a box of blocks."""
    values: torch.Tensor
    """Of the shape of `scales`, in their dtype."""

    @classmethod
    def of(cls, elements: Piece, block: tuple[int, ...], scales: StoredTensor) -> "BlockScales":
        """The scales of a box of elements, out of the tensor of scales."""
        assert elements.run is None, "a run has no box of scales"
        grid = grid_around(elements.box, block)
        # The last dims may be left out, where they have one block.
        num_dims = len(scales.shape)
        piece = replace(scales.whole, offset=grid.offset[:num_dims], shape=grid.shape[:num_dims])
        return cls(elements, block, piece, grid, torch.empty(piece.shape, dtype=torch_dtype(piece.dtype)))

    def products(
        self, view: torch.Tensor, move: Move, taken: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied, (target, source), where `taken` are the elements of a move into the piece; part by part."""
        memory = part_of(view, move.target, move.shape)
        scales = _as_float32(self.values).view(self.grid.shape)
        index = [
            torch.arange(start + first, start + first + size) // each - origin
            for start, first, size, each, origin in zip(
                self.elements.offset, move.target.offset, move.shape, self.block, self.grid.offset, strict=True
            )
        ]
        for dim, places in enumerate(index[1:], 1):
            scales = scales.index_select(dim, places)
        if not index:
            yield memory, taken.to(torch.float32) * scales
            return
        step = max(1, _AT_ONCE // max(1, math.prod(move.shape[1:])))
        for start in range(0, move.shape[0], step):
            rows = slice(start, start + step)
            yield memory[rows], taken[rows].to(torch.float32).mul_(scales.index_select(0, index[0][rows]))


def _as_float32(scales: torch.Tensor) -> torch.Tensor:
    """Scales as numbers: bytes are exponents."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)


def quantise(values: torch.Tensor, step: Rescaling, *, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements and the scales of float32 values that begin with a block. `name` is what errors call the tensor.

    Raises CheckpointError for values that are not finite.
    """
    # The rule of `Fp8Quantize` of transformers 5.24, bit by bit, also for blocks that the edge of the tensor cuts.
    shape, block = values.shape, step.block
    grid = [-(-size // each) for size, each in zip(shape, block, strict=True)]
    padding = [
        each
        for n, size, b in zip(reversed(grid), reversed(shape), reversed(block), strict=True)
        for each in (0, n * b - size)
    ]
    blocks = torch.nn.functional.pad(values, padding) if any(padding) else values
    blocks = blocks.reshape([each for pair in zip(grid, block, strict=True) for each in pair])
    within = tuple(range(1, 2 * len(grid), 2))
    largest = blocks.abs().amax(within) if within else blocks.abs()
    if not largest.isfinite().all():
        raise CheckpointError(
            f"{name} has values that are not finite, and no scale brings them into {step.element_dtype}"
        )
    dtype = torch_dtype(step.element_dtype)
    limit = torch.finfo(dtype).max
    # Where all is 0 the scale is 1. Where the largest is below the normal numbers its quotient would be infinite.
    factors = torch.where(largest > 0, limit / torch.where(largest > 0, largest, 1.0), 1.0)
    scales = 1.0 / factors.clamp(max=torch.finfo(torch.float32).max)
    if step.scale_dtype in ("float8_e8m0fnu", "uint8"):
        powers = torch.pow(2.0, torch.ceil(torch.log2(scales.clamp(min=torch.finfo(torch.float32).tiny))))
        stored = powers.to(torch.float8_e8m0fnu)
        stored = stored.view(torch.uint8) if step.scale_dtype == "uint8" else stored
        factors = 1.0 / _as_float32(stored)
    elif step.scale_dtype == "float32":
        stored = scales
        factors = factors.clamp(max=torch.finfo(torch.float32).max)
    else:
        stored = scales.to(torch_dtype(step.scale_dtype))
        factors = 1.0 / stored.to(torch.float32)
    for dim in within:
        factors = factors.unsqueeze(dim)
    elements = (blocks * factors).clamp_(-limit, limit).to(dtype)
    elements = elements.reshape([n * b for n, b in zip(grid, block, strict=True)])
    return elements[tuple(slice(size) for size in shape)], stored


def grid_around(box: Box, block: Sequence[int]) -> Box:
    """The blocks with elements in a box."""
    first = tuple([start // each for start, each in zip(box.offset, block, strict=True)])
    stop = [-(-stop // each) for stop, each in zip(box.stop, block, strict=True)]
    return Box(first, tuple([b - a for a, b in zip(first, stop, strict=True)]))


def boxes_of_grid(box: Box, meta: TensorMeta, block: Sequence[int]) -> Iterator[tuple[Box, Box]]:
    """Boxes of scales that together are a box of them, each with the box of elements that it is made of.

    Those of elements are small enough to be read at once, or one block.
    """
    start = tuple([first * each for first, each in zip(box.offset, block, strict=True)])
    stop = [min(last * each, size) for last, each, size in zip(box.stop, block, meta.shape, strict=True)]
    elements = Box(start, tuple([b - a for a, b in zip(start, stop, strict=True)]))
    if elements.num_elements <= _READ_AT_ONCE or box.num_elements <= 1:
        yield box, elements
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    half = box.shape[dim] // 2
    for first, size in ((0, half), (half, box.shape[dim] - half)):
        offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
        yield from boxes_of_grid(Box(offset, (*box.shape[:dim], size, *box.shape[dim + 1 :])), meta, block)


Read = Callable[[Sequence[Piece]], Sequence[torch.Tensor]]
"""See `windows.Read`."""


def quantising(checked: Checked, plain: Read, wide: Read) -> Read:
    """Reads pieces of outputs, some of them quantised: `plain` what is not, and `wide` the float32 that is made narrow.

    Elements and scales of a tensor are each made of all its values, which are read for both.
    """
    buffer = GrowingBuffer()

    def read(pieces: Sequence[Piece]) -> list[torch.Tensor]:
        made = [piece for piece in pieces if checked.quantised(piece.name) is not None]
        room = buffer.parts([(each.num_elements, torch_dtype(each.dtype)) for each in made])
        parts = dict(zip(made, room, strict=True))
        for piece, part in parts.items():
            for first, shape, offset in blocks_of(piece):
                box = Box(offset, shape)
                _make(checked, piece.name, box, part[first : first + box.num_elements].view(shape), wide)
        others = [piece for piece in pieces if piece not in parts]
        parts.update(zip(others, plain(others), strict=True))
        return [parts[piece] for piece in pieces]

    return read


def _make(checked: Checked, name: str, box: Box, target: torch.Tensor, wide: Read) -> None:
    """Fill a box of quantised elements, or of scales."""
    step, meta = checked.quantised(name), checked.elements_of(name)
    assert step is not None, "only such pieces are made"
    is_scales = checked.is_scales(name)
    if is_scales:  # with the dims that are left out
        more = len(meta.shape) - len(box.shape)
        box = Box((*box.offset, *[0] * more), (*box.shape, *[1] * more))
        target = target.view(box.shape)
    for grid, values in boxes_of_grid(box if is_scales else grid_around(box, step.block), meta, step.block):
        piece = Piece(name=name, dtype="float32", global_shape=meta.shape, offset=values.offset, shape=values.shape)
        (read,) = wide([piece])
        elements, scales = quantise(read.view(values.shape), step, name=name)
        made, place = (scales, grid) if is_scales else (elements, values)
        shared = box.intersect(place)
        assert shared is not None, "blocks are those around the box"
        ours, theirs = (shared.relative_to(each.offset).slices() for each in (box, place))
        put(target[ours], made[theirs])
