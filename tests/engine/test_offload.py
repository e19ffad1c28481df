"""Masters and moments in the host's memory: the bits of the run without, the bytes of the formula.

Simulated ranks have a fake device each, with the kernels of the CPU: where the update is made changes no bit. Streams
run behind the host in most cases, so that a wait that is missing shows.
"""

import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.testing.accelerator import LAST, behind
from tests.covering import covering
from tests.engine.loops import begun, mean_square
from tests.engine.loops import plan_of as short_plan_of
from tests.engine.tower import on_ranks
from tests.oracle.batches import Batch, share_of, word_batch, word_loss
from tests.oracle.decoder import DECODER, decoder
from tests.oracle.program import plan_of, seeded

Optimizers = Callable[[Iterable[nn.Parameter]], Any]
Offload = Any


planned = partial(plan_of, DECODER, clip=0.2, bucket_bytes=2000)
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


Run = tuple[list[str], dict[str, torch.Tensor]]
"""Reports of a rank; its gradients and all values at the end."""


def loss_of(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = word_loss(output, batch) * batch["factor"].mean()
    return loss


def batches(plan: sw.Plan, rank: int) -> list[dict[str, torch.Tensor]]:
    """Of a data rank; the second update has a loss on one of them that is not finite."""
    made, mine = [], plan.mesh.data_rank(rank)
    for step in range(4):
        rows = dict(share_of(word_batch(step, 12), mine, plan.mesh.num_data_ranks))
        size = len(next(iter(rows.values())))
        made.append({**rows, "factor": torch.full((size,), float("inf") if step == 1 and mine == 0 else 1.0)})
    return made


def train(engine: sw.Engine, steps: Iterable[int]) -> list[str]:
    """Reports of some steps, with a schedule that begins anew."""
    given, found = batches(engine.plan, engine.channel.rank), []
    for group in (group for each in engine.optimizers for group in each.param_groups):
        group.pop("initial_lr", None)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in engine.optimizers]
    for step in steps:
        report = engine.step(given[step])
        found.append(repr((report.loss, report.grad_norm, report.skipped)))
        for schedule in schedules if not report.skipped else ():
            schedule.step()
    return found


def engine_of(channel: sw.Channel, plan: sw.Plan, optimizer: Optimizers = adamw) -> sw.Engine:
    model = decoder(0.1, dtype=torch.float32)
    return sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel, seed=5, groups=GROUPS)


GROUPS = {"last": ("blocks.1", "norm")}


def seen(engine: sw.Engine, reports: list[str]) -> Run:
    on_host = engine.plan.sharding.offload is not None
    for optimizer in engine.optimizers:
        for group in optimizer.param_groups:
            assert {each.device.type == "cpu" for each in group["params"]} <= {on_host}
        for master, state in optimizer.state.items():
            assert all(each.device == master.device for each in state.values() if torch.is_tensor(each) and each.dim())
    tensors = {f"gradient {piece}": each.cpu().clone() for piece, each in engine.gradients().items()}
    tensors |= {name: each.clone() for name, each in sw.full(engine, optimizer=True)}
    held_out = engine.evaluate(batches(engine.plan, engine.channel.rank)[0]).loss
    return [*reports, str(held_out)], tensors


def assert_same(found: list[Run], wanted: list[Run]) -> None:
    for (said, mine), (other_said, others) in zip(found, wanted, strict=True):
        assert said == other_said
        assert mine.keys() == others.keys()
        assert [name for name in mine if not torch.equal(mine[name], others[name])] == []


def offloading(plan: sw.Plan, offload: Offload) -> sw.Plan:
    return replace(plan, sharding=replace(plan.sharding, offload=offload))


# What a run does: f(engine, folder) -> the engine at the end, and what it said ------------------------------------


def steps(engine: sw.Engine, _: Path) -> tuple[sw.Engine, list[str]]:
    reports = train(engine, range(4))
    assert any("True" in each for each in reports)  # skipped
    return engine, reports


def saved(engine: sw.Engine, folder: Path) -> tuple[sw.Engine, list[str]]:
    """In the background, while training goes on; then from there again."""
    reports = train(engine, range(2))
    with sw.checkpoint.AsyncSaver(folder) as saver:
        saver.save(engine)
        reports += train(engine, range(2, 4))
    sw.load(folder, engine)
    assert train(engine, range(2, 4)) == reports[2:]
    return engine, [*reports, *sorted(sw.checkpoint.open(folder).tensors)]


def laid_out(engine: sw.Engine, _: Path) -> tuple[sw.Engine, list[str]]:
    """To the host and back."""
    reports, plan, asked = train(engine, [0]), engine.plan, engine.plan.sharding.offload
    for stage, offload in ((1, None), (1, "state"), (3, "parameters"), (2, None), (plan.sharding.stage, asked)):
        sharding = replace(plan.sharding, stage=stage, offload=offload if asked else None)
        engine = sw.relayout(engine, replace(plan, sharding=sharding))
        reports += train(engine, [2 + stage % 2])
    return engine, reports


def written(engine: sw.Engine, _: Path) -> tuple[sw.Engine, list[str]]:
    reports = train(engine, [0])
    with engine.whole(optimizer=False) if engine.plan.sharding.stage == 3 else nullcontext():
        engine.model.load_state_dict(decoder(dtype=torch.float32, seed=4).state_dict())
    return engine, reports + train(engine, [2, 3])


def averaged(engine: sw.Engine, _: Path) -> tuple[sw.Engine, list[str]]:
    rows = batches(engine.plan, engine.channel.rank)[0]
    engine = sw.relayout(engine, replace(engine.plan, average=sw.Average(decay=0.5)))
    reports = train(engine, range(3))
    for _at in range(2):  # at once again: what moved up before may still be on its way
        with engine.averaged():
            pass
        with engine.averaged():
            inside = engine.evaluate(rows).loss
        assert inside != engine.evaluate(rows).loss
        reports.append(str(inside))
    averages = [each for piece, each in engine.state().items() if piece.name.endswith("/weight_average")]
    assert {each.device.type == "cpu" for each in averages} <= {engine.plan.sharding.offload is not None}
    return engine, reports + train(engine, [3])


def in_groups(engine: sw.Engine, _: Path) -> tuple[sw.Engine, list[str]]:
    """Parameters have their first update after others: torch's fused SGD refuses momentum of some alone."""
    rows = batches(engine.plan, engine.channel.rank)[0]
    return engine, [str(engine.step(rows, only=only).loss) for only in ("last", None, "last", None)]


CASES: list[tuple[Any, ...]] = [
    (steps, "alone", "adamw", "sent narrow", "several", None),
    (averaged, "alone from the host", "momentum", "bfloat16", "one", LAST),
    (steps, "stage 0", "groups", "scaled", "sums", 0),
    (saved, "stage 1", "several", "float32", "several", LAST),
    (laid_out, "stage 2", "adamw", "bfloat16", "several", LAST),
    (steps, "stage 2", "momentum", "sent narrow", "sums", LAST),
    (written, "stage 2", "momentum", "bfloat16", "one", LAST),
    (averaged, "stage 3", "adamw", "float32", "sums", LAST),
    (saved, "stage 3 from the host", "adamw", "bfloat16", "several", LAST),
    (laid_out, "stage 3 from the host", "momentum", "float32", "one", 0),
    (written, "stage 3 from the host", "momentum", "float32", "several", LAST),
    (in_groups, "stage 3 from the host", "adamw", "bfloat16", "one", LAST),
    (in_groups, "replicas", "momentum", "float32", "several", 0),
    (steps, "tp", "groups", "bfloat16", "one", None),
    (steps, "pp and tp", "several", "float32", "several", 0),
    (steps, "pp", "adamw", "scaled", "several", LAST),
]
"""Every scenario, layout, optimizer, precision and way to merge more than once; the pairs are for `make stress`."""
ALL = [
    *covering([steps], list(LAYOUTS), list(OPTIMIZERS), list(PRECISIONS), list(MERGES), (None, 0, LAST), strength=2),
    *product(
        (saved, laid_out, written, averaged, in_groups),
        *(("stage 1", "stage 2", "stage 3 from the host"), ("momentum",), ("float32", "bfloat16"), ("one",), (LAST,)),
    ),
]


@pytest.mark.parametrize(
    ("scenario", "layout", "optimizer", "precision", "merging", "seed"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.stress) for each in ALL if each not in CASES)],
)
def test_the_run_without_has_the_same_bits(
    scenario: Any, layout: str, optimizer: str, precision: str, merging: str, seed: Any, fake: str, tmp_path: Path
) -> None:
    mesh, stage, settings, offload = LAYOUTS[layout]
    k, clip, average = MERGES[merging]
    plan = planned(mesh, stage=stage, clip=clip, precision=PRECISIONS[precision], **settings)
    merge, tensor = sw.Merge(microbatches=k, average=average), replace(plan.tensor, prove=False)
    plan = replace(plan, merge=merge, tensor=tensor)

    def run(channel: sw.Channel, asked: Offload) -> Run:
        engine = engine_of(channel, offloading(plan, asked), OPTIMIZERS[optimizer])
        return seen(*scenario(engine, tmp_path / str(asked)))

    wanted = on_ranks(plan, partial(run, asked=None), device=fake)
    with nullcontext() if seed is None else behind(seed):
        assert_same(on_ranks(plan, partial(run, asked=offload), device=fake), wanted)
    if scenario is saved:
        one, other = (sw.checkpoint.open(tmp_path / str(asked)) for asked in (offload, None))
        assert [name for name in one.tensors if not torch.equal(one.read(name), other.read(name))] == []


OF_STAGES = pytest.mark.parametrize(("stage", "offload"), [(1, "state"), (3, "parameters")])


@OF_STAGES
def test_a_world_of_one_moves_ahead_as_well(fake: str, stage: int, offload: Offload) -> None:
    """Its channel moves nothing while it computes: what goes up and down does."""
    plan = planned("dp_shard=1", stage=stage, k=2, precision=PRECISIONS["bfloat16"], offload=offload)
    with behind(LAST), torch.accelerator.device_index(0):
        engine = engine_of(alone(torch.device(fake, 0)), plan)
        train(engine, range(4))
    # At stage 1 a parameter that is never used holds up its bucket, and those after it.
    assert (engine.counters.early_reductions > 0) == (stage == 3)


@OF_STAGES
def test_on_the_cpu_it_changes_nothing(stage: int, offload: Offload) -> None:
    def run(channel: sw.Channel, asked: Offload) -> tuple[list[str], Any]:
        engine = engine_of(channel, offloading(planned("dp_shard=2", stage=stage, k=2), asked))
        return train(engine, range(3)), engine.footprint()

    assert sw.simulate(2, partial(run, asked=offload)) == sw.simulate(2, partial(run, asked=None))


@pytest.mark.parametrize("settings", [{"fused": True}, {"capturable": True}])
def test_what_an_optimizer_has_on_the_device_comes_along(fake: str, settings: dict[str, Any]) -> None:
    """It has trained there before, with its steps there; and its learning rate, if it is capturable."""

    def run(channel: sw.Channel, offload: Offload) -> dict[str, torch.Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))().to(channel.device)
        rate: Any = torch.tensor(1e-2, device=channel.device) if "capturable" in settings else 1e-2
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False, **settings)
        rows = torch.ones(4, 6, device=channel.device)
        mean_square(model(rows)).backward()
        optimizer.step()
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(bucket_bytes=200, offload=offload))
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=mean_square, channel=channel)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            engine.step({"input": rows})
            schedule.step()
        (group,) = optimizer.param_groups
        assert {name: group[name] for name in settings} == settings
        assert not torch.is_tensor(rate) or (group["lr"] is rate and float(rate) == pytest.approx(2.5e-3))
        return {name: each.clone() for name, each in sw.full(engine, optimizer=True)}

    wanted, found = (sw.simulate(2, partial(run, offload=offload), device=fake)[0] for offload in (None, "state"))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)  # other kernels


# Bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "stage", "k", "compute", "reduce"),
    covering((1, 2), (0, 1, 2, 3, "parameters"), (1, 2), ("float32", "bfloat16"), ("float32", "bfloat16"), strength=2),
)
def test_bytes_on_the_device_and_on_the_host_are_those_of_the_formula(
    fake: str, ranks: int, stage: Any, k: int, compute: str, reduce: Any
) -> None:
    number, offload = (3, stage) if stage == "parameters" else (stage, "state")

    def run(channel: sw.Channel) -> None:
        gc.collect()  # of earlier tests
        before = torch.accelerator.memory_allocated(channel.device)
        layers = (each for _ in range(12) for each in (nn.Linear(72, 72, bias=False), nn.Tanh()))
        precision = sw.Precision(compute=compute, reduce=reduce)
        sharding = {"bucket_bytes": 4 * 72 * 72, "offload": offload}
        plan = short_plan_of(f"dp_shard={ranks}", number, k, sharding=sharding, precision=precision)
        engine: Any = begun(channel, lambda: nn.Sequential(*layers), plan, optimizer=adamw)
        batch = {"input": torch.ones(4 * k, 72, device=channel.device)}
        before += batch["input"].nbytes
        for _ in range(3):
            engine.step(batch)
        channel.exchange(b"", purpose="all rest")
        planned = engine.footprint()
        held = planned.working_bytes + planned.gradient_bytes + planned.reducing_bytes
        assert planned.master_bytes == 0
        at_rest = torch.accelerator.memory_allocated(channel.device) - before
        assert at_rest < held + 1000  # a copy in the dtype of the wire is there while it travels
        torch.accelerator.reset_peak_memory_stats(channel.device)
        engine.step(batch)
        peak = torch.accelerator.max_memory_allocated(channel.device) - before
        # Activations, and gradients on their way into buffers.
        assert 0.99 * held < peak < at_rest + planned.gathered_bytes + 12 * 3 * 72 * 4 * 4 + 3 * 72 * 72 * 4
        assert (planned.working_bytes == 0) == (stage == "parameters")
        # Moments are the optimizer's; the rest of what is on the host is what the formula says.
        own = [*engine.gradients().values(), *(each for each in engine.state().values() if each.numel() > 1)]
        kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in own if each.is_cpu}
        moments = sum(each["exp_avg"].nbytes * 2 for each in engine.optimizer.state.values())
        assert sum(kept.values()) - moments <= planned.host_bytes

    sw.simulate(ranks, run, device=fake)
