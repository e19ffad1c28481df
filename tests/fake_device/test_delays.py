"""The engine on fake devices whose streams run behind the host: the bits of CPU ranks.

Transfers run on streams of their own, and memory goes to the next tensor as soon as the host lets go of it. So a wait
that is missing, or memory that is freed while another stream reads it, shows as other bits. It does so for certain
where nothing runs before the host, or another stream, waits for it (LAST), and else under some seed of the delays.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import simulate
from shardwise.testing.accelerator import LAST, NAME, behind, num_late
from tests.oracle.journeys import JOURNEYS, journey, same
from tests.oracle.journeys import plan_of as plan_of_a_journey

pytestmark = pytest.mark.usefixtures("fake")


class Block(nn.Module):
    """Draws, is computed again, writes to a buffer, and makes a tensor on the current device, whichever that is."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(()))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        here = torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else "cpu"
        own = torch.full((1,), 0.5, device=here)
        out: torch.Tensor = self.norm(x + self.dropout(self.down(torch.tanh(self.up(x) + own))))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        self.seen.add_(out.detach().abs().sum())
        return out


class Net(nn.Module):
    """Its first and last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), batch["label"])


def plan_of(stage: int = 1, k: int = 2, schedule: str = "1f1b", **mesh: int) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(**mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=600),
        merge=sw.Merge(microbatches=k),
        clip_grad_norm=0.5,
        pipeline=sw.Pipeline(schedule=schedule),
        tensor=sw.Tensor(rules={"blocks.*.up": "column", "blocks.*.down": "row"} if "tp" in mesh else None),
    )


PLANS: dict[str, tuple[sw.Plan, dict[str, Any]]] = {
    "stage 0": (plan_of(0, dp_shard=2), {}),
    "stage 1": (plan_of(1, dp_shard=2), {"host_batch": True}),
    "stage 2": (plan_of(2, dp_shard=2), {}),
    "stage 3": (plan_of(3, dp_shard=2), {"own_stream": True}),
    "replicas": (plan_of(2, dp_shard=2, dp_replicate=2), {}),
    "pp": (plan_of(pp=2), {"own_stream": True}),
    "interleaved": (plan_of(pp=2, schedule="interleaved"), {"own_stream": True}),
    "tp": (plan_of(tp=2), {}),
    "pp and dp": (plan_of(3, pp=2, dp_shard=2), {}),
}
"""And how a program may be, under LAST alone: on a stream of its own, or with batches on the host."""


def engine_over(
    channel: sw.Channel,
    model: nn.Module,
    plan: sw.Plan,
    loss_weight: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None,
) -> sw.Engine:
    return sw.parallelize(
        model,
        plan,
        optimizer=lambda each: torch.optim.AdamW(each, lr=0.1, foreach=False),
        loss=loss_of,
        loss_weight=loss_weight,
        channel=channel,
        seed=3,
    )


def batches(plan: sw.Plan, rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """Of a data rank."""
    generator = torch.Generator().manual_seed(plan.mesh.data_rank(rank))
    while True:
        yield {"input": torch.randn(6, 6, generator=generator), "label": torch.randint(3, (6,), generator=generator)}


def train(
    channel: sw.Channel, plan: sw.Plan, folder: Path, *, own_stream: bool = False, host_batch: bool = False
) -> list[Any]:
    """What the steps reported, parameters saved in the background after the second one and at the end, a prediction."""
    place = torch.device("cpu") if host_batch else channel.device
    with torch.Stream(channel.device) if own_stream else nullcontext():
        engine = engine_over(channel, Net(), plan, loss_weight=lambda batch: (batch["label"] > 0).sum())
        reports = []
        with sw.checkpoint.AsyncSaver(folder, channel=channel) as saver:
            for step, batch in zip(range(3), batches(plan, channel.rank), strict=False):
                reports.append(engine.step({name: value.to(place) for name, value in batch.items()}))
                if step == 1:
                    saver.save(engine)
        told = engine.predict({"x": torch.ones(2, 6)}, lambda inputs: engine.model(**inputs)).cpu()
        whole = {name: value.clone() for name, value in sw.full(engine, channel=channel)}
    saved = sw.checkpoint.open(folder)
    return [
        [(each.loss, each.grad_norm, each.weight) for each in reports],
        {name: saved.read(name) for name in whole},
        {"prediction": told} | whole,
    ]


@cache
def expected(name: str) -> list[Any]:
    """What ranks on the CPU see."""
    plan, _ = PLANS[name]
    with TemporaryDirectory() as folder:
        return simulate(plan.mesh.size, lambda channel: train(channel, plan, Path(folder)))[0]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *(pytest.param(name, LAST, marks=pytest.mark.quick) for name in PLANS),
        # Without a stream of its own a thread has to find its device.
        pytest.param("interleaved", 100, marks=pytest.mark.quick),
        *(pytest.param(name, seed, marks=pytest.mark.stress) for name in PLANS for seed in range(20)),
    ],
)
def test_delays_of_streams_change_no_bit(tmp_path: Path, name: str, seed: int) -> None:
    plan, way = PLANS[name]
    way = way if seed == LAST else {}
    wanted, before = expected(name), num_late()
    with behind(seed):
        for got in simulate(plan.mesh.size, lambda channel: train(channel, plan, tmp_path, **way), device=NAME):
            assert got[0] == wanted[0]
            for values, others in zip(got[1:], wanted[1:], strict=True):
                assert values.keys() == others.keys()
                assert [each for each, value in values.items() if not torch.equal(value, others[each])] == []
    assert num_late() > before, "nothing ran behind the host"


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_a_thread_that_logs_sees_every_step_as_it_was(own_stream: bool) -> None:
    def run(channel: sw.Channel, *, logs: bool) -> list[tuple[float, ...]]:
        reports: Queue[sw.StepReport | None] = Queue()
        seen: list[tuple[float, ...]] = []
        counts = [0]

        def log() -> None:
            while (report := reports.get()) is not None:
                seen.append((report.loss, report.grad_norm, report.skipped, report.weight, report.loss_scale or 0.0))
                counts.append(engine.counters.updates + engine.counters.skipped)

        torch.manual_seed(0)
        with torch.Stream(channel.device) if own_stream and logs else nullcontext():
            plan = replace(plan_of(dp_shard=2), precision=sw.Precision(loss_scale="dynamic"))
            engine = engine_over(channel, nn.Linear(6, 3), plan)
            thread = Thread(target=log)
            thread.start()
            for step, batch in zip(range(6), batches(plan, channel.rank), strict=False):
                if step == 2:
                    batch["input"].fill_(torch.inf)
                reports.put(engine.step(batch))
        reports.put(None)
        thread.join()
        assert counts == sorted(counts)
        assert (engine.counters.updates, engine.counters.skipped) == (5, 1)
        return seen

    wanted = simulate(2, lambda channel: run(channel, logs=False))
    with behind(1):
        assert str(simulate(2, lambda channel: run(channel, logs=True), device=NAME)) == str(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stage 2", "stage 3", "pp and tp"])
def test_what_else_an_engine_does_has_the_bits_of_cpu_ranks(tmp_path: Path, name: str) -> None:
    """Scales of losses, evaluations and averages, a save that is loaded, another layout."""
    plan, to, optimizer = JOURNEYS[name]
    arguments = plan.text(), plan_of_a_journey(to).text(), optimizer
    wanted = simulate(plan.mesh.size, lambda channel: journey(channel, *arguments, tmp_path / "cpu"))
    with behind(LAST):
        got = simulate(plan.mesh.size, lambda channel: journey(channel, *arguments, tmp_path / "devices"), device=NAME)
    for ours, theirs in zip(got, wanted, strict=True):
        assert [at for at, (one, two) in enumerate(zip(ours, theirs, strict=True)) if not same(one, two)] == []


@pytest.mark.slow
def test_devices_are_verified_against_one_process() -> None:
    def run(channel: sw.Channel) -> str:
        plan = plan_of(2, k=1, dp_shard=2)
        given = next(batches(plan, 0))
        report = sw.verify(
            Net, plan, [given], optimizer=lambda each: torch.optim.AdamW(each), loss=loss_of, channel=channel
        )
        return report.verdict

    assert set(simulate(2, run, device=NAME)) <= {"equal", "rounding"}
