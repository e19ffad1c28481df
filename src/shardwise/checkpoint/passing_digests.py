"""Passing digests: sha256 of tensors, as their blocks pass by: read for this, or for something else anyway.

A sum takes the bytes of a tensor from the first to the last. Blocks that come in another order pass by unseen, and so
do those that come again. A tensor whose last byte was not reached has no digest, and has to be read for one.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch

from shardwise.checkpoint.contents import StoredTensor
from shardwise.comm.local_tensors import bytes_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece
from shardwise.space.boxes import row_major_strides


class PassingDigests:
    """Takes the digests of tensors as far as it sees their blocks in order.

    changed: the digests are of what this makes of elements, in parts.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        changed: Callable[[torch.Tensor], Iterable[torch.Tensor]] = lambda elements: (elements,),
    ) -> None:
        self._tensors = tensors
        self._changed = changed
        self._sums = {name: hashlib.sha256() for name in tensors}
        self._seen = dict.fromkeys(tensors, 0)
        """Bytes of each tensor that its sum has."""

    def see(self, piece: Piece, elements: torch.Tensor, skipped: int = 0) -> None:
        """Take elements of a piece of a tensor, flat, behind so many bytes of it."""
        name, start = piece.name, _first_byte(piece)
        if start is None:
            return
        start += skipped
        seen, stop = self._seen[name], start + elements.numel() * elements.itemsize
        if start <= seen < stop:
            for part in self._changed(elements[(seen - start) // elements.itemsize :]):
                self._sums[name].update(bytes_of(part.view(torch.uint8)))
            self._seen[name] = stop

    @property
    def found(self) -> Mapping[str, str]:
        """The digests of the tensors all of whose bytes were seen."""
        whole = (name for name, each in self._tensors.items() if self._seen[name] == each.num_bytes)
        return {name: self._sums[name].hexdigest() for name in whole}


def _first_byte(piece: Piece) -> int | None:
    """The byte of its tensor with which a piece begins; None where it is no stretch of the tensor."""
    # Whole rows follow one another in the tensor as in the piece.
    if piece.shape[1:] != piece.global_shape[1:]:
        return None
    before = piece.offset[0] * row_major_strides(piece.global_shape)[0] if piece.shape else 0
    return (before + piece.elements.start) * itemsize_bytes(piece.dtype)
