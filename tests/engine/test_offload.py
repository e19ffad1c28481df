"""Masters and moments in the host's memory: the bits of the run without, the bytes of the formula, the overlap.

Simulated ranks have a fake device each, with the kernels of the CPU: where the update is made changes no bit. Streams
run behind the host in most cases, so that a wait that is missing shows.
"""

import gc
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.engine.engine import Engine
from shardwise.engine.trained_parameters import ALL as EVERYTHING
from shardwise.engine.zero.bucket_memory import ShardedBucket
from shardwise.engine.zero.host_gradients import HostGradients
from shardwise.errors import ShardwiseError
from shardwise.testing.accelerator import LAST, behind
from tests.covering import covering
from tests.engine.hybrid_models import data_rank, decoder, num_data_ranks, plan_of
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import Batch, share_of

Optimizers = Callable[[Iterable[nn.Parameter]], Any]
Offload = Any

LAYOUTS: dict[str, tuple[str, int, dict[str, Any], Offload]] = {
    "alone": ("dp_shard=1", 1, {}, "state"),
    "alone from the host": ("dp_shard=1", 3, {}, "parameters"),
    "stage 0": ("dp_shard=2", 0, {}, "state"),
    "stage 1": ("dp_shard=3", 1, {"partition": "whole"}, "state"),
    "stage 2": ("dp_shard=3", 2, {}, "state"),
    "stage 3": ("dp_shard=2", 3, {"partition": "whole"}, "state"),
    "stage 3 from the host": ("dp_shard=3", 3, {}, "parameters"),
    "replicas": ("dp_replicate=2,dp_shard=2", 2, {"owners": "dp_shard"}, "state"),
    "tp": ("dp_shard=2,tp=2", 1, {}, "state"),
    "pp and tp": ("pp=2,tp=2", 2, {}, "state"),
    "pp": ("pp=2,dp_shard=2", 3, {"keep_gathered": True}, "parameters"),
}
"""Mesh, stage and settings; the tie is of two stages under pp."""


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    listed = list(parameters)
    return torch.optim.AdamW(
        [{"params": listed[::2], "lr": 1e-2}, {"params": listed[1::2], "weight_decay": 0.0}], lr=3e-3, foreach=True
    )


def several(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    listed = list(parameters)
    return [torch.optim.SGD(listed[::2], lr=0.1, foreach=True), torch.optim.Adagrad(listed[1::2], lr=1e-2, fused=False)]


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=False)


OPTIMIZERS: dict[str, Optimizers] = {"adamw": adamw, "groups": groups, "several": several, "momentum": momentum}

PRECISIONS = {
    "float32": sw.Precision(),
    "bfloat16": sw.Precision(compute="bfloat16", keep=("*norm*",)),
    "sent narrow": sw.Precision(compute="bfloat16", reduce="bfloat16", accumulate="bfloat16"),
    "scaled": sw.Precision(compute="float16", loss_scale="dynamic"),
}

MERGES = {"one": (1, None, True), "several": (3, 0.2, True), "sums": (2, 0.2, False)}


@dataclass
class Run:
    """What a training shows on one rank."""

    reports: list[str]
    gradients: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]
    held_out: float


def loss_of(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = word_loss(output, batch) * batch["factor"].mean()
    return loss


def batches(plan: sw.Plan, rank: int) -> list[dict[str, torch.Tensor]]:
    """Of a data rank; the second update has a loss on one of them that is not finite."""
    made, mine = [], data_rank(plan.mesh, rank)
    for step in range(4):
        rows = dict(share_of(word_batch(step, 12), mine, num_data_ranks(plan.mesh)))
        size = len(next(iter(rows.values())))
        made.append({**rows, "factor": torch.full((size,), float("inf") if step == 1 and mine == 0 else 1.0)})
    return made


def train(engine: Engine, steps: Iterable[int], rank: int) -> list[str]:
    """Reports of some steps, with a schedule."""
    found = []
    given = batches(engine.plan, rank)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in engine.optimizers]
    for step in steps:
        report = engine.step(given[step])
        found.append(repr((report.loss, report.grad_norm, report.skipped)))
        for schedule in schedules if not report.skipped else ():
            schedule.step()
    return found


def trained(channel: sw.Channel, plan: sw.Plan, optimizer: Optimizers) -> Run:
    model = decoder(0.1, dtype=torch.float32)
    engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel, seed=5)
    on_host = {each.parameter.device.type == "cpu" for each in engine._buffers.owned}
    assert on_host <= {plan.sharding.offload is not None}
    reports = train(engine, range(4), channel.rank)
    for optimizers in engine.optimizers:
        for master, state in optimizers.state.items():
            assert all(each.device == master.device for each in state.values() if torch.is_tensor(each) and each.dim())
    return Run(
        reports,
        {str(piece): each.cpu().clone() for piece, each in engine.gradients().items()},
        {name: each.clone() for name, each in sw.full(engine, optimizer=True)},
        engine.evaluate(batches(plan, channel.rank)[0]).loss,
    )


def assert_same(found: list[Run], wanted: list[Run]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.reports, one.held_out) == (other.reports, other.held_out)
        for mine, theirs in ((one.gradients, other.gradients), (one.whole, other.whole)):
            assert mine.keys() == theirs.keys()
            assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def late(seed: int | None) -> Any:
    return nullcontext() if seed is None else behind(seed)


def offloading(plan: sw.Plan, offload: Offload) -> sw.Plan:
    return replace(plan, sharding=replace(plan.sharding, offload=offload))


ALL = covering(list(LAYOUTS), list(OPTIMIZERS), list(PRECISIONS), list(MERGES), strength=2)
FEW = [
    (list(LAYOUTS)[at % len(LAYOUTS)], *case)
    for at, case in enumerate(covering(list(OPTIMIZERS), list(PRECISIONS), list(MERGES), strength=2))
]
"""Every layout, and every pair of the others."""


@pytest.mark.parametrize(
    ("layout", "optimizer", "precision", "merging", "seed"),
    [
        pytest.param(*case, (None, 0, LAST)[at % 3], marks=() if at < len(FEW) else pytest.mark.stress)
        for at, case in enumerate([*FEW, *(case for case in ALL if case not in FEW)])
    ],
)
def test_the_run_without_has_the_same_bits(
    fake: str, layout: str, optimizer: str, precision: str, merging: str, seed: int | None
) -> None:
    mesh, stage, settings, offload = LAYOUTS[layout]
    k, clip, average = MERGES[merging]
    plan = plan_of(mesh, stage=stage, clip=clip, precision=PRECISIONS[precision], sharding=settings)
    merge, tensor = sw.Merge(microbatches=k, average=average), replace(plan.tensor, prove=False)
    plan = replace(plan, merge=merge, tensor=tensor)

    def run(asked: Offload) -> list[Run]:
        return sw.simulate(
            plan.mesh.size,
            lambda channel: trained(channel, offloading(plan, asked), OPTIMIZERS[optimizer]),
            device=fake,
        )

    wanted = run(None)
    assert any("True" in each for each in wanted[0].reports)
    with late(seed):
        found = run(offload)
    assert_same(found, wanted)


@pytest.mark.parametrize("seed", [0, LAST])
@pytest.mark.parametrize(("stage", "offload"), [(1, "state"), (3, "parameters")])
def test_a_world_of_one_moves_ahead_as_well(fake: str, stage: int, offload: Offload, seed: int) -> None:
    """Its channel moves nothing while it computes: what goes up and down does."""

    def run(asked: Offload) -> tuple[Run, int]:
        plan = plan_of("dp_shard=1", stage=stage, k=2, precision=PRECISIONS["bfloat16"], sharding={"offload": asked})
        with torch.accelerator.device_index(0):
            channel = alone(torch.device(fake, 0))
            model = decoder(0.1, dtype=torch.float32)
            engine = sw.parallelize(model, plan, optimizer=adamw, loss=loss_of, channel=channel, seed=5)
            reports = train(engine, range(4), 0)
            gradients = {str(piece): each.cpu().clone() for piece, each in engine.gradients().items()}
            whole = {name: each.clone() for name, each in sw.full(engine, optimizer=True)}
            held_out = engine.evaluate(batches(plan, 0)[0]).loss
        return Run(reports, gradients, whole, held_out), engine.counters.early_reductions

    wanted, num_early = run(None)
    assert num_early == 0
    with behind(seed):
        found, num_early = run(offload)
    assert_same([found], [wanted])
    # At stage 1 a parameter that is never used holds up its bucket, and those after it.
    assert (num_early > 0) == (stage == 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_on_the_cpu_it_changes_nothing(stage: int) -> None:
    def run(channel: sw.Channel, offload: Offload) -> tuple[list[str], list[bool], Any]:
        plan = offloading(plan_of("dp_shard=2", stage=stage, k=2), offload)
        engine = sw.parallelize(decoder(), plan, optimizer=adamw, loss=loss_of, channel=channel)
        reports = train(engine, range(3), channel.rank)
        return reports, [bucket.has_master for bucket in engine._buffers.buckets], engine.footprint()

    without = sw.simulate(2, lambda channel: run(channel, None))
    assert sw.simulate(2, lambda channel: run(channel, "parameters" if stage == 3 else "state")) == without


def test_parameters_may_have_their_first_update_after_others(fake: str) -> None:
    """torch's fused SGD refuses momentum of some parameters alone; nobody asked for it."""

    def on_rank(channel: sw.Channel, offload: Offload) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        engine = sw.parallelize(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            sw.Plan(sharding=sw.Sharding(stage=3, offload=offload)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
            groups={"last": "1"},
        )
        for only in ("last", None, "last", None):
            engine.step({"input": torch.ones(2, 4)}, only=only)
        return {name: value.clone() for name, value in sw.full(engine, optimizer=True)}

    (found,), (wanted,) = (sw.simulate(1, partial(on_rank, offload=each), device=fake) for each in ("state", None))
    torch.testing.assert_close(found, wanted)


def test_where_nothing_is_decided_torchs_fused_kernels_update_and_settings_stay(fake: str) -> None:
    def run(channel: sw.Channel, **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        plan = plan_of("dp_shard=2", sharding={"offload": "state"})
        engine = sw.parallelize(
            decoder(dtype=torch.float32),
            plan,
            optimizer=lambda each: torch.optim.AdamW(each, lr=1e-2, **settings),
            loss=loss_of,
            channel=channel,
        )
        train(engine, range(3), channel.rank)
        (group,) = engine.optimizer.param_groups
        assert "master" not in group
        return group["fused"], {name: each.clone() for name, each in sw.full(engine)}

    open_, fused, apart = (sw.simulate(2, partial(run, fused=asked), device=fake) for asked in (None, True, False))
    assert [each[0] for each in (open_[0], fused[0], apart[0])] == [None, True, False]
    assert all(torch.equal(each, fused[0][1][name]) for name, each in open_[0][1].items())
    assert not all(torch.equal(each, apart[0][1][name]) for name, each in open_[0][1].items())


@pytest.mark.parametrize("settings", [{"capturable": True}, {"fused": True}, {"tensor": True, "capturable": True}])
def test_what_an_optimizer_has_on_the_device_comes_along(fake: str, settings: dict[str, Any]) -> None:
    """It has trained there before, with its steps and its learning rate on the device."""

    def run(channel: sw.Channel, offload: Offload) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        with torch.no_grad():
            for at, each in enumerate(model.parameters()):
                each.copy_(torch.linspace(-1, 1, each.numel()).view(each.shape) * (at + 1))
        model.to(channel.device)
        given = {name: value for name, value in settings.items() if name != "tensor"}
        rate = torch.tensor(1e-2, device=channel.device) if "tensor" in settings else 1e-2
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False, **given)
        if "fused" in given:
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        rows = torch.ones(4, 6, device=channel.device)
        model(rows).square().mean().backward()
        optimizer.step()
        assert {each["step"].device.type for each in optimizer.state.values()} == {fake}
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(bucket_bytes=200, offload=offload))
        engine = sw.parallelize(
            model, plan, optimizer=optimizer, loss=lambda output, _: output.square().mean(), channel=channel
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            engine.step({"input": rows})
            schedule.step()
        (group,) = optimizer.param_groups
        assert {name: group[name] for name in given} == given
        assert not torch.is_tensor(rate) or (group["lr"] is rate and float(rate) == pytest.approx(2.5e-3))
        return {name: each.clone() for name, each in sw.full(engine, optimizer=True)}

    wanted, found = (sw.simulate(2, partial(run, offload=offload), device=fake) for offload in (None, "state"))
    for name, each in wanted[0].items():
        assert torch.allclose(found[0][name], each, rtol=1e-5, atol=1e-7), name  # other kernels


# Checkpoints and other plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "before", "after"),
    [("float32", None, "state"), ("float32", "parameters", "state"), ("bfloat16", "state", None)],
)
def test_a_checkpoint_does_not_say_where_masters_were(
    fake: str, tmp_path: Path, precision: str, before: Offload, after: Offload
) -> None:
    def plan(offload: Offload, ranks: int) -> sw.Plan:
        sharding = {"offload": offload}
        return plan_of(f"dp_shard={ranks}", stage=3, k=2, precision=PRECISIONS[precision], sharding=sharding)

    def engine_of(channel: sw.Channel, offload: Offload) -> Engine:
        model = decoder(dtype=torch.float32)
        return sw.parallelize(
            model, plan(offload, channel.size), optimizer=adamw, loss=loss_of, channel=channel, seed=1
        )

    def save(channel: sw.Channel, offload: Offload, folder: Path) -> list[str]:
        engine = engine_of(channel, offload)
        train(engine, range(2), channel.rank)
        # In the background, while training goes on.
        with sw.checkpoint.AsyncSaver(folder, channel=channel) as saver:
            saver.save(engine)
            return train(engine, range(2, 4), channel.rank)

    def go_on(channel: sw.Channel, offload: Offload, folder: Path) -> list[str]:
        engine = engine_of(channel, offload)
        train(engine, [3], channel.rank)
        sw.load(folder, engine)
        for each in engine.optimizers:  # the schedule of `save` begins anew with the step after the save
            for group in each.param_groups:
                group.pop("initial_lr", None)
        return train(engine, range(2, 4), channel.rank)

    with behind(LAST):
        wanted = sw.simulate(2, lambda channel: save(channel, before, tmp_path / "offloaded"), device=fake)
    sw.simulate(2, lambda channel: save(channel, None, tmp_path / "plain"), device=fake)
    found, plain = (
        {
            name: sw.checkpoint.open(tmp_path / folder).read(name)
            for name in sw.checkpoint.open(tmp_path / folder).tensors
        }
        for folder in ("offloaded", "plain")
    )
    assert found.keys() == plain.keys()
    assert [name for name, each in found.items() if not torch.equal(each, plain[name])] == []
    assert any(name.endswith("/master") for name in found) == (precision == "bfloat16")
    with behind(0):
        assert sw.simulate(2, lambda channel: go_on(channel, after, tmp_path / "offloaded"), device=fake) == wanted


def test_a_relayout_moves_state_to_the_host_and_back(fake: str) -> None:
    moves: list[tuple[int, Offload]] = [(1, None), (1, "state"), (3, "parameters"), (2, "state"), (2, None)]

    def run(channel: sw.Channel, asked: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
        plans = [
            plan_of("dp_shard=2", stage=stage, sharding={"offload": offload if asked else None})
            for stage, offload in moves
        ]
        engine = sw.parallelize(
            decoder(dtype=torch.float32), plans[0], optimizer=adamw, loss=loss_of, channel=channel, seed=1
        )
        found = train(engine, [0], channel.rank)
        for at, plan in enumerate(plans[1:]):
            engine = sw.relayout(engine, plan)
            found += train(engine, [(2, 3)[at % 2]], channel.rank)
        return found, {name: each.clone() for name, each in sw.full(engine, optimizer=True)}

    with behind(0):
        moved = sw.simulate(2, lambda channel: run(channel, True), device=fake)
    still = sw.simulate(2, lambda channel: run(channel, False), device=fake)
    for (reports, found), (wanted, other) in zip(moved, still, strict=True):
        assert reports == wanted
        assert [name for name in other if not torch.equal(found[name], other[name])] == []


@pytest.mark.parametrize("offload", [None, "state"])
@pytest.mark.parametrize("layout", ["pp=2", "dp_shard=3"])
def test_ranks_that_own_nothing_take_part(fake: str, layout: str, offload: Offload) -> None:
    """A stage whose parameters are frozen, and owners of nothing, with a division and a clip."""

    def run(channel: sw.Channel) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
        model[2].requires_grad_(False)
        plan = sw.Plan(
            mesh=sw.Mesh.parse(layout),
            sharding=sw.Sharding(offload=offload, partition="whole"),
            merge=sw.Merge(microbatches=2),
            pipeline=sw.Pipeline(stages={"0": 0, "1": 0, "2": 1} if channel.size == 2 else None),
            clip_grad_norm=1e-3,
        )
        trained = list(model[0].parameters())
        engine = sw.parallelize(
            model, plan, optimizer=adamw(trained), loss=lambda output, _: output.square().mean(), channel=channel
        )
        losses = [engine.step({"input": torch.ones(4, 4)}).loss for _ in range(3)]
        return losses, {name: each.clone() for name, each in sw.full(engine)}

    found = sw.simulate(2 if layout == "pp=2" else 3, run, device=fake)
    expected = sw.simulate(len(found), run)
    for (losses, whole), (wanted, values) in zip(found, expected, strict=True):
        assert losses == wanted
        assert all(torch.equal(each, values[name]) for name, each in whole.items())


@pytest.mark.parametrize(("stage", "offload"), [(1, "state"), (2, "state")])
def test_values_that_are_written_from_outside_come_to_the_host(fake: str, stage: int, offload: Offload) -> None:
    def run(channel: sw.Channel, asked: Offload) -> list[str]:
        plan = plan_of("dp_shard=2", stage=stage, sharding={"offload": asked})
        engine = sw.parallelize(decoder(dtype=torch.float32), plan, optimizer=momentum, loss=loss_of, channel=channel)
        train(engine, [0], channel.rank)
        engine.model.load_state_dict(decoder(dtype=torch.float32, seed=4).state_dict())
        return train(engine, [2, 3], channel.rank)

    wanted = sw.simulate(2, lambda channel: run(channel, None), device=fake)
    with behind(LAST):
        assert sw.simulate(2, lambda channel: run(channel, offload), device=fake) == wanted


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stage", "offload"), [(1, "state"), (3, "parameters")])
def test_averages_are_where_masters_are(fake: str, stage: int, offload: Offload, precision: str) -> None:
    def run(channel: sw.Channel, asked: Offload) -> tuple[list[str], list[float], dict[str, torch.Tensor]]:
        plan = plan_of("dp_shard=2", stage=stage, precision=PRECISIONS[precision], sharding={"offload": asked})
        plan = replace(plan, average=sw.Average(decay=0.5))
        engine = sw.parallelize(decoder(dtype=torch.float32), plan, optimizer=adamw, loss=loss_of, channel=channel)
        rows = batches(plan, channel.rank)[0]
        reports, held_out = train(engine, range(3), channel.rank), []
        for _ in range(2):  # at once again: what moved up before may still be on its way
            with engine.averaged():
                pass
            with engine.averaged():
                held_out.append(engine.evaluate(rows).loss)
            held_out.append(engine.evaluate(rows).loss)
        assert held_out[0] != held_out[1]
        reports += train(engine, [3], channel.rank)
        state = {str(piece): each.cpu().clone() for piece, each in engine.state().items()}
        averages = [each for piece, each in engine.state().items() if piece.name.endswith("/weight_average")]
        assert {each.device.type for each in averages} <= {"cpu" if asked else fake}
        return reports, held_out, state

    wanted = sw.simulate(2, partial(run, asked=None), device=fake)
    with behind(LAST):
        found = sw.simulate(2, partial(run, asked=offload), device=fake)
    for (reports, held_out, state), (other_reports, other_held_out, other) in zip(found, wanted, strict=True):
        assert (reports, held_out) == (other_reports, other_held_out)
        assert state.keys() == other.keys()
        assert [name for name in state if not torch.equal(state[name], other[name])] == []


# Bytes and overlap ----------------------------------------------------------------------------------------------


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(12) for each in (nn.Linear(72, 72, bias=False), nn.Tanh())))


def wide_engine(channel: sw.Channel, stage: int, offload: Offload, k: int, compute: str) -> Engine:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=channel.size),
        sharding=sw.Sharding(stage=stage, bucket_bytes=4 * 72 * 72, offload=offload),
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute=compute),
    )
    return sw.parallelize(wide(), plan, optimizer=adamw, loss=lambda output, _: output.square().mean(), channel=channel)


OFFLOADS: list[tuple[int, Offload, int]] = [
    *((stage, "state", 1 + stage % 2) for stage in range(4)),
    *((stage, "state", 2 - stage % 2) for stage in range(4)),
    (3, "parameters", 1),
    (3, "parameters", 2),
]


@pytest.mark.parametrize(
    ("ranks", "stage", "offload", "k", "compute"),
    [
        pytest.param(
            ranks, *each, compute, marks=() if (at + ranks) % 2 == (compute == "float32") else pytest.mark.stress
        )
        for ranks in (1, 2)
        for at, each in enumerate(OFFLOADS)
        for compute in ("float32", "bfloat16")
    ],
)
def test_bytes_on_the_device_and_on_the_host_are_those_of_the_formula(
    fake: str, ranks: int, stage: int, offload: Offload, k: int, compute: str
) -> None:
    def run(channel: sw.Channel) -> None:
        gc.collect()  # of earlier tests
        before = torch.accelerator.memory_allocated(channel.device)
        engine = wide_engine(channel, stage, offload, k, compute)
        batch = {"input": torch.ones(4 * k, 72, device=channel.device)}
        before += batch["input"].nbytes
        for _ in range(3):
            engine.step(batch)
        channel.exchange(b"", purpose="all rest")
        planned = engine.footprint()
        held = planned.working_bytes + planned.gradient_bytes + planned.reducing_bytes
        assert planned.master_bytes == 0
        at_rest = torch.accelerator.memory_allocated(channel.device) - before
        assert 0.99 * held < at_rest < held + 1000
        torch.accelerator.reset_peak_memory_stats(channel.device)
        engine.step(batch)
        peak = torch.accelerator.max_memory_allocated(channel.device) - before
        # Activations, and gradients on their way into buffers.
        assert peak < at_rest + planned.gathered_bytes + 12 * 3 * 72 * 4 * 4 + 3 * 72 * 72 * 4
        on_host = [engine._closing._host_gradients.parts] if engine._closing._host_gradients is not None else []
        tensors = [each for parts in on_host for each in parts]
        tensors += [each for bucket in engine._buffers.buckets for each in (bucket.master, bucket.part, bucket._cast)
                    if each is not None and each.device.type == "cpu"]  # fmt: skip
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        assert sum(storages.values()) == planned.host_bytes
        if offload == "parameters":
            assert planned.working_bytes == 0
            assert all(isinstance(each, ShardedBucket) for each in engine._buffers.buckets)

    sw.simulate(ranks, run, device=fake)


@pytest.mark.parametrize(("stage", "offload"), [(0, "state"), (1, "state"), (2, "state"), (3, "parameters")])
def test_buckets_leave_while_backward_runs_and_are_updated_one_by_one(
    fake: str, monkeypatch: pytest.MonkeyPatch, stage: int, offload: Offload
) -> None:
    def run(channel: sw.Channel) -> tuple[int, int, int]:
        engine = wide_engine(channel, stage, offload, 2, "bfloat16")
        batch = {"input": torch.ones(8, 72, device=channel.device)}
        engine.step(batch)
        early, is_early = [0], [False]
        send = HostGradients._send

        def noted(self: HostGradients, name: str, part: torch.Tensor) -> None:
            early[0] += is_early[0] and self is engine._closing._host_gradients
            send(self, name, part)

        engine._gradients.reduce = noting(engine._gradients.reduce, is_early)  # type: ignore[method-assign]
        is_early[0] = True
        with monkeypatch.context() as patch:
            patch.setattr(HostGradients, "_send", noted)
            engine.step(batch)
        parts = engine._closing._bucket_updates._parts[EVERYTHING] or {}
        return early[0], len(parts), len(engine._buffers.buckets)

    def noting(reduce: Callable[[], None], is_early: list[bool]) -> Callable[[], None]:
        def ended() -> None:
            is_early[0] = False
            reduce()

        return ended

    with torch.accelerator.device_index(0):
        of_one = run(alone(torch.device(fake, 0)))
    for early, num_parts, num_buckets in (of_one, *sw.simulate(2, run, device=fake)):
        assert num_buckets >= 6
        assert early >= num_buckets - 2
        assert num_parts == num_buckets


def test_no_page_locked_memory_is_an_error_in_words_on_all_ranks(fake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def short(*size: Any, **settings: Any) -> torch.Tensor:
        if settings.get("pin_memory") and threading.current_thread() is refused[0]:
            raise RuntimeError("CUDA error: out of memory")
        return zeros(*size, **settings)

    refused: list[threading.Thread | None] = [None]

    def run(channel: sw.Channel) -> str:
        if channel.rank == 1:
            refused[0] = threading.current_thread()
        channel.exchange(b"", purpose="all are here")
        with pytest.raises(ShardwiseError) as caught:
            wide_engine(channel, 1, "state", 1, "bfloat16").step({"input": torch.ones(4, 72)})
        return str(caught.value)

    monkeypatch.setattr(torch, "zeros", short)
    others, own = sw.simulate(2, run, device=fake)
    assert own.startswith("sharding.offload: the host gives no ")
    assert "rank 1" in others
