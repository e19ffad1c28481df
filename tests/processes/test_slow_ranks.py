"""Seconds of real processes: one that sleeps computes, and the others wait for it."""

import time

import pytest
import torch
from torch import nn

from shardwise.comm import Channel
from shardwise.engine.step.reports import RankTimes
from tests.engine.loops import begun, plan_of
from tests.processes.pool import Pool

SLEEP_S = 3.0
"""Long beside what a rank of a loaded machine loses in a step of some milliseconds."""


class Sleepy(nn.Module):
    """Sleeps in the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.sleep_s = 0.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sleep_s)
        self.sleep_s = 0.0
        out: torch.Tensor = self.layer(input)
        return out


def train(channel: Channel, slow: int) -> tuple[tuple[RankTimes, ...], tuple[int, ...]]:
    engine = begun(channel, Sleepy, plan_of(f"dp_shard={channel.size}"))
    batch = {"input": torch.ones(2, 4)}
    engine.step(batch)
    engine.model.sleep_s = SLEEP_S if channel.rank == slow else 0.0
    report = engine.step(batch)
    return report.ranks, report.slowest


def test_the_rank_that_sleeps_is_named_by_all(pool: Pool) -> None:
    slow = 2
    found = pool.run(3, train, slow)
    assert all(each == found[0] for each in found)
    ranks, named = found[0]
    assert named[0] == slow
    assert ranks[slow].compute_s >= SLEEP_S
    for mine in ranks:
        if mine.rank != slow:
            assert mine.waited_for[slow] == max(mine.waited_for.values())
            assert sum(mine.waited_for.values()) == pytest.approx(mine.waiting_s)
            # The update before is in them too: some milliseconds, of a loaded machine more.
            assert mine.waiting_s > SLEEP_S / 2
            assert mine.peak_bytes > 1 << 20
