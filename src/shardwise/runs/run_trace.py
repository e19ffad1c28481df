"""What every rank does in time: measured in each update, kept of the last ones.

Spans are times on the clock of their rank. At the end of the run, the clocks are compared and all spans moved to that
of rank 0:

    rank 0   enters 10.000 ........... leaves 10.004        an exchange: no rank leaves before all have entered
    rank 1      enters 73.001 ....... leaves 73.003
    offset   at least 73.001 - 10.004 = 62.997  (its entry came before rank 0 left)
             at most  73.003 - 10.000 = 63.003  (it left after rank 0 had entered)
"""

import importlib.util
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.comm import Channel
from shardwise.comm.timed import CallSpan, Timed
from shardwise.engine import Engine
from shardwise.moving.nested_exchange import exchange
from shardwise.plan.schedule_check import check
from shardwise.plan.schedules import Schedule
from shardwise.plan.timeline import Timeline, TimeSpan, simulate_schedule
from shardwise.runs.timeline_files import TraceBar, save_picture, save_trace
from shardwise.runs.timeline_text import draw_timeline, seconds_text
from shardwise.runs.unit_bars import UnitBars

_KEPT_UPDATES = 20
_CLOCK_ROUNDS = 5

Rounds = Sequence[tuple[float, float]]
"""The times before and after each of some exchanges, on the clock of one rank, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """The last updates of a run, in seconds on the clock of rank 0; the same on every rank."""

    updates: tuple[Timeline, ...]
    """One for each; their ranks are those of the world."""
    bars: tuple[TraceBar, ...]
    """What ranks did besides forwards and backwards, in all updates."""
    schedule: Schedule | None
    """The schedule of the last one; None without stages."""
    transfers: tuple[tuple[int, int], ...]

    def simulated(self) -> Timeline | None:
        """The last update as it would be with its mean times of stages, transfers that take no time, and no overhead.

        None without stages, and where its schedule is not one for the transfers that were last seen: they depend on
        the data.
        """
        if self.schedule is None or check(self.schedule, self.transfers):
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
    """Records the updates of an engine whose channel is a `Timed` one."""

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine.channel, Timed)
        self._engine = engine
        self._channel = engine.channel
        self._recorder = engine.recorder
        # Stages have bars of their own, and run a module in parts.
        self._units = UnitBars(engine.model, engine.recorder.now_s) if engine.pipeline is None else None
        # Some hundred spans per update: those of a whole run would fill the memory.
        self._updates: deque[_TracedUpdate] = deque(maxlen=_KEPT_UPDATES)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Inside is `engine.step`; it is recorded on this rank."""
        # Lists switch the recording on. Evaluations are not recorded, for they have no backward to compare with.
        spans: list[TimeSpan] = []
        calls: list[CallSpan] = []
        notes: list[tuple[str, str, float]] = []
        updates: list[tuple[float, float]] = []
        self._recorder.spans, self._recorder.updates, self._channel.log.spans = spans, updates, calls
        if self._units is not None:
            self._units.notes = notes
        start_s = self._recorder.now_s()
        try:
            yield
            stop_s = self._recorder.now_s()
        finally:
            self._recorder.spans = self._recorder.updates = self._channel.log.spans = None
            if self._units is not None:
                self._units.notes = None
        bars = [TraceBar("step", "step", start_s, stop_s)]
        bars += [TraceBar("optimizer", "optimizer", *each) for each in updates]
        bars += [_bar_of(each) for each in calls]
        bars += unit_bars(notes, [span for span in spans if span.kind == "B"])
        self._updates.append(_TracedUpdate(spans, bars))

    def take_off(self) -> None:
        """Leave the model as it was."""
        if self._units is not None:
            self._units.take_off()

    def leave(self, folder: Path, *, title: str, width: int | None = None) -> list[str]:
        """Write the last updates of all ranks, which call this together, into a folder; what rank 0 may say of it.

        width: of the timeline in words; None: of the terminal.
        """
        trace = self.gathered()
        if trace is None or self._channel.rank:
            return []
        folder.mkdir(parents=True, exist_ok=True)
        return _left(trace, folder, title=title, width=width or shutil.get_terminal_size().columns)

    def gathered(self) -> RunTrace | None:
        """The last updates on all ranks, which call this together; None when none was made."""
        self.take_off()
        channel = self._channel
        # Clocks drift: they are compared now, since the last updates are what is kept.
        mine = {
            "rounds": clock_rounds(channel, self._recorder.clock),
            "updates": [
                [(span.kind, span.microbatch, span.stage, span.start_s, span.stop_s) for span in each.spans]
                for each in self._updates
            ],
            "bars": [tuple(bar) for each in self._updates for bar in each.bars],
        }
        ranks = exchange(mine, channel=channel, purpose="spans of a trace")
        # No update was made. All ranks know that, and leave together, after the exchange.
        if not self._updates:
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
        bars = tuple(
            TraceBar(name, category, start_s - offsets[rank], stop_s - offsets[rank], arguments, rank)
            for rank, each in enumerate(ranks)
            for name, category, start_s, stop_s, arguments, _ in each["bars"]
        )
        runner = self._engine.pipeline
        return RunTrace(
            updates=tuple(updates),
            bars=bars,
            schedule=None if runner is None else runner.schedule,
            transfers=() if runner is None else runner.transfers or (),
        )


@dataclass(frozen=True, slots=True)
class _TracedUpdate:
    """What one update was on this rank, on its own clock."""

    spans: list[TimeSpan]
    bars: list[TraceBar]


def _bar_of(span: CallSpan) -> TraceBar:
    call = span.call
    arguments: dict[str, object] = {
        "ranks": list(call.peers),
        "sent bytes": call.bytes_sent,
        "received bytes": call.bytes_received,
    }
    verb = "wait for " if span.is_wait else ""
    return TraceBar(f"{verb}{call.operation}: {call.purpose}", call.operation, span.start_s, span.stop_s, arguments)


def unit_bars(notes: Sequence[tuple[str, str, float]], backwards: Sequence[TimeSpan]) -> list[TraceBar]:
    """Bars of the parts of a model, from what `UnitBars` has noted; backwards: of the microbatches."""
    bars = []
    open_at: list[tuple[str, float]] = []
    for name, what, at_s in notes:
        if what == "begin":
            open_at.append((name, at_s))
        elif what == "end":
            # A forward that has raised has a beginning alone.
            while open_at and (begun := open_at.pop())[0] != name:
                pass
            bars.append(TraceBar(f"forward {name}", "unit", begun[1], at_s))
    for span in backwards:
        begins = [(name, at_s) for name, what, at_s in notes if what == "backward" and span.start_s <= at_s]
        begins = [(name, at_s) for name, at_s in begins if at_s <= span.stop_s]
        stops = [*(at_s for _, at_s in begins), span.stop_s][1:]
        bars += [
            TraceBar(f"backward {name}", "unit", at_s, end) for (name, at_s), end in zip(begins, stops, strict=True)
        ]
    return bars


def _left(trace: RunTrace, folder: Path, *, title: str, width: int) -> list[str]:
    """Write `timeline.png` and `trace.json` into `folder`; returns the timeline in words, `width` columns wide."""
    last = trace.updates[-1]
    lines = ["the last update on all ranks, as it was measured:", *draw_timeline(last, width=width).splitlines()]
    if trace.schedule is not None and (simulated := trace.simulated()) is not None:
        lines.append(
            f"{trace.schedule.name} simulated with these times of stages, and transfers that take none: "
            f"{seconds_text(simulated.makespan_s)}, bubble {simulated.bubble:.1%}"
        )
    whole = Timeline(last.num_ranks, tuple(span for update in trace.updates for span in update.spans))
    save_trace(whole, folder / "trace.json", title=title, bars=trace.bars)
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

    No rank leaves an exchange before all have entered it, which bounds the offset from both sides (Cristian, 1989).
    Ranks on one host have one clock, to which no estimate would do any good.
    """
    low = max(before - left for (before, _), (_, left) in zip(rounds, reference, strict=True))
    high = min(after - entered for (_, after), (entered, _) in zip(rounds, reference, strict=True))
    return 0.0 if low <= 0 <= high else (low + high) / 2


def clock_rounds(channel: Channel, now_s: Callable[[], float] = time.perf_counter) -> Rounds:
    """The times around some exchanges on a clock of this rank; all ranks of the channel call it together."""
    # Several rounds: each bounds the offset, and the luckiest exchange bounds it most.
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        before_s = now_s()
        channel.exchange(b"", purpose="clocks of a trace")
        rounds.append((before_s, now_s()))
    return rounds
