"""Layouts: which elements of a tensor each rank of a mesh holds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import PlanError
from shardwise.space.meshes import AXES, Mesh
from shardwise.space.pieces import Piece
from shardwise.space.runs import Run

__all__ = ["Cut", "Layout", "Placement", "Replicate", "Shard"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same elements."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor dim `dim` is cut into chunks of equal size, rounded up, as `torch.chunk` does.

    The last rank that holds something may hold less than the others, and the ranks after it hold nothing.
    Raises `PlanError` for a negative dim.
    """

    dim: int
    """The tensor dimension, counted from 0."""

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise PlanError(f"a Shard counts its dim from 0, but got {self.dim}; give the dim from the front")


@dataclass(frozen=True, slots=True)
class Cut:
    """The row-major elements are cut into runs: the rank at coordinate c holds those from boundary c to c + 1.

    Raises `PlanError` unless the boundaries start at 0 and never fall.
    """

    boundaries: tuple[int, ...]
    """One more than the axis has ranks; the last is the number of elements."""

    def __post_init__(self) -> None:
        falls = any(low > high for low, high in pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or falls:
            raise PlanError(f"the boundaries of a Cut start at 0 and never fall, but got {self.boundaries}")


Placement = Replicate | Shard | Cut


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """A mesh and a placement per axis: axes that `placements` does not name replicate.

    Several `Shard`s compose from the outermost axis to the innermost, each cutting what the one before left. One axis
    may be a `Cut`: whichever axis it is, it counts the elements of the box that all `Shard`s leave.
    Raises `PlanError`, with every problem in it, for an unknown axis and for a Cut that does not fit its axis.

    >>> layout = Layout(Mesh(dp_shard=2, tp=2), {"tp": Shard(1), "dp_shard": Cut((0, 9, 16))})
    >>> layout.piece(3, name="w", dtype="float32", global_shape=(4, 8)).boxes()
    (Box(offset=(2, 5), shape=(1, 3)), Box(offset=(3, 4), shape=(1, 4)))
    """

    mesh: Mesh
    """The ranks."""
    placements: tuple[Placement, ...]
    """One per axis, in the order of `AXES`."""

    def __init__(self, mesh: Mesh, placements: Mapping[str, Placement]) -> None:
        problems = [
            f"a placement is given for {axis!r}, which is no mesh axis; the axes are {', '.join(AXES)}"
            for axis in placements
            if axis not in AXES
        ]
        cuts = {axis: placement for axis, placement in placements.items() if isinstance(placement, Cut)}
        if len(cuts) > 1:
            problems.append(f"one axis of a layout may be a Cut, but {', '.join(cuts)} are")
        problems += [
            f"a Cut over the {size} ranks of {axis} has {size + 1} boundaries, not {len(cuts[axis].boundaries)}"
            for axis, size in zip(AXES, mesh.shape, strict=True)
            if axis in cuts and len(cuts[axis].boundaries) != size + 1
        ]
        if problems:
            raise PlanError(*problems)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", tuple(placements.get(axis, Replicate()) for axis in AXES))

    def piece(self, rank: int, *, name: str, dtype: str, global_shape: tuple[int, ...]) -> Piece:
        """Return what `rank` holds of the tensor: maybe nothing, a piece without elements.

        Raises `PlanError` for a rank that the mesh does not have, a dim that the tensor does not have, and a Cut whose
        last boundary is not the number of elements of the box that it cuts.
        """
        offset, shape = [0] * len(global_shape), list(global_shape)
        cut: Cut | None = None
        run: Run | None = None
        coordinates = self.mesh.coordinates(rank).values()
        for placement, coordinate, size in zip(self.placements, coordinates, self.mesh.shape, strict=True):
            if isinstance(placement, Shard):
                dim = placement.dim
                if dim >= len(shape):
                    raise PlanError(f"{name} has shape {tuple(global_shape)}, so that it cannot be cut along dim {dim}")
                chunk = -(-shape[dim] // size)
                start = min(coordinate * chunk, shape[dim])
                offset[dim] += start
                shape[dim] = min(chunk, shape[dim] - start)
            elif isinstance(placement, Cut):
                cut = placement
                run = Run(*placement.boundaries[coordinate : coordinate + 2])
        if cut is not None and cut.boundaries[-1] != math.prod(shape):
            raise PlanError(
                f"rank {rank} cuts {math.prod(shape)} elements of {name}, but the last boundary of its Cut is "
                f"{cut.boundaries[-1]}; the boundaries end at the number of elements that the Shards leave"
            )
        return Piece(name=name, dtype=dtype, global_shape=global_shape, offset=offset, shape=shape, run=run)
