"""Where the time of ranks goes: exactly what a clock says that only forwards, loops and nothing else move."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Recorded
from shardwise.comm.tally import tally_of
from shardwise.engine.step.reports import RankTimes, slowest
from tests.engine.loops import mean_square, sgd
from tests.oracle.program import seeded

PAUSE = 0.5
STEPS = 3


class Clock:
    """One clock for all simulated ranks, which run one at a time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.paused_s: defaultdict[int, float] = defaultdict(float)

    def __call__(self) -> float:
        return self.now_s

    def pause(self, rank: int, seconds: float) -> None:
        self.now_s += seconds
        self.paused_s[rank] += seconds


class Block(nn.Module):
    """A layer that takes its time on one rank."""

    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self._pause = pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._pause()
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def reports(
    plan: sw.Plan, pauses: Sequence[float], *, outside: Sequence[float] | None = None
) -> tuple[list[tuple[RankTimes, ...]], list[list[float]]]:
    """The times of all ranks in each step, and what each rank paused in it.

    pauses: of each rank's blocks. outside: of each rank between steps.
    """
    clock = Clock()

    def run(channel: sw.Channel) -> tuple[list[tuple[RankTimes, ...]], list[float]]:
        tally_of(channel).now_s = clock
        rank = channel.rank
        pause = partial(clock.pause, rank, pauses[rank])
        model = seeded(lambda: nn.Sequential(Block(pause), Block(pause)))()
        engine = sw.parallelize(model, plan, optimizer=sgd, loss=mean_square, channel=channel)
        found, paused = [], []
        for _ in range(STEPS):
            before_s = clock.paused_s[rank]
            found.append(engine.step({"input": torch.ones(4, 4)}).ranks)
            paused.append(clock.paused_s[rank] - before_s)
            clock.now_s += outside[rank] if outside else 0.0
        return found, paused

    (first, _), *others = of_all = sw.simulate(plan.mesh.size, run)
    assert all(found == first for found, _ in others)
    return first, [list(each) for each in zip(*(paused for _, paused in of_all), strict=True)]


TENSOR = sw.Tensor(rules={"*.up": "column", "*.down": "row"})


PLANS = {
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_replicate=3), sharding=sw.Sharding(stage=0)),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=3)),
    "stage 2": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=2), merge=sw.Merge(microbatches=2)),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=TENSOR),
}


@pytest.mark.parametrize(("name", "slow"), list(zip(PLANS, [0, 1, 2, 1, 0, 1], strict=True)))
def test_the_slow_rank_computes_what_the_others_wait_for(name: str, slow: int) -> None:
    plan = PLANS[name]
    size = plan.mesh.size
    pauses = [PAUSE if rank == slow else 0.0 for rank in range(size)]
    steps, paused = reports(plan, pauses)
    for ranks, expected in zip(steps, paused, strict=True):
        assert [each.rank for each in ranks] == list(range(size))
        assert expected[slow] >= PAUSE
        assert [each.compute_s for each in ranks] == expected
        assert ranks[slow].waiting_s == 0.0
        assert slowest(ranks) == (slow,)
        assert all(each.peak_bytes > 1 << 20 for each in ranks)  # of this process
    # What is left of the last step comes after its close. Until then each rank has waited for the slow one alone.
    for rank in range(size):
        if rank != slow:
            waited = [ranks[rank] for ranks in steps]
            assert {peer for each in waited for peer in each.waited_for} == {slow}
            total = sum(each.waiting_s for each in waited)
            assert total == sum(sum(each.waited_for.values()) for each in waited)
            assert sum(each[slow] for each in paused[:-1]) <= total <= sum(each[slow] for each in paused)


def test_all_time_is_compute_wait_or_outside() -> None:
    clock_of = [0.5, 0.25, 0.125]
    outside = [0.0, 4.0, 0.0]
    steps, _ = reports(PLANS["stage 1"], clock_of, outside=outside)
    for step, ranks in enumerate(steps):
        assert [each.compute_s for each in ranks] == [2 * pause for pause in clock_of]
        assert [each.outside_s for each in ranks] == (outside if step else [0.0] * 3)
        if step:
            # One rank runs at a time, so each waits while the other two compute and load.
            whole = 2 * sum(clock_of) + sum(outside)
            assert [each.compute_s + each.waiting_s + each.outside_s for each in ranks] == [whole] * 3
            assert slowest(ranks) == (1,)


def test_bytes_are_those_of_the_recorded_calls_and_times_cost_no_exchange_and_few_bytes() -> None:
    def run(channel: sw.Channel) -> None:
        recorded = Recorded(channel)
        model, plan = nn.Linear(4, 4), sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=sgd, loss=mean_square, channel=recorded)
        for _ in range(2):
            recorded.clear()
            mine = engine.step({"input": torch.ones(2, 4)}).ranks[channel.rank]
        exchanges = [call.purpose for call in recorded.calls if call.operation == "exchange"]
        assert exchanges == ["weights of a step", "losses and norms"]
        # Exchanges are counted too: two small messages, of some hundred bytes.
        for count, counted in ((recorded.bytes_sent, mine.sent_bytes), (recorded.bytes_received, mine.received_bytes)):
            moved = sum(map(count, ("all_gather", "reduce_scatter")))
            assert moved <= counted <= moved + 400

    sw.simulate(2, run)
