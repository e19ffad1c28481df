"""Stages of a pipeline whose gradients (stage 2) and parameters (stage 3) are cut over data ranks."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.engine.expected import adamw
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import Trained, rows_of
from tests.engine.ranks import assert_same_bits
from tests.engine.sharded_nets import Net

ROWS = 12
BATCHES = [word_batch(seed, ROWS) for seed in range(2)]
STAGES = {
    "embedding": 0,
    "blocks.0": 0,
    "blocks.1": 1,
    "blocks.2": 1,
    "head": 1,
    "unused": 1,
    "scales.*": 0,
    "empty": 1,
}


def trained(
    plan: sw.Plan, kind: str, batches: list[dict[str, torch.Tensor]], loss_weight: Any = None, *, between: bool = False
) -> Trained:
    """What rank 0 has; data ranks take shares of the batches; `between`: evaluates and predicts after each update."""

    def run(channel: sw.Channel) -> Trained:
        torch.manual_seed(0)
        model = Net(kind)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=word_loss, loss_weight=loss_weight, channel=channel)
        data_rank = plan.mesh.peers(channel.rank, ("dp_shard",)).index(channel.rank)
        result = Trained()
        for batch in batches:
            rows = ROWS // plan.mesh.dp_shard
            share = rows_of(batch, range(data_rank * rows, (data_rank + 1) * rows))
            report = engine.step(share)
            result.losses.append(report.loss)
            result.grad_norms.append(report.grad_norm)
            if between:
                engine.evaluate(rows_of(share, range(3 - 2 * data_rank)))
                engine.predict({"words": batch["words"][:2]}, lambda inputs: model(inputs["words"]))
        result.parameters = dict(sw.full(engine, channel=channel))
        return result

    return sw.simulate(plan.mesh.size, run)[0]


def plan_of(stage: int, schedule: str, k: int, *, pp: int = 2, **sharding: Any) -> sw.Plan:
    stages = STAGES if schedule != "interleaved" else None
    return sw.Plan(
        mesh=sw.Mesh(pp=pp, dp_shard=2),
        sharding=sw.Sharding(stage=stage, bucket_bytes=600, **sharding),
        merge=sw.Merge(microbatches=k),
        pipeline=sw.Pipeline(schedule=schedule, stages=stages),
        clip_grad_norm=0.3,
    )


@pytest.mark.parametrize(
    ("kind", "schedule", "k"),
    [
        ("tied", "1f1b", 1),
        ("tied", "1f1b", 3),
        ("checkpointed", "1f1b", 3),
        ("twice", "fthenb", 2),
        ("twice", "interleaved", 3),
        ("", "interleaved", 1),
    ],
)
def test_stages_of_pipelines_train_alike_however_they_are_cut(kind: str, schedule: str, k: int) -> None:
    first = trained(plan_of(2, schedule, k), kind, BATCHES)
    for keeps in (False, True):
        other = trained(plan_of(3, schedule, k, keep_gathered=keeps), kind, BATCHES, between=True)
        assert_same_bits(other, first)
        assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms)
    if k == 1:
        assert_same_bits(first, trained(plan_of(1, schedule, k), kind, BATCHES))
    if kind != "tied":  # ties across stages add in an order of their own
        plain = sw.Plan(
            mesh=sw.Mesh(dp_shard=2),
            sharding=sw.Sharding(stage=2, bucket_bytes=600),
            merge=sw.Merge(microbatches=k),
            clip_grad_norm=0.3,
        )
        assert_same_bits(first, trained(plain, kind, BATCHES))


def words_to_predict(batch: Mapping[str, Any]) -> float:
    return float((batch["targets"] != -100).sum())


def with_gaps(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Data rank 0 has nothing to predict in the first of two microbatches."""
    targets = batch["targets"].clone()
    targets[: ROWS // 4] = -100
    return {**batch, "targets": targets}


@pytest.mark.parametrize(("stage", "schedule"), [(2, "1f1b"), (3, "1f1b"), (3, "interleaved"), (2, "interleaved")])
def test_data_ranks_that_skip_microbatches_follow_the_others_through_them(stage: int, schedule: str) -> None:
    batches = [with_gaps(batch) for batch in BATCHES]
    plain = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=2, bucket_bytes=600),
        merge=sw.Merge(microbatches=2),
        clip_grad_norm=0.3,
    )
    got = trained(plan_of(stage, schedule, 2), "", batches, words_to_predict)
    assert_same_bits(got, trained(plain, "", batches, words_to_predict))
