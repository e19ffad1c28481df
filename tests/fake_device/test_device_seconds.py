"""Seconds of a device: between events that the host asks about later, and never waits for.

On the clock of the fake device each job takes a millisecond, and waits take as long as the jobs that they wait for.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.step.reports import RankTimes
from shardwise.testing.accelerator import LAST, behind, counted

pytestmark = pytest.mark.usefixtures("fake")

TENSOR = sw.Tensor(rules={"0.up": "column", "0.down": "row"})
PLANS = {
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=2)),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=TENSOR),
}
FEW, MANY = 20, 60
WARM_UP, STEPS = 4, 2


class Block(nn.Module):
    """A layer that has more to do on one rank."""

    def __init__(self, num_more: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self._num_more = num_more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            spare = torch.zeros(2, device=x.device)
            for _ in range(self._num_more):
                spare.add_(1.0)
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def times(plan: sw.Plan, num_more: int, slow: int, *, after: Callable[[int], None] = lambda _: None) -> list[RankTimes]:
    """Of all ranks in the last step that rank 0 knows of."""

    def run(channel: sw.Channel) -> list[RankTimes]:
        torch.manual_seed(0)
        more = num_more if channel.rank == slow else FEW
        engine = sw.parallelize(
            nn.Sequential(Block(more), Block(more)).to(channel.device),
            plan,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        batch = {"input": torch.ones(4, 4, device=channel.device)}
        report = None
        for step in range(WARM_UP + STEPS):
            report = engine.step(batch)
            after(step)
        assert report is not None
        return list(report.ranks)

    return sw.simulate(plan.mesh.size, run, device="fake")[0]


@pytest.mark.parametrize("name", PLANS)
def test_kernels_more_on_one_rank_are_compute_there_and_a_wait_elsewhere(name: str) -> None:
    plan, slow = PLANS[name], 1
    found = []
    for num_more in (FEW, MANY):
        with behind(3):
            found.append(times(plan, num_more, slow))
    few, many = found
    num_forwards = (2 // plan.mesh.pp) * plan.merge.microbatches
    more_s = num_forwards * (MANY - FEW) / 1e3
    assert many[slow].compute_s - few[slow].compute_s == pytest.approx(more_s)
    assert many[0].compute_s == pytest.approx(few[0].compute_s)
    # The slow rank waits less than before, where it was the other one that came last.
    waited_less_s = few[slow].waiting_s - many[slow].waiting_s
    assert many[0].waiting_s - few[0].waiting_s == pytest.approx(more_s - waited_less_s)
    assert 0 <= waited_less_s < more_s / 4
    assert many[0].waited_for[slow] == pytest.approx(many[0].waiting_s)


def test_a_host_that_is_ahead_gets_times_late_and_waits_for_none() -> None:
    def begin_to_count(step: int) -> None:
        if step == WARM_UP:
            for each in counts:
                each.syncs = 0

    plan = PLANS["stage 1"]
    found = []
    for seed in (7, 8):
        with behind(seed), counted() as counts:
            found.append(times(plan, FEW, 1, after=begin_to_count))
            assert sum(each.syncs for each in counts) == 0
    for one, other in zip(*found, strict=True):
        assert one.compute_s == pytest.approx(other.compute_s)
    # A device that does nothing before somebody needs it: nothing is known, and nobody waits.
    with behind(LAST):
        assert times(plan, FEW, 1) == [] or all(each.late_steps > 0 for each in times(plan, FEW, 1))
