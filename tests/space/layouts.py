"""Layouts over a mesh, for tests that need many pieces: who holds what when a tensor is cut along the mesh axes."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.space import AXES, Mesh, Piece


@dataclass(frozen=True)
class Replicate:
    """Every rank along the axis holds the same elements."""


@dataclass(frozen=True)
class Shard:
    """Dim `dim` is cut into chunks of equal size, rounded up, as `torch.chunk` does; the last ranks may get nothing."""

    dim: int


@dataclass(frozen=True)
class Cut:
    """The row-major elements are cut into runs: the rank at coordinate c holds those from boundary c to c + 1."""

    boundaries: tuple[int, ...]


Placement = Replicate | Shard | Cut


@dataclass(frozen=True)
class Layout:
    """A mesh and a placement per axis, none of which means Replicate.

    Several `Shard`s compose from the outermost axis to the innermost. A `Cut` counts the elements that they all leave.
    """

    mesh: Mesh
    placements: Mapping[str, Placement]

    def piece(self, rank: int, *, name: str, dtype: str, global_shape: tuple[int, ...]) -> Piece:
        """What `rank` holds of the tensor: maybe a piece without elements."""
        offset, shape = [0] * len(global_shape), list(global_shape)
        run = None
        coordinates = self.mesh.coordinates(rank)
        for axis, num_ranks in zip(AXES, self.mesh.shape, strict=True):
            match self.placements.get(axis):
                case Shard(dim):
                    chunk = -(-shape[dim] // num_ranks)
                    start = min(coordinates[axis] * chunk, shape[dim])
                    offset[dim] += start
                    shape[dim] = min(chunk, shape[dim] - start)
                case Cut(boundaries):
                    run = boundaries[coordinates[axis]], boundaries[coordinates[axis] + 1]
        return Piece(name=name, dtype=dtype, global_shape=global_shape, offset=offset, shape=shape, run=run)
