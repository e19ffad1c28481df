"""The engine on fake devices whose streams run behind the host, under twenty seeds of delays: the bits of CPU ranks.

Transfers run on streams of their own, and memory goes to the next tensor as soon as the host lets go of it. So a wait
that is missing, or memory that is freed while another stream reads it, shows as other bits under some seed. It does so
for certain where nothing runs before the host, or another stream, waits for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import simulate
from shardwise.testing.accelerator import LAST, NAME, behind, num_late

pytestmark = pytest.mark.usefixtures("fake")

SEEDS = range(20)


class Block(nn.Module):
    """Draws, has a buffer, and is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(()))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x + self.dropout(self.down(torch.tanh(self.up(x)))))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


PLANS = {
    "alone": plan_of(),
    "stage 0": plan_of(0, dp_shard=2),
    "stage 1": plan_of(1, dp_shard=2),
    "stage 2": plan_of(2, dp_shard=2),
    "stage 3": plan_of(3, dp_shard=2),
    "replicas": plan_of(2, dp_shard=2, dp_replicate=2),
    "pp": plan_of(pp=2),
    "interleaved": plan_of(pp=2, schedule="interleaved"),
    "tp": plan_of(tp=2),
    "pp and dp": plan_of(3, pp=2, dp_shard=2),
}

Seen = tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


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


def train(channel: sw.Channel, plan: sw.Plan, folder: Path) -> Seen:
    """Losses, norms, what a save in the background had of the second update, and the parameters at the end."""
    engine = engine_over(channel, Net(), plan)
    reports = []
    with sw.checkpoint.AsyncSaver(folder, channel=channel) as saver:
        for step, batch in zip(range(3), batches(plan, channel.rank), strict=False):
            reports.append(engine.step(batch))
            if step == 1:
                saver.save(engine)
    whole = {name: value.clone() for name, value in sw.full(engine, channel=channel)}
    return [each.loss for each in reports], [each.grad_norm for each in reports], saved_in(folder), whole


def saved_in(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of the save in a folder."""
    saved = sw.checkpoint.open(folder)
    return {name: saved.read(name) for name in Net().state_dict()}


def assert_alike(got: tuple[dict[str, torch.Tensor], ...], wanted: tuple[dict[str, torch.Tensor], ...]) -> None:
    for values, others in zip(got, wanted, strict=True):
        assert values.keys() == others.keys()
        assert [each for each, value in values.items() if not torch.equal(value, others[each])] == []


@cache
def expected(name: str) -> Seen:
    """What ranks on the CPU see."""
    plan = PLANS[name]
    with TemporaryDirectory() as folder:
        return simulate(plan.mesh.size, lambda channel: train(channel, plan, Path(folder)))[0]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if seed == at else pytest.mark.stress)
        for at, name in enumerate(PLANS)
        for seed in SEEDS
    ],
)
def test_delays_of_streams_change_no_bit(tmp_path: Path, name: str, seed: int) -> None:
    plan = PLANS[name]
    wanted = expected(name)
    before = num_late()
    with behind(seed):
        for got in simulate(plan.mesh.size, lambda channel: train(channel, plan, tmp_path), device=NAME):
            assert got[:2] == wanted[:2]
            assert_alike(got[2:], wanted[2:])
    assert num_late() > before, "nothing ran behind the host"


class Place(nn.Module):
    """Makes a tensor on the current device, as models do that ask which it is, and writes to a buffer."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        here = torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else "cpu"
        out: torch.Tensor = self.down(torch.tanh(self.up(x) + torch.full((1,), 0.5, device=here)))
        self.total.add_(out.detach().abs().sum())
        return out


class Small(nn.Module):
    """Its first and last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Place() for _ in range(2))
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def train_shortly(
    channel: sw.Channel, plan: sw.Plan, *, own_stream: bool = False, host_batch: bool = False
) -> dict[str, torch.Tensor]:
    """The parameters and buffers after two updates, and a prediction; `own_stream`: on a stream of the user's."""
    place = torch.device("cpu") if host_batch else channel.device
    with torch.Stream(channel.device) if own_stream else nullcontext():
        engine = engine_over(channel, Small(), plan, loss_weight=lambda batch: (batch["label"] > 0).sum())
        for _, batch in zip(range(2), batches(plan, channel.rank), strict=False):
            engine.step({name: value.to(place) for name, value in batch.items()})
        seen = {"prediction": engine.predict({"x": torch.ones(2, 6)}, lambda inputs: engine.model(**inputs)).cpu()}
        return seen | {name: value.clone() for name, value in sw.full(engine, channel=channel)}


WAYS = {name: {"own_stream": True} for name in ("stage 3", "pp", "interleaved")} | {"stage 1": {"host_batch": True}}


@pytest.mark.parametrize(
    ("name", "seed"),
    [*((name, LAST) for name in PLANS if name != "alone"), ("interleaved", 100)],
)
def test_no_wait_is_missing_where_nothing_comes_before_it_is_waited_for(name: str, seed: int) -> None:
    plan, way = PLANS[name], WAYS.get(name, {}) if seed == LAST else {}
    wanted = simulate(plan.mesh.size, lambda channel: train_shortly(channel, plan))
    with behind(seed):
        got = simulate(plan.mesh.size, lambda channel: train_shortly(channel, plan, **way), device=NAME)
    assert_alike(tuple(got), tuple(wanted))


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
    for seed in range(2):
        with behind(seed):
            assert str(simulate(2, lambda channel: run(channel, logs=True), device=NAME)) == str(wanted)
