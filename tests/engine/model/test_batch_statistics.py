"""SyncBatchNorm on ranks: the statistics, gradients and buffers of BatchNorm in one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.loops import begun, mean_square, plan_of, rows, share
from tests.engine.refusals import same_error_everywhere
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.program import plan_of as plan_of_program
from tests.oracle.program import seeded
from tests.oracle.programs import PROGRAMS
from tests.refusals import Refusals


def synced(model: nn.Module) -> nn.Module:
    made: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return made


class Net(nn.Module):
    """Pictures where the norm is for such."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), norm
        self.last = nn.Linear(6, 1)
        self.is_picture = isinstance(self.norm, nn.BatchNorm2d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.is_picture:
            x = x[:, :, None, None].expand(-1, -1, 2, 3) * torch.arange(1.0, 4.0)
        output: torch.Tensor = self.last(self.norm(x).flatten(2).mean(2) if self.is_picture else self.norm(x))
        return output


NORMS: dict[str, Callable[[], nn.Module]] = {
    "2d": lambda: nn.BatchNorm2d(6, eps=0.1),
    "cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "plain": lambda: nn.BatchNorm1d(6, affine=False),
}


@pytest.mark.parametrize(
    ("norm", "mesh", "settings"),
    [
        ("2d", "dp_replicate=2", {}),
        ("cumulative", "dp_shard=2", {"k": 2}),
        ("plain", "dp_shard=2", {"stage": 2}),
        ("2d", "dp_shard=2", {"stage": 3, "activations": sw.Activations(checkpoint=("norm",))}),
        ("cumulative", "pp=2,dp_shard=2", {"k": 2}),
        ("plain", "tp=2,dp_shard=2", {}),
    ],
)
def test_it_is_that_of_one_process(norm: str, mesh: str, settings: dict[str, Any]) -> None:
    """`tests/oracle` has the plainest one."""
    made = replace(
        PROGRAMS["batch norm of all ranks"],
        make=seeded(lambda: synced(Net(NORMS[norm]()))),
        make_plain=seeded(lambda: Net(NORMS[norm]())),
        stages={"first": 0, "norm": 1, "last": 1},
        num_stages=2,
        rules={"first": "colwise_gather_output"},
    )
    assert_trains_like_one_process(made, plan_of_program(made, mesh, **settings))


class Region(nn.Module):
    """A cut region with statistics in it, which is proved on each data rank for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.last(torch.relu(self.first(self.norm(x))))
        return output


def test_one_data_rank_alone_may_predict_before_the_first_step() -> None:
    def run(channel: sw.Channel) -> float:
        plan = plan_of("tp=2,dp_shard=2", rules={"first": "column", "last": "row"})
        engine = begun(channel, lambda: synced(Region()), plan)
        if plan.mesh.data_rank(channel.rank):
            engine.predict(share(engine, rows(1)))
            engine.model.train()
        loss: float = engine.step(share(engine, rows(0))).loss
        return loss

    expected = mean_square(seeded(Region)()(rows(0)["x"])).item()
    assert sw.simulate(4, run) == [pytest.approx(expected, rel=1e-5)] * 4


def test_unlike_rows_and_half_precision() -> None:
    """5 and 1 rows: each row counts alike."""
    make, given = seeded(lambda: Net(nn.BatchNorm1d(6))), rows(0, count=6)["x"]
    plans = [plan_of("dp_shard=2", compute=each) for each in (None, "bfloat16")]

    def run(channel: sw.Channel) -> list[float]:
        engines = [begun(channel, lambda: synced(make()), plan) for plan in plans]
        return [each.step({"x": given[5:] if channel.rank else given[:5]}).loss for each in engines]

    expected = mean_square(make()(given)).item()
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
        "its own group": lambda: met(lambda: Net(nn.SyncBatchNorm(6, process_group=object()))),
        "its own forward": lambda: met(lambda: Net(WithForward(6))),
        "microbatches that some ranks skip": lambda: met(lambda: Net(nn.SyncBatchNorm(6))),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_other_statistics_are_refused(case: str) -> None:
    REFUSED.check(case)
