"""Meshes: ranks laid row-major over four named axes.

Mesh(dp_shard=2, tp=4)      tp 0   1   2   3
          dp_shard 0           0   1   2   3      peers(5, ["tp"]) = (4, 5, 6, 7): who shares a matrix with rank 5
          dp_shard 1           4   5   6   7      peers(5, ["dp_shard"]) = (1, 5): who shares its data shards
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from operator import index, mul
from typing import SupportsIndex

from shardwise.errors import PlanError, plural
from shardwise.space.boxes import index_of_element, row_major_strides

# The order says how far apart peers are. Ranks of one host have neighbouring numbers; tp talks several times per layer
# and so has neighbours, pp talks least and may cross hosts.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The mesh axes, outermost first: neighbours along `tp` have neighbouring ranks."""

_ONE_RANK = "single"
"""The text form of the mesh whose sizes are all 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The number of ranks along every axis; their product is the size of the world.

    Raises `PlanError`, with every bad size in it, unless the sizes are whole numbers of 1 or more.

    >>> str(Mesh(dp_shard=2, tp=4)), Mesh(dp_shard=2, tp=4).coordinates(5)
    ('dp_shard=2,tp=4', {'pp': 0, 'dp_replicate': 0, 'dp_shard': 1, 'tp': 1})
    """

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Data ranks that hold the same slices."""
    dp_shard: int = 1
    """Data ranks over which state is cut."""
    tp: int = 1
    """Ranks over which single matrices are cut."""

    def __post_init__(self) -> None:
        problems = [
            f"mesh axis {axis} has size {size!r}; a size is a whole number, 1 or more"
            for axis, size in zip(AXES, self.shape, strict=True)
            if type(size) is not int or size < 1
        ]
        if problems:
            raise PlanError(*problems)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes, in the order of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.tp)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def num_data_ranks(self) -> int:
        """Number of data ranks: how many shares a batch has."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Return which share of a batch `rank` sees, from 0 to `num_data_ranks` - 1; ranks along pp and tp see one.

        >>> mesh = Mesh(dp_shard=2, tp=2)
        >>> [mesh.data_rank(rank) for rank in range(mesh.size)]
        [0, 0, 1, 1]
        """
        coordinates = self.coordinates(rank)
        return coordinates["dp_replicate"] * self.dp_shard + coordinates["dp_shard"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of `rank` along every axis; `PlanError` when the mesh has no such rank."""
        if not isinstance(rank, SupportsIndex) or isinstance(rank, bool):
            raise PlanError(f"a rank is a whole number, not {rank!r:.60}")
        rank = index(rank)
        if not 0 <= rank < self.size:
            raise PlanError(f"mesh {self} has ranks 0 to {self.size - 1}, but was asked for rank {rank}")
        return dict(zip(AXES, index_of_element(self.shape, rank), strict=True))

    def rank(self, *, pp: int = 0, dp_replicate: int = 0, dp_shard: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates; `PlanError` when one of them is not in the mesh."""
        coordinates = (pp, dp_replicate, dp_shard, tp)
        problems = [
            f"mesh {self} has coordinates 0 to {size - 1} along {axis}, but was asked for {coordinate}"
            for axis, size, coordinate in zip(AXES, self.shape, coordinates, strict=True)
            if not 0 <= coordinate < size
        ]
        if problems:
            raise PlanError(*problems)
        return sum(map(mul, coordinates, row_major_strides(self.shape)))

    def peers(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axes` only, itself among them, in increasing order.

        Raises `PlanError` for a rank or an axis that the mesh does not have.
        """
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise PlanError(*(_unknown_axis(axis) for axis in unknown))
        coordinates = self.coordinates(rank)
        strides = row_major_strides(self.shape)
        # The axes asked for run over all their coordinates, the others stay where the rank is.
        steps = [
            range(0, size * stride, stride) if axis in axes else (coordinates[axis] * stride,)
            for axis, size, stride in zip(AXES, self.shape, strides, strict=True)
        ]
        return tuple(map(sum, product(*steps)))

    def check_world(self, world_size: int) -> None:
        """Raise `PlanError` unless the sizes multiply to the number of ranks that there are."""
        if self.size == world_size:
            return
        # The axis that people mean to follow the number of ranks is dp_shard; where it can, the hint says its size.
        others = self.size // self.dp_shard
        hint = f", or set dp_shard={world_size // others}" if world_size > 0 and world_size % others == 0 else ""
        asked = "Mesh()" if self.size == 1 else f"mesh {self}"
        raise PlanError(
            f"{asked} asks for {plural(self.size, 'rank')}, but the world has {world_size}; "
            f"start {plural(self.size, 'process')}{hint}, so that the sizes multiply to the world"
        )

    def __str__(self) -> str:
        sizes = zip(AXES, self.shape, strict=True)
        return ",".join(f"{axis}={size}" for axis, size in sizes if size > 1) or _ONE_RANK

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Return the mesh whose text form is `text`, for example "dp_shard=2,tp=4"; one rank is "single".

        Raises `PlanError` with everything in the text that is not an axis and its size.
        """
        sizes: dict[str, int] = {}
        problems = []
        for word in [] if text.strip() == _ONE_RANK else text.split(","):
            axis, _, size = (part.strip() for part in word.partition("="))
            if axis not in AXES:
                problems.append(_unknown_axis(axis))
            elif axis in sizes:
                problems.append(f"mesh axis {axis} is given twice in {text!r}")
            elif not (size.isascii() and size.isdecimal() and int(size) > 0):
                problems.append(f"mesh axis {axis} has size {size!r}; a size is a whole number, 1 or more")
            else:
                sizes[axis] = int(size)
        if problems:
            raise PlanError(*problems)
        return cls(**sizes)


def _unknown_axis(axis: str) -> str:
    near = get_close_matches(axis, AXES, n=1)
    return f"{axis!r} is no mesh axis; the axes are {', '.join(AXES)}" + (f" (did you mean {near[0]}?)" if near else "")
