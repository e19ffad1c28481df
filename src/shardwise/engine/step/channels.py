"""The channels of an engine: along which axes of the mesh its ranks talk, and how one that fails stops the others.

mesh pp=2, dp_shard=2, tp=2            seen from rank 2
                                       world     0 .. 7
  stage 0: dp 0:  0 1    dp 1:  2 3    pipeline  2 6      same rows, other stage
  stage 1: dp 0:  4 5    dp 1:  6 7    everyone  0 2      same parameters, other rows
                                       tensor    2 3      same rows, other part of cut parameters
owners and replicas divide `everyone`: under sharding stage 0 each rank owns all, and the others are its replicas;
under stage 1 each of the two owns a half
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np

from shardwise.comm import Channel
from shardwise.comm.device.sums import summing
from shardwise.comm.hosts import naming_hosts
from shardwise.comm.rank_values import Index
from shardwise.errors import CallMismatchError, PeerError
from shardwise.plan import Plan

DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChannels:
    """The channels of an engine, seen from one rank."""

    world: Channel
    """All ranks."""
    pipeline: Channel
    """The ranks that have the other stages, for the same samples."""
    everyone: Channel
    """The ranks that hold this part of the model and see other samples: the data ranks."""
    owners: Channel
    """The data ranks over which masters are cut."""
    replicas: Channel
    """The data ranks that hold the same masters."""
    tensor: Channel
    """The ranks that have the other parts of cut parameters, for the same stage and samples."""
    ranks: "RankGroups"

    @classmethod
    def of(cls, plan: Plan, world: Channel) -> Self:
        """The channels of a plan; all ranks of `world` call this together."""
        world = summing(world, plan.precision.sums)

        # Every rank asks for every channel, in this order: a group is made by all its members together.
        def along(axes: Sequence[str]) -> Channel:
            return world.over(plan.mesh.peers(world.rank, axes))

        return cls(
            world=world,
            pipeline=along(("pp",)),
            everyone=along(DATA_AXES),
            owners=along(plan.sharding.owner_axes),
            replicas=along(plan.sharding.replica_axes),
            tensor=along(("tp",)),
            ranks=RankGroups.of(plan),
        )

    @property
    def have_whole_gradients(self) -> bool:
        """Whether each gradient is whole on one rank."""
        return self.everyone.size * self.tensor.size == 1

    def homes(self, plan: Plan) -> Channel:
        """The ranks that hold parts or copies of what this one owns, and share its updates; all call this together."""
        # Under stage 0 every data rank updates what it has: only ranks along tp have other parts.
        replicas = plan.sharding.replica_axes if plan.sharding.stage > 0 else ()
        if plan.mesh.peers(0, replicas) == (0,):
            return self.tensor
        return self.world.over(plan.mesh.peers(self.world.rank, (*replicas, "tp")))


@dataclass(frozen=True, kw_only=True, eq=False)
class RankGroups:
    """What all ranks of a mesh are to each other; arrays take what they say apart without a loop."""

    stages: tuple[int, ...]
    """The coordinate of each rank along the pipeline."""
    data_ranks: tuple[int, ...]
    """For each rank its place among those that see other samples."""
    first_of: Index
    """For each rank the first one that sees the same samples."""
    speakers: Index
    """For each data rank the first rank that sees its samples."""
    alike: Index
    """Ranks along tp, which see the same samples: a row for each group."""
    replicas: tuple[tuple[int, ...], ...]
    """Data ranks, which hold the same parameters."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Those of a plan's mesh."""
        ranks = range(plan.mesh.size)
        data_ranks = tuple(plan.mesh.data_rank(rank) for rank in ranks)
        # Backwards, so that the first rank is written last.
        firsts = {data_ranks[rank]: rank for rank in reversed(ranks)}
        return cls(
            stages=tuple(plan.mesh.coordinates(rank)["pp"] for rank in ranks),
            data_ranks=data_ranks,
            first_of=np.array([firsts[data_rank] for data_rank in data_ranks]),
            speakers=np.array([firsts[data_rank] for data_rank in sorted(firsts)]),
            alike=np.array(_groups(plan, ("tp",))),
            replicas=_groups(plan, DATA_AXES),
        )


def _groups(plan: Plan, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """All ranks of a mesh in their groups along some axes, by their first ranks."""
    # Each group once, not once per member: 4,096 data ranks are one of 4,096.
    groups: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for rank in range(plan.mesh.size):
        if rank not in seen:
            groups.append(plan.mesh.peers(rank, axes))
            seen.update(groups[-1])
    return tuple(groups)


class StepLeft(BaseException):
    """All ranks leave a step at the same place, and wait for nothing: none of them stops the others."""


@contextmanager
def stopping_peers(world: Channel, doing: str, *, advice: str = "") -> Iterator[None]:
    """Tell the other ranks when this one stops. advice: what to do where ranks make calls that do not fit."""
    try:
        with naming_hosts(world):
            yield
    # Another rank failed first, and has informed all: its error is the one to show.
    except (PeerError, StepLeft):
        raise
    except BaseException as error:
        if world.size > 1:
            # Also for KeyboardInterrupt and the like: a rank that leaves without a word lets the others wait until
            # their timeout.
            world.abort(f"{type(error).__name__} in {doing}: {error}")
        # The same class, so that callers and tests still find it; the channel knows that calls differ, the engine
        # knows why.
        if advice and isinstance(error, CallMismatchError):
            raise CallMismatchError(f"{error}\n{advice}") from error
        raise
