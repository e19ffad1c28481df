"""Moving live state between real processes: shared memory and TCP, a lost rank, gradients."""

import os

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel, Work
from shardwise.space import Mesh, Piece
from tests.moving.layouts import state_of, whole_values
from tests.processes.pool import Pool, RankError
from tests.space.layouts import Cut, Layout, Shard

NAMES = ("up", "down", "head")
WHOLES = {name: whole_values("bfloat16", (96, 64)) for name in NAMES}

RUNS = Layout(Mesh(dp_shard=3), {"dp_shard": Cut((0, 1000, 1001, 96 * 64))})
BLOCKS = Layout(Mesh(dp_shard=2, tp=2), {"tp": Shard(1), "dp_shard": Shard(0)})


def pieces(layout: Layout, rank: int) -> list[Piece]:
    if rank not in range(layout.mesh.size):
        return []
    return [layout.piece(rank, name=name, dtype="bfloat16", global_shape=(96, 64)) for name in NAMES]


def loses_a_rank(channel: Channel) -> None:
    """Rank 1 is gone once the others know what it holds, and all need something of it."""

    class Dying(sw.Recorded):
        def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
            os._exit(1)

    state = state_of(pieces(RUNS, channel.rank - 1), WHOLES)
    used: Channel = Dying(channel) if channel.rank == 1 else channel
    sw.reshard(state, dict.fromkeys(pieces(Layout(Mesh(), {}), 0)), used)


def test_a_rank_that_is_lost_on_the_way_is_named_by_all(pool: Pool) -> None:
    with pytest.raises(RankError) as error:
        pool.run(4, loses_a_rank, lost=[1])
    assert sorted(error.value.failures) == [0, 2, 3]
    for failure in error.value.failures.values():
        assert failure.kind == "PeerError"
        assert "rank 1" in failure.message
        assert "reshard, batch 0" in failure.message
