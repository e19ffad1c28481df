"""The forwards and backwards of every rank of a pipeline in time: measured in each update, kept of the last ones.

Spans are times on the clock of their rank. At the end of the run, the clocks are compared and all spans moved to that
of rank 0:

    rank 0   enters 10.000 ........... leaves 10.004        an exchange: no rank leaves before all have entered
    rank 1      enters 73.001 ....... leaves 73.003
    offset   at least 73.001 - 10.004 = 62.997  (its entry came before rank 0 left)
             at most  73.003 - 10.000 = 63.003  (it left after rank 0 had entered)
"""

import importlib.util
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.comm import Channel
from shardwise.engine import Engine
from shardwise.engine.reports import EvaluationReport, StepReport
from shardwise.plan.schedule_check import check
from shardwise.plan.schedules import Schedule
from shardwise.plan.timeline import Timeline, TimeSpan, draw_timeline, seconds_text, simulate_schedule
from shardwise.train.timeline_files import save_picture, save_trace

_KEPT_UPDATES = 20
_CLOCK_ROUNDS = 5

Rounds = Sequence[tuple[float, float]]
"""The times before and after each of some exchanges, on the clock of one rank, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """The last updates of a run, in seconds on the clock of rank 0; the same on every rank."""

    updates: tuple[Timeline, ...]
    """One for each; their ranks are those of the world."""
    schedule: Schedule
    """The schedule of the last one."""
    transfers: tuple[tuple[int, int], ...]

    def simulated(self) -> Timeline | None:
        """The last update as it would be with its mean times of stages, transfers that take no time, and no overhead.

        None where its schedule is not one for the transfers that were last seen: they depend on the data.
        """
        if check(self.schedule, self.transfers):
            return None
        times = stage_times(self.updates[-1])
        stages = range(self.schedule.num_stages)
        return simulate_schedule(
            self.schedule,
            self.transfers,
            forward_s=[times.get(("F", stage), 0.0) for stage in stages],
            backward_s=[times.get(("B", stage), 0.0) for stage in stages],
        )


class Tracer:
    """An engine with stages whose updates are measured. Stands in its place in the loop."""

    def __init__(self, engine: Engine) -> None:
        assert engine.pipeline is not None, "configurations that ask for a trace have stages"
        self._engine = engine
        self._runner = engine.pipeline
        # Some hundred spans per update: those of a whole run would fill the memory.
        self._updates: deque[list[TimeSpan]] = deque(maxlen=_KEPT_UPDATES)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """See `loop.Trainee`."""
        return self._engine.optimizers

    def step(self, batch: dict[str, torch.Tensor], *, stop: Callable[[], bool] | None = None) -> StepReport:
        """One update, recorded on this rank."""
        # A list switches the recording on. Evaluations are not recorded, for they have no backward to compare with.
        spans = self._runner.spans = []
        try:
            report = self._engine.step(batch, stop=stop)
        finally:
            self._runner.spans = None
        self._updates.append(spans)
        return report

    def evaluate(self, batch: dict[str, torch.Tensor]) -> EvaluationReport:
        """See `loop.Trainee`."""
        return self._engine.evaluate(batch)

    def gathered(self, channel: Channel) -> RunTrace | None:
        """The last updates on all ranks, which call this together; None when none was made."""
        # Clocks drift: they are compared now, since the last updates are what is kept.
        mine = {
            "rounds": _clock_rounds(channel),
            "updates": [
                [(span.kind, span.microbatch, span.stage, span.start_s, span.stop_s) for span in spans]
                for spans in self._updates
            ],
        }
        ranks = [json.loads(each) for each in channel.exchange(json.dumps(mine).encode(), purpose="spans of a trace")]
        schedule, transfers = self._runner.schedule, self._runner.transfers
        # No update was made. All ranks know that, and leave together, after the exchange.
        if schedule is None or transfers is None:
            return None
        offsets = [clock_offset(each["rounds"], ranks[0]["rounds"]) for each in ranks]
        updates = [
            Timeline(
                channel.size,
                tuple(
                    TimeSpan(rank, kind, microbatch, stage, start_s - offsets[rank], stop_s - offsets[rank])
                    for rank, each in enumerate(ranks)
                    for kind, microbatch, stage, start_s, stop_s in each["updates"][at]
                ),
            )
            for at in range(len(self._updates))
        ]
        return RunTrace(updates=tuple(updates), schedule=schedule, transfers=transfers)


def leave(trace: RunTrace, folder: Path, *, title: str, width: int) -> list[str]:
    """Write `timeline.png` and `trace.json` into `folder`; returns the timeline in words, `width` columns wide."""
    last = trace.updates[-1]
    lines = ["the last update on all ranks, as it was measured:", *draw_timeline(last, width=width).splitlines()]
    if (simulated := trace.simulated()) is not None:
        lines.append(
            f"{trace.schedule.name} simulated with these times of stages, and transfers that take none: "
            f"{seconds_text(simulated.makespan_s)}, bubble {simulated.bubble:.1%}"
        )
    whole = Timeline(last.num_ranks, tuple(span for update in trace.updates for span in update.spans))
    save_trace(whole, folder / "trace.json", title=title)
    if importlib.util.find_spec("matplotlib") is None:
        lines.append("no picture of the timeline: matplotlib is not installed")
    else:
        save_picture(last, folder / "timeline.png", title=f"{title}, last update")
        lines.append(f"timeline: {folder / 'timeline.png'}")
    count = len(trace.updates)
    lines.append(
        f"trace of the last {f'{count} updates' if count > 1 else 'update'}, for ui.perfetto.dev: "
        f"{folder / 'trace.json'}"
    )
    return lines


def stage_times(timeline: Timeline) -> dict[tuple[str, int], float]:
    """The mean time of the forward ("F") and the backward ("B") of each stage, in seconds, waits not counted."""
    spent: dict[tuple[str, int], float] = defaultdict(float)
    runs: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    for span in timeline.busy_spans():
        spent[span.kind, span.stage] += span.stop_s - span.start_s
        # By microbatch, not by span: a forward that waits in the middle has several spans of work.
        runs[span.kind, span.stage].add((span.rank, span.microbatch))
    return {key: seconds / len(runs[key]) for key, seconds in spent.items()}


def clock_offset(rounds: Rounds, reference: Rounds) -> float:
    """How far a clock is ahead of a reference clock, by the rounds that both took part in; 0 where that may be.

    Nobody leaves an exchange before all have entered it, which bounds the offset from both sides (Cristian, 1989).
    Ranks on one host have one clock, to which no estimate would do any good.
    """
    low = max(before - left for (before, _), (_, left) in zip(rounds, reference, strict=True))
    high = min(after - entered for (_, after), (entered, _) in zip(rounds, reference, strict=True))
    return 0.0 if low <= 0 <= high else (low + high) / 2


def _clock_rounds(channel: Channel) -> Rounds:
    # Several rounds: each bounds the offset, and the luckiest exchange bounds it most.
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        before_s = time.perf_counter()
        channel.exchange(b"", purpose="clocks of a trace")
        rounds.append((before_s, time.perf_counter()))
    return rounds
