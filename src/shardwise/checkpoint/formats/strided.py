"""Strided tensors as pieces: torch keeps strides in files, and the elements of a piece follow one another.

w.T of shape (3, 2), strides (1, 3)     file  | 0 1 2 3 4 5 |     pieces  w.T[:, 0] at 0, w.T[:, 1] at 3
v[:, :2] of shape (2, 2), strides (3, 1)      | 0 1 . 3 4 . |             v[0, :2] at 0, v[1, :2] at 3
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from shardwise.checkpoint.contents import StoredPiece, StoredTensor
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece
from shardwise.space.boxes import row_major_strides

_MAX_PIECES = 1 << 16
"""Of one tensor; each takes about a KiB of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where the elements of a tensor are."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements to the next index, per dim."""
    start: int
    """First byte of the first element."""

    @property
    def num_bytes(self) -> int:
        """Of all elements together."""
        return math.prod(self.shape) * itemsize_bytes(self.dtype)


def pieces_of(place: TensorPlace, piece: Piece, file: str) -> Iterator[StoredPiece]:
    """What is stored of `piece`, whose box has the elements at `place`: itself, or as many boxes as are row-major.

    Raises CheckpointError where that are too many.
    """
    together = _dims_together(place)
    shape = [size if dim in together else 1 for dim, size in enumerate(piece.shape)]
    steps = [range(1) if dim in together else range(size) for dim, size in enumerate(piece.shape)]
    if (num_pieces := math.prod(map(len, steps))) > _MAX_PIECES:
        raise CheckpointError(
            f"its elements are in {num_pieces:,} places, by the strides {place.strides} of shape {place.shape}; save "
            "it contiguous"
        )
    for index in product(*steps):
        offset = [at + step for at, step in zip(piece.offset, index, strict=True)]
        start = sum(step * stride for step, stride in zip(index, place.strides, strict=True))
        box = Piece(name=piece.name, dtype=piece.dtype, global_shape=piece.global_shape, offset=offset, shape=shape)
        yield StoredPiece(piece=box, file=file, start=place.start + start * itemsize_bytes(place.dtype), checksums=None)


def _dims_together(place: TensorPlace) -> set[int]:
    """The dims along which elements are row-major, one behind the other."""
    dims = sorted((dim for dim, size in enumerate(place.shape) if size > 1), key=lambda dim: place.strides[dim])
    together = {dim for dim, size in enumerate(place.shape) if size == 1}
    end, last = 1, len(place.shape)
    for dim in dims:
        # Innermost first, each dim has to begin where those inside of it end, and to be outside of them in the tensor.
        # From the first one on that is not, each index is a piece of its own.
        if place.strides[dim] != end or dim > last:
            break
        together.add(dim)
        end *= place.shape[dim]
        last = dim
    return together


def stored_tensor(name: str, file: str, place: TensorPlace) -> StoredTensor:
    """A whole tensor whose elements are at a place of a file. Raises CheckpointError for too many pieces."""
    piece = Piece(name=name, dtype=place.dtype, global_shape=place.shape)
    pieces: tuple[StoredPiece, ...] = tuple(pieces_of(place, piece, file)) if piece.num_elements else ()
    return StoredTensor(name=name, dtype=place.dtype, shape=place.shape, pieces=pieces)


def stand_ins(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorPlace]:
    """A place for each tensor in a nested value: with its number where a place in a file has the first byte."""
    return {
        name: TensorPlace(dtype=each.dtype, shape=each.shape, strides=row_major_strides(each.shape), start=number)
        for number, (name, each) in enumerate(tensors.items())
    }
