"""Moving live state between real processes: shared memory and TCP, a lost rank, gradients."""

import os

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel, Work
from shardwise.space import Mesh, Piece
from tests.moving.layouts import bits, state_of, whole_values
from tests.processes.pool import TCP, Pool, RankError
from tests.space.layouts import Cut, Layout, Shard

NAMES = ("up", "down", "head")
WHOLES = {name: whole_values("bfloat16", (96, 64)) for name in NAMES}

RUNS = Layout(Mesh(dp_shard=3), {"dp_shard": Cut((0, 1000, 1001, 96 * 64))})
BLOCKS = Layout(Mesh(dp_shard=2, tp=2), {"tp": Shard(1), "dp_shard": Shard(0)})


def pieces(layout: Layout, rank: int) -> list[Piece]:
    if rank not in range(layout.mesh.size):
        return []
    return [layout.piece(rank, name=name, dtype="bfloat16", global_shape=(96, 64)) for name in NAMES]


def there_and_back(channel: Channel) -> int:
    """Runs on ranks 1 to 3 become blocks on all four, and runs again; in many batches."""
    recorded = sw.Recorded(channel)
    runs, blocks = pieces(RUNS, channel.rank - 1), pieces(BLOCKS, channel.rank)
    state = state_of(runs, WHOLES)
    middle = sw.reshard(state, dict.fromkeys(blocks), recorded, free_sources=True, max_bytes=8192)
    assert state == {}
    for piece, expected in state_of(blocks, WHOLES).items():
        assert bits(middle[piece]) == bits(expected)
    back = sw.reshard(middle, dict.fromkeys(runs), recorded, max_bytes=1 << 20)
    for piece, expected in state_of(runs, WHOLES).items():
        assert bits(back[piece]) == bits(expected)
    messages = [call for call in recorded.calls if call.operation in ("send", "receive")]
    assert max(call.num_elements for call in messages[:10]) <= 2048
    return len(messages)


def gradient(channel: Channel) -> list[float]:
    """Rank 0 holds a row, and every rank squares it."""
    whole = Piece(name="x", dtype="float32", global_shape=(4,))
    x = torch.arange(4.0, requires_grad=channel.rank == 0)
    own = whole if channel.rank == 0 else whole.within(0, 0)
    y = sw.reshard_tensor(x if channel.rank == 0 else torch.empty(0), own, whole, channel)
    (y * y * (channel.rank + 1)).sum().backward()
    return [] if x.grad is None else list(x.grad.tolist())


def loses_a_rank(channel: Channel) -> None:
    """Rank 1 is gone once the others know what it holds, and all need something of it."""

    class Dying(sw.Recorded):
        def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
            os._exit(1)

    state = state_of(pieces(RUNS, channel.rank - 1), WHOLES)
    used: Channel = Dying(channel) if channel.rank == 1 else channel
    sw.reshard(state, dict.fromkeys(pieces(Layout(Mesh(), {}), 0)), used)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_state_goes_there_and_back_between_processes(pool: Pool, shared_memory: bool) -> None:
    counts = pool.run(4, there_and_back, shared_memory=shared_memory)
    assert all(count > 10 for count in counts)


def test_gradients_come_back_from_all_processes(pool: Pool) -> None:
    first, *rest = pool.run(4, gradient, transport=TCP)
    assert first == [0.0, 20.0, 40.0, 60.0]
    assert rest == [[], [], []]


def test_a_rank_that_is_lost_on_the_way_is_named_by_all(pool: Pool) -> None:
    with pytest.raises(RankError) as error:
        pool.run(4, loses_a_rank, lost=[1])
    assert sorted(error.value.failures) == [0, 2, 3]
    for failure in error.value.failures.values():
        assert failure.kind == "PeerError"
        assert "rank 1" in failure.message
        assert "reshard, batch 0" in failure.message
