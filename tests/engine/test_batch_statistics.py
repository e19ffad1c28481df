"""SyncBatchNorm on ranks: the statistics, gradients and buffers of BatchNorm in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.oracle import Batch

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


NORMS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.BatchNorm1d(6),
    "2d": lambda: nn.BatchNorm2d(6, eps=0.1),
    "cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "plain": lambda: nn.BatchNorm2d(6, affine=False, track_running_stats=False),
}

PLANS = {
    "replicas": sw.Plan(mesh=sw.Mesh(dp_replicate=2)),
    "stage 1, k=2": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=1), merge=sw.Merge(microbatches=2)),
    "stage 2": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=2)),
    "stage 3, again": sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=3),
        activations=sw.Activations(checkpoint=("norm",)),
    ),
    "pp, k=2": sw.Plan(
        mesh=sw.Mesh(pp=2, dp_shard=2),
        pipeline=sw.Pipeline(stages={"first": 0, "norm": 1, "last": 1}),
        merge=sw.Merge(microbatches=2),
    ),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2, dp_shard=2), tensor=sw.Tensor(rules={"first": "colwise_gather_output"})),
}


def rows(step: int, k: int) -> list[list[torch.Tensor]]:
    """Of each rank the rows of each microbatch."""
    generator = torch.Generator().manual_seed(step)
    scale = torch.arange(1.0, 1 + NUM_RANKS * k * ROWS).view(-1, 1)
    drawn = (torch.randn(NUM_RANKS * k * ROWS, 4, generator=generator) * scale).split(ROWS)
    return [list(drawn[rank * k : (rank + 1) * k]) for rank in range(NUM_RANKS)]


def seen(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def in_one_process(norm: Callable[[], nn.Module], k: int) -> dict[str, torch.Tensor]:
    model = Net(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        given = rows(step, k)
        for at in range(k):
            (model(torch.cat([each[at] for each in given])).square().mean() / k).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen(model)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("norm", NORMS)
def test_it_is_that_of_one_process(norm: str, name: str) -> None:
    plan = PLANS[name]
    k = plan.merge.microbatches
    expected = in_one_process(NORMS[norm], k)

    def train(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(Net(NORMS[norm]))
        engine = sw.parallelize(
            model,
            plan,
            optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        for step in range(3):
            engine.step({"x": torch.cat(rows(step, k)[plan.mesh.data_rank(channel.rank)])})
        with engine.whole():
            return seen(model)

    for found in sw.simulate(plan.mesh.size, train):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """A cut region with statistics in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.SyncBatchNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return output


def test_a_cut_region_is_proved_on_each_data_rank_for_itself() -> None:
    """Also where one data rank alone predicts before the first step."""
    given = torch.cat(rows(0, 1)[0] + rows(0, 1)[1])
    expected = nn.Sequential(Block())(given).square().mean().item()

    def train(channel: sw.Channel) -> float:
        plan = sw.Plan(mesh=sw.Mesh(tp=2, dp_shard=2), tensor=sw.Tensor(rules={"0.up": "column", "0.down": "row"}))
        engine = sw.parallelize(
            nn.Sequential(Block()),
            plan,
            optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        if plan.mesh.data_rank(channel.rank):
            engine.predict({"input": given})
            engine.model.train()(given)
        return engine.step({"input": given.chunk(2)[plan.mesh.data_rank(channel.rank)]}).loss

    for loss in sw.simulate(4, train):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_unlike_rows_and_half_precision() -> None:
    """5 and 1 rows: each row counts alike."""
    given = torch.cat(rows(0, 1)[0] + rows(0, 1)[1])
    expected = Net(NORMS["1d"])(given).square().mean().item()

    def train(channel: sw.Channel) -> tuple[float, float]:
        found = []
        for compute in (None, "bfloat16"):
            engine = sw.parallelize(
                nn.SyncBatchNorm.convert_sync_batchnorm(Net(NORMS["1d"])),
                sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(compute=compute)),
                optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
                loss=lambda output, batch: output.square().mean(),
                channel=channel,
            )
            found.append(engine.step({"x": given[5:] if channel.rank else given[:5]}).loss)
        return found[0], found[1]

    for exact, rounded in sw.simulate(2, train):
        assert exact == pytest.approx(expected, rel=1e-5)
        assert rounded == pytest.approx(expected, rel=0.05)


class WithForward(nn.SyncBatchNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(input)
        return output


def with_group() -> nn.Module:
    return nn.SyncBatchNorm(6, process_group=object())


@pytest.mark.parametrize(
    ("norm", "said"), [(with_group, "its own process_group"), (lambda: WithForward(6), "its own forward")]
)
def test_other_statistics_are_refused(norm: Callable[[], nn.Module], said: str) -> None:
    def build(channel: sw.Channel) -> None:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        with pytest.raises(ModelError, match=said):
            sw.parallelize(Net(norm), plan, optimizer=torch.optim.AdamW, channel=channel)

    sw.simulate(2, build)


def test_microbatches_that_some_ranks_skip_are_refused() -> None:
    def train(channel: sw.Channel) -> None:
        given: Any = nn.SyncBatchNorm.convert_sync_batchnorm(Net(NORMS["1d"]))
        engine = sw.parallelize(
            given,
            sw.Plan(mesh=sw.Mesh(dp_shard=2)),
            optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            loss_weight=lambda batch: float(batch["counts"].sum()),
            channel=channel,
        )
        batch: Batch = {"x": torch.ones(2, 4), "counts": torch.ones(2) * channel.rank}
        with pytest.raises(ModelError, match="the same number of microbatches"):
            engine.step(batch)
        engine.step({"x": torch.ones(2, 4), "counts": torch.ones(2)})

    sw.simulate(2, train)
