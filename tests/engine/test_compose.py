"""All axes at once against one process: losses, norms, parameters and moments after every update.

The models are float64, so that what is left of a difference is the order of sums: 1e-10 of the largest element is far
above it (a gradient that is noise moves AdamW by at most its noise over epsilon, 1e-17 / 1e-8 of the rate) and far
below what a missing or a doubled term does.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.engine.hybrid_models import (
    CASE,
    assert_close,
    data_rank,
    decoder,
    in_one_process,
    num_data_ranks,
    plan_of,
    train,
)
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import rows_of
from tests.engine.pipeline.oracle import adamw
from tests.engine.pipeline.stages import share_of

LAYOUTS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("tp=2", 1, 3, {}),
    ("tp=3", 0, 1, {}),
    ("dp_shard=2,tp=2", 2, 3, {}),
    ("dp_shard=2,tp=2", 3, 3, {}),
    ("dp_replicate=3,tp=2", 3, 1, {"partition": "whole"}),
    ("dp_replicate=2,dp_shard=2,tp=2", 3, 1, {"owners": "dp_shard"}),
    ("pp=2,tp=2", 0, 3, {"schedule": "fthenb"}),
    ("pp=2,tp=2", 1, 3, {"schedule": "interleaved"}),
    ("pp=2,dp_shard=2", 2, 3, {}),
    ("pp=2,dp_shard=2", 3, 3, {"schedule": "interleaved"}),
    ("dp_shard=2,tp=2", 0, 1, {}),
    ("pp=2,dp_shard=2,tp=2", 1, 3, {"partition": "whole"}),
    ("pp=2,dp_shard=2,tp=2", 3, 3, {}),
    ("pp=2,dp_replicate=2,tp=2", 3, 1, {"partition": "whole", "schedule": "interleaved"}),
]


def plan_for(mesh: str, stage: int, k: int, settings: dict[str, Any]) -> sw.Plan:
    sharding = {key: value for key, value in settings.items() if key != "schedule"}
    return plan_of(mesh, stage=stage, k=k, sharding=sharding, schedule=settings.get("schedule", "1f1b"))


@pytest.mark.parametrize(
    ("mesh", "stage", "k", "settings"),
    # The other stage 1 on all axes: tests/processes/test_hybrid_example.py compares it with one process.
    [
        pytest.param(*each, marks=pytest.mark.stress) if each[:2] == ("pp=2,dp_shard=2,tp=2", 1) else each
        for each in LAYOUTS
    ],
    ids=[f"{mesh} stage={stage} k={k} {' '.join(more.values())}" for mesh, stage, k, more in LAYOUTS],
)
def test_a_layout_trains_as_one_process(mesh: str, stage: int, k: int, settings: dict[str, Any]) -> None:
    plan = plan_for(mesh, stage, k, settings)
    assert_close(train(CASE, plan), in_one_process(CASE, plan), relative=1e-10)


def test_without_a_clip_the_norm_is_that_of_one_process_too() -> None:
    plan = plan_of("pp=2,tp=2", clip=None)
    wanted = in_one_process(CASE, plan)
    assert min(wanted.grad_norms) > 0.2, "so that the clip of the other tests clips"
    assert_close(train(CASE, plan), wanted, relative=1e-10)


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "dp_shard=2,tp=2", "pp=2,dp_shard=2,tp=2"])
def test_dropout_between_the_cut_modules_does_not_depend_on_the_layout(mesh: str) -> None:
    case = replace(CASE, make=lambda: decoder(0.2))
    plan = plan_of(mesh, k=2, stage=3 if "dp_shard" in mesh else 1)
    alone = plan_of("single", k=2 * num_data_ranks(plan.mesh))
    wanted = train(case, alone)
    assert wanted.losses[0] != in_one_process(CASE, alone).losses[0], "dropout drops something"
    assert_close(train(case, plan), wanted, relative=1e-10)


KEPT = sw.Precision(compute="bfloat16", keep=("*norm*",))


@pytest.mark.parametrize(("mesh", "stage"), [("pp=2,dp_shard=2", 3), ("pp=2,dp_replicate=2", 2)])
def test_bfloat16_with_kept_norms_on_stages_has_the_bits_of_the_data_ranks_alone(mesh: str, stage: int) -> None:
    """Where nothing is cut along tp and one microbatch is computed, no sum has another order."""
    case = replace(CASE, make=lambda: untied())
    plan = plan_of(mesh, stage=stage, precision=KEPT)
    alone = plan_of(replace(plan.mesh, pp=1), stage=1, precision=KEPT)
    got, wanted = train(case, plan), train(case, alone)
    assert (got.losses, got.grad_norms, got.held_out) == (wanted.losses, wanted.grad_norms, wanted.held_out)
    for state, other in zip(got.states, wanted.states, strict=True):
        assert state.keys() == other.keys()
        assert [name for name in state if not torch.equal(state[name], other[name])] == []


def untied() -> torch.nn.Module:
    model = decoder(dtype=torch.float32)
    model.head.weight = torch.nn.Parameter(model.embedding.weight.detach().flip(0).clone())
    return model


# On all axes tests/train/test_hybrid.py has it, within the same bounds.
@pytest.mark.parametrize(
    ("mesh", "stage"),
    [pytest.param("pp=2,dp_shard=2,tp=2", 1, marks=pytest.mark.stress), ("dp_shard=2,tp=2", 3)],
)
def test_the_reference_run_in_bfloat16(mesh: str, stage: int) -> None:
    """2 tp x 2 pp x 2 dp, bfloat16, two microbatches merged, masters cast once by the optimizer (PaddleNLP, 35878).

    Cutting along tp rounds partial sums to bfloat16 where one process rounds the whole: an error of 2**-9 of each of
    some ten sums between the words and the loss, hence 2**-6 of it.
    """
    case = replace(CASE, make=lambda: decoder(dtype=torch.float32), batches=[word_batch(seed, 16) for seed in range(3)])
    plan = plan_of(mesh, stage=stage, k=2, precision=KEPT, clip=1.0)
    wanted = train(case, plan_of("single", k=4, precision=KEPT, clip=1.0))
    got = train(case, plan)
    assert got.losses == pytest.approx(wanted.losses, rel=2**-6)
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=2**-4)
    assert got.losses != wanted.losses
    assert got.losses[-1] < 0.97 * got.losses[0], "it learns"


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ("pp=2,tp=2", 0),
        ("dp_shard=2,tp=2", 1),
        ("pp=2,dp_shard=2", 3),
        pytest.param("pp=2,dp_shard=2,tp=2", 3, marks=pytest.mark.stress),
    ],
)
def test_masters_are_cast_once_per_update_whatever_is_cut(mesh: str, stage: int) -> None:
    plan = plan_of(mesh, stage=stage, k=3, precision=KEPT)

    def run(channel: sw.Channel) -> tuple[int, int]:
        engine = sw.parallelize(decoder(dtype=torch.float32), plan, optimizer=adamw, loss=word_loss, channel=channel)
        before = engine.counters.cast_elements
        for batch in CASE.batches:
            engine.step(share_of(batch, plan.mesh, channel.rank))
        masters = sum(
            tensor.numel()
            for piece, tensor in engine.state().items()
            if piece.name.endswith("/master") and piece.name.split("/")[1] in trained
        )
        return engine.counters.cast_elements - before, masters

    trained = {name for name, each in decoder().named_parameters() if each.requires_grad}
    for cast, masters in sw.simulate(plan.mesh.size, run):
        assert cast == len(CASE.batches) * masters


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        ("dp_shard=2,tp=2", 3),
        ("pp=2,tp=2", 1),
        ("pp=2,dp_shard=2", 3),
        pytest.param("pp=2,dp_shard=2,tp=2", 1, marks=pytest.mark.stress),
    ],
)
def test_evaluation_with_uneven_rows_and_prediction(mesh: str, stage: int) -> None:
    """The first data rank has seven rows, the others none."""
    plan = plan_of(mesh, stage=stage, k=2)
    batch = word_batch(5, 7)
    model = decoder().eval()
    with torch.no_grad():
        logits = model(batch["words"])
    wanted = float(word_loss(logits, batch))

    def run(channel: sw.Channel) -> tuple[float, float, torch.Tensor]:
        net = decoder()
        engine = sw.parallelize(net, plan, optimizer=adamw, loss=word_loss, channel=channel)
        mine = batch if data_rank(plan.mesh, channel.rank) == 0 else rows_of(batch, range(0))
        before = engine.evaluate(mine).loss
        told = engine.predict({"words": batch["words"]}, lambda inputs: net(inputs["words"]))
        engine.step(share_of(CASE.batches[0], plan.mesh, channel.rank))
        return before, engine.evaluate(mine).loss, told

    results = sw.simulate(plan.mesh.size, run)
    for before, after, told in results:
        assert before == pytest.approx(wanted, rel=1e-12)
        assert (before, after) == results[0][:2]
        assert after != before
        torch.testing.assert_close(told, logits, rtol=1e-12, atol=1e-12)
        assert torch.equal(told, results[0][2])
