"""SyncBatchNorm on ranks: the statistics, gradients and buffers of BatchNorm in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.loops import begun, mean_square, plan_of, sgd
from tests.engine.refusals import same_error_everywhere
from tests.refusals import Refusals

NUM_RANKS, ROWS = 2, 3


class Net(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 6), norm()
        self.last = nn.Linear(6, 1)
        self.is_picture = isinstance(self.norm, nn.BatchNorm2d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.is_picture:
            x = x[:, :, None, None].expand(-1, -1, 2, 3) * torch.arange(1.0, 4.0)
        output: torch.Tensor = self.last(self.norm(x).flatten(2).mean(2) if self.is_picture else self.norm(x))
        return output


class Region(nn.Module):
    """A cut region with statistics in it, which is proved on each data rank for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.last = nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.last(torch.relu(self.first(self.norm(x))))
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: Net(lambda: nn.BatchNorm1d(6)),
    "2d": lambda: Net(lambda: nn.BatchNorm2d(6, eps=0.1)),
    "cumulative": lambda: Net(lambda: nn.BatchNorm1d(6, momentum=None)),
    "plain": lambda: Net(lambda: nn.BatchNorm2d(6, affine=False, track_running_stats=False)),
}
GATHERED = {"first": "colwise_gather_output"}
PLANS = {
    "replicas": plan_of("dp_replicate=2"),
    "stage 1, k=2": plan_of("dp_shard=2", 1, 2),
    "stage 2": plan_of("dp_shard=2", 2),
    "stage 3, again": plan_of("dp_shard=2", 3, checkpoint=("norm",)),
    "pp, k=2": plan_of("pp=2,dp_shard=2", k=2, stages={"first": 0, "norm": 1, "last": 1}),
    "tp": plan_of("tp=2,dp_shard=2", rules=GATHERED),
}
CASES = [(MODELS[name], plan) for name in MODELS for plan in PLANS.values()]
CASES += [(Region, plan_of("tp=2,dp_shard=2", rules={"first": "column", "last": "row"}))]


def rows(step: int, k: int) -> list[list[torch.Tensor]]:
    """Of each rank the rows of each microbatch."""
    generator = torch.Generator().manual_seed(step)
    scale = torch.arange(1.0, 1 + NUM_RANKS * k * ROWS).view(-1, 1)
    drawn = (torch.randn(NUM_RANKS * k * ROWS, 4, generator=generator) * scale).split(ROWS)
    return [list(drawn[rank * k : (rank + 1) * k]) for rank in range(NUM_RANKS)]


def seen(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def engine_of(channel: sw.Channel, make: Callable[[], nn.Module], plan: sw.Plan, **settings: Any) -> Any:
    return begun(channel, lambda: nn.SyncBatchNorm.convert_sync_batchnorm(make()), plan, **settings)


@pytest.mark.parametrize(("make", "plan"), CASES)
def test_it_is_that_of_one_process(make: Callable[[], nn.Module], plan: sw.Plan) -> None:
    """Also where one data rank alone predicts before the first step."""
    k, model = plan.merge.microbatches, make()
    optimizer = sgd(model.parameters())
    for step in range(3):
        given = rows(step, k)
        for at in range(k):
            (mean_square(model(torch.cat([each[at] for each in given]))) / k).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine = engine_of(channel, make, plan)
        rank = plan.mesh.data_rank(channel.rank)
        if rank and make is Region:
            engine.predict({"x": torch.cat(rows(0, k)[0])})
            engine.model.train()
        for step in range(3):
            engine.step({"x": torch.cat(rows(step, k)[rank])})
        with engine.whole():
            return seen(engine.model)

    for found in sw.simulate(plan.mesh.size, run):
        torch.testing.assert_close(found, seen(model), rtol=1e-4, atol=1e-5)


def test_unlike_rows_and_half_precision() -> None:
    """5 and 1 rows: each row counts alike."""
    given = torch.cat(rows(0, 1)[0] + rows(0, 1)[1])
    expected = mean_square(MODELS["1d"]()(given)).item()

    def run(channel: sw.Channel) -> list[float]:
        engines = [engine_of(channel, MODELS["1d"], plan_of("dp_shard=2", compute=each)) for each in (None, "bfloat16")]
        return [each.step({"x": given[5:] if channel.rank else given[:5]}).loss for each in engines]

    for exact, rounded in sw.simulate(2, run):
        assert exact == pytest.approx(expected, rel=1e-5)
        assert rounded == pytest.approx(expected, rel=0.05)


class WithForward(nn.SyncBatchNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(input)
        return output


def met(make: Callable[[], nn.Module]) -> None:
    """Some ranks skip a microbatch, and all go on when none does."""

    def run(channel: sw.Channel) -> None:
        settings: Any = {"loss_weight": lambda batch: float(batch["counts"].sum())}
        engine = begun(channel, make, plan_of("dp_shard=2"), **settings)
        try:
            engine.step({"x": torch.ones(2, 4), "counts": torch.ones(2) * channel.rank})
        finally:
            engine.step({"x": torch.ones(2, 4), "counts": torch.ones(2)})

    raise same_error_everywhere(2, run)


REFUSED = Refusals(
    "engine.batch_statistics",
    {
        "its own group": lambda: met(lambda: Net(lambda: nn.SyncBatchNorm(6, process_group=object()))),
        "its own forward": lambda: met(lambda: Net(lambda: WithForward(6))),
        "microbatches that some ranks skip": lambda: met(lambda: Net(lambda: nn.SyncBatchNorm(6))),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_other_statistics_are_refused(case: str) -> None:
    REFUSED.check(case)
