"""Arrangement: the files of a save, decided alike on every rank before a byte is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shardwise.checkpoint.assignment import assign_pieces, assign_tensors, distinct
from shardwise.checkpoint.safetensors_files import DataFile, lay_out
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece, check_cover

__all__ = ["Arrangement", "FileLayout", "arrange"]

FileLayout = Literal["pieces", "whole"]
"""`pieces`: each rank writes what it holds, without traffic; `whole`: every tensor lies whole in one file."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Who writes what of a state that is held by several ranks."""

    file_layout: FileLayout
    holders: Mapping[Piece, tuple[int, ...]]
    """The ranks that hold each distinct piece."""
    written: Sequence[Sequence[Piece]]
    """For each rank the pieces that it writes."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.written)

    @cached_property
    def tensors(self) -> list[Piece]:
        """The tensors, each as one whole piece, in the order in which ranks hold them."""
        kinds = dict.fromkeys((piece.name, piece.dtype, piece.global_shape) for piece in self.holders)
        return [Piece(name=name, dtype=dtype, global_shape=shape) for name, dtype, shape in kinds]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.num_elements * itemsize_bytes(each.dtype) for each in self.tensors)

    @cached_property
    def _files(self) -> dict[int, DataFile]:
        return {}

    def file(self, rank: int) -> DataFile:
        """The file that `rank` writes."""
        if rank not in self._files:
            self._files[rank] = lay_out(self.written[rank])
        return self._files[rank]


def arrange(held: Sequence[Sequence[Piece]], file_layout: FileLayout, *, block_bytes: int) -> Arrangement:
    """Decide who writes what, from what every rank holds.

    Raises CheckpointError, with every finding, unless the pieces make up whole tensors: each element is held once, or
    by pieces that are alike (replicas).
    """
    holders = distinct(held)
    if findings := check_cover(holders):
        raise CheckpointError(*(f"the ranks together do not hold whole tensors: {each}" for each in findings))
    if file_layout == "pieces":
        written = assign_pieces(holders, len(held), block_bytes=block_bytes)
        return Arrangement(file_layout=file_layout, holders=holders, written=written)
    unassigned = Arrangement(file_layout=file_layout, holders=holders, written=())
    written = assign_tensors(unassigned.tensors, len(held))
    return Arrangement(file_layout=file_layout, holders=holders, written=written)
