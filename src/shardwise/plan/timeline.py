"""When each rank of a pipeline does what: simulated from the times of stages, or measured.

A span is a forward, a backward or a wait. Waits may be inside of forwards (a stage that others feed twice). So busy
time is the spans less their waits, and the bubble is the rest of all ranks' time:

    rank 0   F0 [0 .. 1]  F1 [1 .. 2]  wait [2 .. 4]  B0 [4 .. 6] ...     busy 1 + 1 + 2 + ..
    bubble = 1 - (sum of busy) / (ranks * makespan)
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.schedule_check import Transfers, check, walk
from shardwise.plan.schedules import SCHEDULES, Schedule

_SLOW = 1.1
_MOST_SLOW = 3


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """What a rank did from `start_s` to `stop_s` (seconds on a clock that all ranks share) for a microbatch's stage.

    `kind` is "F", "B", "wait", or any other word. A wait may be between forwards and backwards, or inside one.
    """

    rank: int
    kind: str
    microbatch: int
    stage: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of all ranks."""

    num_ranks: int
    spans: tuple[TimeSpan, ...]

    @property
    def start_s(self) -> float:
        """When the first span starts; 0 without spans."""
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last stop."""
        return max((span.stop_s for span in self.spans), default=0.0) - self.start_s

    @property
    def busy_s(self) -> tuple[float, ...]:
        """For each rank, how long it ran forwards and backwards and did not wait in them."""
        busy = [0.0] * self.num_ranks
        for span in self.busy_spans():
            busy[span.rank] += span.stop_s - span.start_s
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they were not busy, from 0 to 1."""
        # Ranks that finish early idle until the last one has: the makespan is that of all.
        whole = self.num_ranks * self.makespan_s
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    def busy_spans(self) -> list[TimeSpan]:
        """The forwards and backwards, less the waits inside them, by rank and start."""
        waits: list[list[TimeSpan]] = [[] for _ in range(self.num_ranks)]
        for span in sorted(self.spans, key=lambda span: span.start_s):
            if span.kind == "wait":
                waits[span.rank].append(span)
        computed = [span for span in self.spans if span.kind in ("F", "B")]
        computed.sort(key=lambda span: (span.rank, span.start_s))
        return [piece for span in computed for piece in _less(span, waits[span.rank])]


def _less(span: TimeSpan, waits: Sequence[TimeSpan]) -> list[TimeSpan]:
    """What the waits, sorted by start, leave of a span."""
    # Waits are sorted by start and do not overlap on one rank, so one pass cuts the span from left to right.
    pieces = []
    start_s = span.start_s
    for wait in waits:
        if start_s < wait.stop_s and wait.start_s < span.stop_s:
            pieces.append((start_s, wait.start_s))
            start_s = wait.stop_s
    pieces.append((start_s, span.stop_s))
    return [
        TimeSpan(span.rank, span.kind, span.microbatch, span.stage, start, stop)
        for start, stop in pieces
        if start < stop
    ]


def simulate_schedule(
    schedule: Schedule,
    transfers: Transfers,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
) -> Timeline:
    """The timeline of a schedule whose forwards and backwards take these seconds, one number per stage.

    An action spends its time in equal parts, one after each run of waits (see `walk`). A transfer arrives
    `transfer_s` after it was sent, and costs neither rank anything. Raises PlanError where the schedule cannot be run
    with these transfers, and for a time that is missing or not one.
    """
    problems = check(schedule, transfers)
    for name, times, count in (
        ("forward_s", forward_s, schedule.num_stages),
        ("backward_s", backward_s, schedule.num_stages),
        ("transfer_s", [transfer_s], 1),
    ):
        if len(times) != count:
            problems.append(f"{name}: {len(times)} times for {count} stages; one for each is needed")
        problems += [f"{name}: {time!r} is not a time in seconds" for time in times if not 0 <= time < float("inf")]
    if problems:
        raise PlanError(*problems)
    seconds = {"F": forward_s, "B": backward_s}
    done = walk(schedule, transfers, lambda action: seconds[action.kind][action.stage], transfer_s)
    spans = []
    # A rank's gaps are its waits. The time before its first action is one too: the pipeline fills.
    until = [0.0] * schedule.num_ranks
    for rank, action, start_s, stop_s in done.parts:
        for kind, start, stop in (("wait", until[rank], start_s), (action.kind, start_s, stop_s)):
            if start < stop:
                spans.append(TimeSpan(rank, kind, action.microbatch, action.stage, start, stop))
        until[rank] = stop_s
    return Timeline(schedule.num_ranks, tuple(sorted(spans, key=lambda span: (span.rank, span.start_s))))


def ideal_bubble(name: str, *, num_ranks: int, num_chunks: int, num_microbatches: int) -> float:
    """The bubble of the schedule of that name where all stages take the same time and transfers take none.

    (P - 1) / (v k + P - 1) with P ranks, v chunks per rank, k microbatches (Narayanan et al., 2021, section 2.2). It is
    exact for k of at least P, and for any k where v = 1. With fewer microbatches than ranks chunks wait for each
    other, and it is the bound from below. Raises PlanError for an unknown name.
    """
    if name not in SCHEDULES:
        raise PlanError(f"schedule: {name!r} has no formula for its bubble; known are {', '.join(SCHEDULES)}")
    return (num_ranks - 1) / (num_chunks * num_microbatches + num_ranks - 1)


def slow_ranks(busy_s: Mapping[int, float]) -> tuple[int, ...]:
    """The ranks that were busy more than 1.1 times as long as the middle one, at most three, the slowest first."""
    if len(busy_s) < 2:
        return ()
    middle_s = statistics.median_low(busy_s.values())
    slow = [rank for rank, seconds in busy_s.items() if seconds > _SLOW * middle_s]
    return tuple(sorted(slow, key=lambda rank: -busy_s[rank])[:_MOST_SLOW])
