"""Catalogue: look into a checkpoint of any format, and read any part of any tensor, in one process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.addresses import Address, store_of
from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.extra_values import unpacked
from shardwise.checkpoint.read_plan import missing, plan_reads
from shardwise.checkpoint.read_rounds import read_exactly, read_in_rounds
from shardwise.checkpoint.sources import read_contents, was_removed
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.windows import ReadTarget
from shardwise.comm import Channel, alone
from shardwise.comm.torch_dtypes import torch_dtype
from shardwise.errors import CheckpointError, PlanError
from shardwise.space import Box, Piece

__all__ = ["Catalogue", "Index", "open"]

Index = Box | slice | Sequence[slice]
"""A box of indices: a Box, or slices with step 1, of which missing ones take whole dims."""


class Catalogue:
    """What a checkpoint holds. Made by `shardwise.checkpoint.open`; nothing but metadata has been read.

    >>> catalogue = open("runs/demo/checkpoints")               # doctest: +SKIP
    >>> catalogue.tensors["embed.weight"].shape                  # doctest: +SKIP
    (32000, 4096)
    >>> catalogue.read("embed.weight", slice(0, 10)).shape       # doctest: +SKIP
    torch.Size([10, 4096])
    """

    def __init__(self, store: Store, contents: Contents) -> None:
        self.contents = contents
        """Everything that the metadata says."""
        self._store = store
        self._channel: Channel = alone("cpu")

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name: dtype, shape, pieces."""
        return self.contents.tensors

    @property
    def extra(self) -> dict[str, Any]:
        """What the user saved beside the tensors."""
        extra: dict[str, Any] = unpacked(self.contents.extra)
        return extra

    @property
    def step(self) -> int | None:
        """The step at which it was saved."""
        return self.contents.step

    @property
    def location(self) -> str:
        """Path or address of the save."""
        return self.contents.location

    def read(self, name: str, index: Index | None = None, *, verify: bool = True) -> torch.Tensor:
        """A tensor, or the part of it at `index`, on the CPU in the dtype in which it is stored.

        name: as stored, or one that it is tied to. verify: compare the blocks that are touched with their checksums;
        without it exactly the bytes of the part are read.
        Raises CheckpointError for an unknown name, an index outside the tensor, and damage.
        """
        stored = self._stored(name)
        piece = _piece_at(stored, index)
        if lacking := missing(stored.pieces, piece) if piece.num_elements else 0:
            raise CheckpointError(
                f"{self.location}: {lacking} of {piece.num_elements} elements of {piece} are in no file"
            )
        result = torch.empty(piece.shape, dtype=torch_dtype(piece.dtype))
        if not piece.num_elements:
            return result
        try:
            self._fill(result, stored, piece, verify=verify)
        except CheckpointError as error:
            if not was_removed(self._store, self.contents):
                raise
            raise CheckpointError(
                f"{self.location} was removed since it was opened, by prune or by a saver that keeps the newest only; "
                "open it again"
            ) from error
        return result

    def _fill(self, result: torch.Tensor, stored: StoredTensor, piece: Piece, *, verify: bool) -> None:
        targets = [ReadTarget(piece, result, (piece.dtype,))]
        if not (verify and self.contents.verifiable):
            read_exactly(self._channel, self._store, stored.pieces, targets)
            return
        plan = plan_reads(stored.pieces, [[piece]], 0, block_bytes=self.contents.block_bytes, readers={0})
        read_in_rounds(
            self._channel, self._store, self.contents, stored.pieces, plan, targets, verify=True, twice=False
        )

    def _stored(self, name: str) -> StoredTensor:
        found = self.tensors.get(name) or self.tensors.get(self.contents.aliases.get(name, name))
        if found is None:
            near = [each for each in self.tensors if name in each or each in name][:5]
            hint = f"; names like it: {', '.join(near)}" if near else ""
            raise CheckpointError(f"{self.location} has no tensor {name!r}{hint}")
        return found


def open(path: Address, *, step: int | None = None) -> Catalogue:  # noqa: A001 - the promised name
    """Look into the checkpoint at `path`: the newest save of a folder, or the newest of `step`; see `load` for paths.

    Raises CheckpointError when there is none or its metadata is damaged.
    """
    store = store_of(path)
    return Catalogue(store, read_contents(store, step=step))


def _piece_at(stored: StoredTensor, index: Index | None) -> Piece:
    """The part of a tensor at an index."""
    whole = stored.whole
    if index is None:
        return whole
    if not isinstance(index, Box):
        slices = (index,) if isinstance(index, slice) else tuple(index)
        if len(slices) > len(stored.shape) or any(not isinstance(each, slice) for each in slices):
            raise CheckpointError(f"{stored.name} has shape {stored.shape}; {index!r} is no index of slices for it")
        slices += (slice(None),) * (len(stored.shape) - len(slices))
        bounds = [each.indices(size) for each, size in zip(slices, stored.shape, strict=True)]
        if any(step != 1 for _, _, step in bounds):
            raise CheckpointError(f"{index!r} has a step; parts of tensors are read with step 1")
        index = Box(tuple(start for start, _, _ in bounds), tuple(max(0, stop - start) for start, stop, _ in bounds))
    try:
        return Piece(
            name=whole.name, dtype=whole.dtype, global_shape=whole.shape, offset=index.offset, shape=index.shape
        )
    except PlanError as error:
        raise CheckpointError(str(error)) from error
