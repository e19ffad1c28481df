"""The channels of an engine: along which axes of the mesh its ranks talk."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from shardwise.comm import Channel
from shardwise.engine.gathering import words_on_units
from shardwise.errors import MismatchError, PeerError
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

    @classmethod
    def of(cls, plan: Plan, world: Channel) -> Self:
        """Those that a plan asks for; all ranks of `world` call this together."""

        def along(axes: Sequence[str]) -> Channel:
            return world.over(plan.mesh.peers(world.rank, axes))

        return cls(
            world=world,
            pipeline=along(("pp",)),
            everyone=along(DATA_AXES),
            owners=along(plan.sharding.owner_axes),
            replicas=along(plan.sharding.replica_axes),
            tensor=along(("tp",)),
        )


@contextmanager
def stopping_peers(world: Channel, doing: str) -> Iterator[None]:
    """Tell the other ranks when this one stops, so that none of them waits for it."""
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        if world.size > 1:
            world.abort(f"{type(error).__name__} in {doing}: {error}")
        if words := words_on_units(error):
            raise MismatchError(words) from error
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlaces:
    """Where all ranks of an engine are on the mesh."""

    stages: list[int]
    """By rank, its place along `pp`."""
    data_ranks: list[int]
    """By rank, its place among those that have the same stage and see other samples."""
    along_tensor: list[tuple[int, ...]]
    """The ranks that have parts of the same modules, for the same samples."""
    along_data: list[tuple[int, ...]]
    """The ranks that have the same part of the model."""

    @classmethod
    def of(cls, plan: Plan, num_ranks: int) -> Self:
        """The places that a plan gives to `num_ranks` ranks."""
        mesh, ranks = plan.mesh, range(num_ranks)
        return cls(
            stages=[mesh.coordinates(rank)["pp"] for rank in ranks],
            data_ranks=[data_rank_of(plan, rank) for rank in ranks],
            along_tensor=list(dict.fromkeys(mesh.peers(rank, ("tp",)) for rank in ranks)),
            along_data=list(dict.fromkeys(mesh.peers(rank, DATA_AXES) for rank in ranks)),
        )


def data_rank_of(plan: Plan, rank: int) -> int:
    """The place of a rank among those that have the same stage and see other samples."""
    return plan.mesh.peers(rank, DATA_AXES).index(rank)
