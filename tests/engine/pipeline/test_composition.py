"""Stages together with data ranks, sharding, precision, merge and clip: the numbers of the same plan without stages.

Data ranks are laid out alike in both, so that gradients are summed in the same order.
"""

from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.oracle import Batch, Optimizers
from tests.engine.pipeline import glue_models, models, path_models
from tests.engine.pipeline.models import Chain, case
from tests.engine.pipeline.oracle import Case, adamw, microbatches_of
from tests.engine.pipeline.stages import assert_same, largest_difference, plan_for, share_of, train
from tests.engine.pipeline.transformers_models import case_of

CASES = {**models.CASES, **path_models.CASES, **glue_models.CASES}


def case_named(name: str) -> Case:
    """Of a net written by hand, or of a model of transformers."""
    match name:
        case "llama":
            return case_of("llama", cut="llama")
        case "gpt2":
            return case_of("gpt2", tied=False)
    return CASES[name]


MESHES = {"sharded": sw.Mesh(pp=2, dp_shard=2), "replicated": sw.Mesh(pp=2, dp_replicate=2)}
SHARDINGS = {
    "stage 0": sw.Sharding(stage=0, bucket_bytes=300),
    "slices": sw.Sharding(bucket_bytes=300),
    "whole": sw.Sharding(bucket_bytes=300, partition="whole"),
    "slices per replica": sw.Sharding(bucket_bytes=300, owners="dp_shard"),
}


def assert_same_without_stages(case: Case, mesh: sw.Mesh, *, optimizer: Optimizers = adamw, **settings: Any) -> None:
    """The plan with and without stages gives the same bits."""
    alone = sw.Mesh(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
    with torch.random.fork_rng(devices=[]):
        with_stages = train(case, plan_for(case, mesh=mesh, **settings), optimizer)
    without = train(case, plan_for(case, mesh=alone, k=settings.get("k", 1), **_without_schedule(settings)), optimizer)
    assert_same(with_stages, without)


def _without_schedule(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("schedule", "chunks", "k")}


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_sharding_on_two_stages(mesh: str, sharding: str) -> None:
    assert_same_without_stages(CASES["chain"], MESHES[mesh], sharding=SHARDINGS[sharding], k=3, clip_grad_norm=0.05)


@pytest.mark.parametrize(
    ("name", "mesh", "sharding", "schedule", "k"),
    [
        ("u-net", "sharded", "slices", "1f1b", 2),
        ("u-net", "replicated", "whole", "interleaved", 2),
        ("sometimes", "sharded", "slices", "1f1b", 2),
        ("sometimes", "replicated", "stage 0", "fthenb", 1),
        ("root parameters", "sharded", "whole", "1f1b", 2),
        ("middle frozen", "sharded", "slices", "interleaved", 2),
        ("feedback", "sharded", "slices", "1f1b", 3),
        ("selecting", "replicated", "slices", "1f1b", 2),
        ("variable lengths", "sharded", "slices", "1f1b", 2),
        ("llama", "sharded", "slices", "1f1b", 2),
        ("gpt2", "sharded", "whole", "interleaved", 2),
    ],
)
def test_nets_of_every_kind_on_stages_and_data_ranks(
    name: str, mesh: str, sharding: str, schedule: str, k: int
) -> None:
    settings: dict[str, Any] = {"sharding": SHARDINGS[sharding], "schedule": schedule, "k": k}
    assert_same_without_stages(case_named(name), MESHES[mesh], clip_grad_norm=0.1, **settings)


def test_all_axes_at_once() -> None:
    mesh = sw.Mesh(pp=2, dp_replicate=2, dp_shard=2)
    for sharding in ("slices", "slices per replica"):
        assert_same_without_stages(CASES["chain"], mesh, sharding=SHARDINGS[sharding], k=1, clip_grad_norm=0.05)


@pytest.mark.parametrize("mesh", [sw.Mesh(pp=2), sw.Mesh(pp=4), MESHES["sharded"]], ids=str)
@pytest.mark.parametrize("name", ["chain", "llama"])
def test_bfloat16_with_kept_parameters(name: str, mesh: sw.Mesh) -> None:
    keep = ("*norm*",) if name == "llama" else ("last",)
    precision = sw.Precision(compute="bfloat16", keep=keep)
    assert_same_without_stages(case_named(name), mesh, precision=precision, k=2, clip_grad_norm=0.1)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_tie_of_two_stages_on_data_ranks_is_equal_to_summation_order(mesh: str) -> None:
    """One gradient near zero, whose sign AdamW would follow, would show as 1e-2 (its rate); none is here."""
    net = CASES["tied head"]
    alone = sw.Mesh(dp_replicate=MESHES[mesh].dp_replicate, dp_shard=MESHES[mesh].dp_shard)
    got, wanted = (train(net, plan_for(net, mesh=each, k=2, clip_grad_norm=0.1)) for each in (MESHES[mesh], alone))
    assert got.losses[0] == wanted.losses[0]
    assert got.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert got.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-6)
    for state, other in zip(got.states, wanted.states, strict=True):
        assert largest_difference(state, other) < 1e-5


def in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, and learn faster than the rest."""
    matrices = [each for each in parameters if each.ndim > 1]
    others = [each for each in parameters if each.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1, "lr": 2e-2}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


@pytest.mark.parametrize("mesh", [sw.Mesh(pp=2), sw.Mesh(pp=4), MESHES["sharded"]], ids=str)
def test_groups_of_parameters_keep_their_settings(mesh: sw.Mesh) -> None:
    assert_same_without_stages(CASES["chain"], mesh, k=2, optimizer=in_groups)


def test_a_sum_of_microbatches_instead_of_their_mean() -> None:
    net = CASES["chain"]

    def run(channel: sw.Channel, pp: int) -> list[float]:
        plan = sw.Plan(
            mesh=sw.Mesh(pp=pp),
            merge=sw.Merge(microbatches=3, average=False),
            pipeline=sw.Pipeline(stages=net.stages_for(pp) if pp > 1 else None),
        )
        engine = sw.parallelize(net.make(), plan, optimizer=adamw, loss=net.loss, channel=channel)
        reports = [engine.step(batch) for batch in net.batches]
        return [each.loss for each in reports] + [each.grad_norm for each in reports]

    [alone] = sw.simulate(1, lambda channel: run(channel, 1))
    assert sw.simulate(4, lambda channel: run(channel, 4)) == [alone] * 4


def test_an_optimizer_and_its_scheduler_made_before_go_on() -> None:
    net = CASES["chain"]

    def run(channel: sw.Channel, pp: int) -> list[float]:
        model = net.make()
        optimizer = in_groups(list(model.parameters()))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        engine = sw.parallelize(
            model, plan_for(net, mesh=sw.Mesh(pp=pp), k=2), optimizer=optimizer, loss=net.loss, channel=channel
        )
        told = []
        for batch in net.batches:
            told.append(engine.step(batch).loss)
            scheduler.step()
        return told

    [alone] = sw.simulate(1, lambda channel: run(channel, 1))
    assert sw.simulate(2, lambda channel: run(channel, 2)) == [alone] * 2


def weigh(batch: Batch) -> float:
    """Nothing where the first value is negative, else the sum of sizes."""
    return float(batch["x"].abs().sum()) if batch["y"][0, 0] > 0 else 0.0


@pytest.mark.parametrize("mesh", [sw.Mesh(pp=4), MESHES["sharded"]], ids=str)
def test_microbatches_weigh_what_the_user_counts_and_some_nothing(mesh: sw.Mesh) -> None:
    net = CASES["chain"]
    assert {bool(weigh(part)) for batch in net.batches for part in microbatches_of(batch, 3)} == {True, False}

    def run(channel: sw.Channel, mesh: sw.Mesh) -> list[tuple[float, float, float]]:
        engine = sw.parallelize(
            net.make(),
            plan_for(net, mesh=mesh, k=3),
            optimizer=adamw,
            loss=net.loss,
            loss_weight=weigh,
            channel=channel,
        )
        reports = [engine.step(share_of(batch, mesh, channel.rank)) for batch in net.batches]
        return [(each.loss, each.grad_norm, each.weight) for each in reports]

    alone = sw.Mesh(dp_shard=mesh.dp_shard)
    wanted = sw.simulate(alone.size, lambda channel: run(channel, alone))[0]
    assert sw.simulate(mesh.size, lambda channel: run(channel, mesh)) == [wanted] * mesh.size


class Overflowing(Chain):
    """The gradient of one parameter of one block is infinite at the second update."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0
        self.blocks[1].inner.weight.register_hook(self._overflow)  # type: ignore[union-attr,operator]

    def _overflow(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if self.num_forwards == 2 else gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return super().forward(x)


@pytest.mark.parametrize("mesh", [sw.Mesh(pp=2), sw.Mesh(pp=4), MESHES["sharded"]], ids=str)
def test_an_infinite_gradient_on_one_stage_skips_the_update_of_all(mesh: sw.Mesh) -> None:
    net = case(Overflowing, models.CHAIN)

    def run(channel: sw.Channel) -> list[bool]:
        engine = sw.parallelize(net.make(), plan_for(net, mesh=mesh), optimizer=adamw, loss=net.loss, channel=channel)
        skipped = []
        for batch in net.batches[:3]:
            before = {piece: tensor.clone() for piece, tensor in engine.state().items()}
            report = engine.step(batch)
            skipped.append(report.skipped)
            after = engine.state()
            moved = any(not torch.equal(tensor, before[piece]) for piece, tensor in after.items() if piece in before)
            assert moved is not report.skipped
        return skipped

    assert sw.simulate(mesh.size, run) == [[False, True, False]] * mesh.size
