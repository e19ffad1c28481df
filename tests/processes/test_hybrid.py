"""Every axis at once over real processes: the bits of simulated ranks, also through a relayout."""

import functools
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.errors import ModelError, PeerError
from tests.engine.hybrid_models import CASE, data_rank, decoder, num_data_ranks, plan_of
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import share_of
from tests.engine.pipeline.oracle import adamw
from tests.engine.pipeline.stages import train_on
from tests.engine.tensor.planted_faults import FAULTS
from tests.engine.tensor.planted_faults import plan_of as rules_plan
from tests.engine.tensor.planted_faults import train as train_rules
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, RankError, Transport

Pieces = dict[sw.Piece, torch.Tensor]

ROUND = [("pp=2,tp=2", 1), ("dp_shard=2,tp=2", 3), ("pp=2,dp_shard=2", 2), ("pp=2,tp=2", 1)]
"""Meshes and stages of sharding."""


PLACED = {"embedding": 0, "norm": 0, "block": 0, "head": 1}


def assert_same(real: Pieces, simulated: Pieces) -> None:
    assert real.keys() == simulated.keys()
    for piece, tensor in real.items():
        assert torch.equal(tensor, simulated[piece]), piece


def train_here(channel: Channel, text: str) -> tuple[Any, ...]:
    return train_on(channel, CASE, sw.Plan.parse(text))


@pytest.mark.parametrize(
    ("mesh", "stage", "transport"),
    [("pp=2,tp=2", 1, SHARED_MEMORY), ("dp_shard=2,tp=2", 3, TCP), ("pp=2,dp_shard=2", 3, SHARED_MEMORY)],
    ids=["pp x tp", "dp x tp over tcp", "pp x dp"],
)
def test_processes_train_to_the_bits_of_simulated_ranks(
    pool: Pool, mesh: str, stage: int, transport: Transport
) -> None:
    text = plan_of(mesh, stage=stage, k=2).text()
    real = pool.run(4, train_here, text, transport=transport)
    for ours, theirs in zip(real, sw.simulate(4, lambda channel: train_here(channel, text)), strict=True):
        assert ours[:3] == theirs[:3]
        for mine, other in zip(ours[3], theirs[3], strict=True):
            assert_same(mine, other)


def train_wrongly(channel: Channel) -> None:
    make, rules = FAULTS["missing heads"]
    train_rules(channel, make, rules_plan(rules, "pp=2,tp=2", pipeline=sw.Pipeline(stages=PLACED)))


def test_processes_refuse_a_wrong_plan_together(pool: Pool) -> None:
    """The ranks of the other stage, too."""
    with pytest.raises(RankError) as caught:
        pool.run(4, train_wrongly, transport=TCP)
    with pytest.raises(ModelError) as simulated:
        sw.simulate(4, lambda channel: train_wrongly(channel))
    assert len(caught.value.failures) == 4
    assert all(str(simulated.value) in failure.message for failure in caught.value.failures.values())


def move(channel: Channel) -> tuple[list[float], list[Pieces]]:
    """One update under each layout; the state after each move."""
    losses, states = [], []
    engine: sw.Engine | None = None
    for update, (mesh, stage) in enumerate(ROUND):
        plan = plan_of(mesh, stage=stage, k=2)
        if engine is None:
            engine = sw.parallelize(decoder(0.2), plan, optimizer=adamw, loss=word_loss, seed=3, channel=channel)
        else:
            before, engine = engine, sw.relayout(engine, plan)
            with pytest.raises(ModelError):
                before.step(word_batch(0, 2))
        states.append({piece: tensor.clone() for piece, tensor in engine.state().items()})
        share = share_of(word_batch(update, 12), data_rank(plan.mesh, channel.rank), num_data_ranks(plan.mesh))
        losses.append(engine.step(share).loss)
    return losses, states


@functools.cache
def simulated_moves() -> list[tuple[list[float], list[Pieces]]]:
    return sw.simulate(4, move)


@pytest.mark.parametrize(
    "transport", [SHARED_MEMORY, pytest.param(TCP, marks=pytest.mark.stress)], ids=["shared", "tcp"]
)
def test_a_relayout_between_processes_is_that_of_simulated_ranks(pool: Pool, transport: Transport) -> None:
    real = pool.run(4, move, transport=transport)
    for (losses, states), (wanted, other) in zip(real, simulated_moves(), strict=True):
        assert losses == wanted
        for mine, theirs in zip(states, other, strict=True):
            assert_same(mine, theirs)


def break_in_the_middle(channel: Channel) -> str:
    """Rank 2 fails while the others wait for it."""
    engine = sw.parallelize(decoder(), plan_of("pp=2,tp=2"), optimizer=adamw, loss=word_loss, seed=3, channel=channel)
    channel.exchange(b"", purpose="all have an engine")
    if channel.rank == 2:

        def fail() -> dict[str, Any]:
            raise FloatingPointError("the pressure is too high")

        engine.settings = fail  # type: ignore[method-assign]
    with pytest.raises((PeerError, FloatingPointError)) as caught:
        sw.relayout(engine, plan_of("dp_shard=2,tp=2"))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_fails_in_a_relayout_stops_the_others(pool: Pool) -> None:
    results = pool.run(4, break_in_the_middle, transport=Transport(timeout_seconds=5.0), poisons=True)
    assert results[2] == "FloatingPointError: the pressure is too high"
    for rank in (0, 1, 3):
        assert results[rank].startswith("PeerError: ")
        assert "rank 2 stopped: FloatingPointError in sw.relayout: the pressure is too high" in results[rank]
