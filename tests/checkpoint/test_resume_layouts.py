"""A restart of a run that cuts everything: bit for bit under its layout, to the order of sums under any other."""

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.checkpoint.layouts import LAYOUTS, engine_of, train
from tests.engine.hybrid_models import data_rank, decoder, num_data_ranks, plan_of
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import share_of
from tests.engine.pipeline.oracle import adamw


@pytest.mark.parametrize(
    "name",
    [
        "stage3-replicas-bf16",
        "tensor-two-parts-x-two",
        "tensor-two-x-two-whole-bf16",
        "all-stage3",
    ],
)
def test_under_the_same_layout_every_bit_goes_on(name: str, tmp_path: Path) -> None:
    plan = LAYOUTS[name]

    def uninterrupted(channel: sw.Channel) -> list[float]:
        engine = engine_of(plan, channel)
        train(engine, channel, [0])
        sw.save(tmp_path, engine, extra={"step": 1}, channel=channel)
        return train(engine, channel, range(1, 3))

    def restarted(channel: sw.Channel) -> list[float]:
        engine = engine_of(plan, channel, seed=3)
        assert sw.load(tmp_path, engine, channel=channel) == {"step": 1}
        return train(engine, channel, range(1, 3))

    expected = sw.simulate(plan.mesh.size, uninterrupted)
    assert sw.simulate(plan.mesh.size, restarted) == expected
    assert len(set(expected[0])) == 2


MOVES = [
    ("pp=2,dp_shard=2,tp=2", 3, 2, "tp=3", 1, 4),
    ("tp=2", 1, 4, "dp_shard=2", 3, 2),
    ("dp_shard=4", 3, 1, "pp=2,dp_shard=2,tp=2", 1, 2),
    ("dp_shard=2,tp=3", 2, 2, "pp=2", 1, 4),
]
"""Mesh, stage of sharding and microbatches of who saves and of who goes on: four microbatches in all."""


@pytest.mark.parametrize(("mesh", "stage", "k", "other", "other_stage", "other_k"), MOVES)
def test_under_another_layout_the_losses_are_those_of_one_process(
    mesh: str, stage: int, k: int, other: str, other_stage: int, other_k: int, tmp_path: Path
) -> None:
    """float64 with dropout: what is left of a difference is the order of sums."""
    first, second, alone = (
        plan_of(mesh, stage=stage, k=k),
        plan_of(other, stage=other_stage, k=other_k),
        plan_of("single", k=4),
    )

    def engine_under(plan: sw.Plan, channel: sw.Channel, seed: int) -> sw.Engine:
        model = decoder(0.2, seed=seed)
        return sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, seed=seed, channel=channel)

    def steps(engine: sw.Engine, channel: sw.Channel, updates: range) -> list[tuple[float, float]]:
        mesh = engine.plan.mesh
        shares = [
            share_of(word_batch(each, 12), data_rank(mesh, channel.rank), num_data_ranks(mesh)) for each in updates
        ]
        return [(report.loss, report.grad_norm) for report in map(engine.step, shares)]

    def save(channel: sw.Channel) -> list[tuple[float, float]]:
        engine = engine_under(first, channel, 0)
        told = steps(engine, channel, range(1))
        sw.save(tmp_path, engine, channel=channel)
        return told

    def go_on(channel: sw.Channel) -> list[tuple[float, float]]:
        engine = engine_under(second, channel, 1)
        sw.load(tmp_path, engine, channel=channel)
        return steps(engine, channel, range(1, 3))

    [wanted] = sw.simulate(1, lambda channel: steps(engine_under(alone, channel, 0), channel, range(3)))
    before, after = sw.simulate(first.mesh.size, save), sw.simulate(second.mesh.size, go_on)
    assert len({*map(str, before)}) == len({*map(str, after)}) == 1, "all ranks are told the same"
    told = torch.tensor([*before[0], *after[0]], dtype=torch.float64)
    torch.testing.assert_close(told, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=0.0)
