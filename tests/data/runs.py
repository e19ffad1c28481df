"""Runs on samples that carry their number, under any layout, which end at any instant."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.engine.forward.batches import TrainedBatches

ROWS = 12
SAMPLES = 43
"""No multiple of the rows: batches run over the ends of epochs."""

PLANS = [
    sw.Plan(mesh=sw.Mesh(), sharding=sw.Sharding(stage=0)),
    sw.Plan(mesh=sw.Mesh(dp_shard=2)),
    sw.Plan(mesh=sw.Mesh(dp_replicate=3), sharding=sw.Sharding(stage=0)),
    sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2)),
    sw.Plan(mesh=sw.Mesh(dp_shard=5), sharding=sw.Sharding(stage=3)),
    sw.Plan(mesh=sw.Mesh(dp_shard=3, tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"})),
    sw.Plan(mesh=sw.Mesh(dp_shard=7)),
    sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2, tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"})),
]
"""For 1 to 8 ranks."""


class Squares:
    """Sample i has the number i, and an input that depends on it."""

    def __init__(self, size: int = SAMPLES) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": torch.linspace(0, index + 1, 8), "number": index}


class Counting:
    """A stream of so many samples in each epoch, opened at any of them."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def open(self, position: int) -> Iterator[dict[str, int]]:
        return ({"number": at} for at in range(position, self.size))


class Endless:
    """Sample i is i."""

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index}


@dataclass
class StandIn:
    """What data asks of an engine."""

    channel: sw.Channel
    plan: sw.Plan
    steps: int = 0
    successor: None = None
    trained_batches: TrainedBatches = field(default_factory=TrainedBatches)

    def step(self, batch: dict[str, Any]) -> None:
        """As an engine does it, without a model."""
        self.steps += 1
        self.trained_batches.tell(batch)


class KilledError(Exception):
    """The end of a run at some instant."""


@dataclass
class Kill:
    """Ends a run at one of its instants: before a step, after it, or after a save."""

    instant: int
    seen: int = 0

    def here(self) -> None:
        """One instant later."""
        self.seen += 1
        if self.seen > self.instant:
            raise KilledError


@dataclass
class Trained:
    """What of a run is not lost with it."""

    numbers: list[list[int]] = field(default_factory=list)
    """Of each update, those of this rank."""
    losses: list[float] = field(default_factory=list)


def engine_of(plan: sw.Plan, channel: sw.Channel) -> sw.Engine:
    torch.manual_seed(0)
    return sw.parallelize(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        loss=lambda output, batch: output.square().mean(),
        channel=channel,
    )


def life(channel: sw.Channel, plan: sw.Plan, folder: Path, steps: int, kill: Kill, save_every: int) -> Trained:
    """A run from its newest save on, up to `steps` updates or to the kill; with what it has trained since the save."""
    engine = engine_of(plan, channel)
    data = sw.Data(Squares(), global_batch=ROWS, seed=7)
    taken, trained = 0, Trained()
    if folder.exists():
        taken = sw.load(folder, engine, data=data)["step"]
    try:
        while taken < steps:
            for batch in data.on(engine):
                kill.here()
                report = engine.step(batch)
                taken += 1
                trained.numbers.append(batch["number"].tolist())
                trained.losses.append(report.loss)
                kill.here()
                if taken % save_every == 0 or taken == steps:
                    sw.save(folder, engine, extra={"step": taken}, data=data)
                    kill.here()
                if taken == steps:
                    break
    except KilledError:
        pass
    return trained


def joined(shares: list[list[list[int]]]) -> list[list[int]]:
    """Global batches from those of each data rank."""
    return [[number for part in parts for number in part] for parts in zip(*shares, strict=True)]


def whole_batches(by_rank: list[Trained], plan: sw.Plan) -> list[list[int]]:
    """The numbers of each update, of all data ranks in their order; ranks of one data rank have the same."""
    of_data_rank: dict[int, list[list[int]]] = {}
    for rank, each in enumerate(by_rank):
        assert of_data_rank.setdefault(plan.mesh.data_rank(rank), each.numbers) == each.numbers
    shares = [of_data_rank[at] for at in sorted(of_data_rank)]
    return joined(shares)


def killed_run(folder: Path, seed: int, *, steps: int, num_kills: int, plans: list[sw.Plan]) -> Trained:
    """A run that is killed so often at random instants, each life under a random plan of `plans`."""
    drawn = random.Random(seed)
    done = Trained()
    for turn in range(num_kills + 1):
        plan = drawn.choice(plans)
        save_every = drawn.randint(1, 4)
        instant = drawn.randint(0, 2 * steps) if turn < num_kills else 10**9
        lives = sw.simulate(
            plan.mesh.size,
            lambda channel, plan=plan, at=instant, every=save_every: life(  # type: ignore[misc]
                channel, plan, folder, steps, Kill(at), every
            ),
        )
        begun = sw.checkpoint.open(folder).step if folder.exists() else 0
        # What was trained after the newest save is lost with the run; what was before stays.
        numbers, losses = whole_batches(lives, plan), lives[0].losses
        first = len(done.numbers)
        keep = (begun or 0) - first
        done.numbers += numbers[:keep]
        done.losses += losses[:keep]
    return done
