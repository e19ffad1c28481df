"""Running a schedule against the transfers of a model, in thought: who waits for what, and when.

One microbatch's transfers are (source stage, destination stage) in program order. Every rank walks through the same
program; what it meets at a local stage below the highest that it has entered belongs to that highest one:

    transfers     0>1  1>2  2>0  0>2          (4 stages on 2 ranks)
    rank 0, F.0   send                        runs on until it would enter stage 2
            F.2        recv  local  local     stage 0 again, but stage 2 was entered
    rank 1, F.1   recv send

A backward is its forward reversed: it waits for the gradient of what was sent, and sends that of what was received.
(The engine waits for a gradient in the backward of the stage that made the value, which is the same one or a later one
of the rank: what passes here, passes there.)
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from shardwise.plan.schedules import Action, Schedule

Transfers = Sequence[tuple[int, int]]
"""(source stage, destination stage) of every value that one microbatch moves, in program order."""


@dataclass(slots=True)
class ActionPart:
    """A part of an action: it waits for transfers, computes, and sends transfers; all by their numbers."""

    waits: list[int] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """A value ("F") or a gradient ("B") of one microbatch on its way; `transfer` is the number of its transfer."""

    kind: str
    microbatch: int
    transfer: int


@dataclass(slots=True)
class Walk:
    """What came of it."""

    parts: list[tuple[int, Action, float, float]] = field(default_factory=list)
    """(rank, action, start, stop) of every part that was computed."""
    stuck: dict[int, tuple[Action, ScheduledMessage]] = field(default_factory=dict)
    """For each rank that could not finish: the action that it is in, and what it waits for."""


def chain(num_stages: int) -> list[tuple[int, int]]:
    """The transfers of a model whose stages pass one value on."""
    return [(stage, stage + 1) for stage in range(num_stages - 1)]


def parts_of(transfers: Transfers, num_ranks: int, num_stages: int) -> list[list[ActionPart]]:
    """For each stage the parts of its forward: runs of waits, each followed by compute and sends.

    What stays on one rank is met in order anyway, and left out.
    """
    parts = [[ActionPart()] for _ in range(num_stages)]
    entered = [-1] * num_ranks
    for number, (source, destination) in enumerate(transfers):
        ends = [(source, True), (destination, False)]
        for stage, is_sent in ends:
            rank = stage % num_ranks
            entered[rank] = max(entered[rank], stage)
            if source % num_ranks == destination % num_ranks:
                continue
            action = parts[entered[rank]]
            if is_sent:
                action[-1].sends.append(number)
            else:
                if action[-1].sends:
                    action.append(ActionPart())
                action[-1].waits.append(number)
    return parts


def backward(parts: Sequence[ActionPart]) -> list[ActionPart]:
    """The parts of the backward of a stage whose forward has these parts."""
    return [ActionPart(waits=part.sends[::-1], sends=part.waits[::-1]) for part in reversed(parts)]


def walk(schedule: Schedule, transfers: Transfers, seconds: Callable[[Action], float], transfer_s: float = 0.0) -> Walk:
    """Run the schedule; each action takes its seconds, in equal parts. Sends take no time of the rank that sends.

    The schedule must be sound (`schedule_check`), and the transfers between its stages.
    """
    forward = parts_of(transfers, schedule.num_ranks, schedule.num_stages)
    parts = {"F": forward, "B": [backward(stage) for stage in forward]}
    result = Walk()
    arrivals: dict[ScheduledMessage, float] = {}
    waiting: dict[ScheduledMessage, int] = {}
    ready: deque[int] = deque(range(schedule.num_ranks))

    def run(rank: int) -> Iterator[tuple[Action, ScheduledMessage]]:
        """Run the rank's order; yields what it waits for while that has not been sent."""
        now = 0.0
        for action in schedule.orders[rank]:
            message = partial(ScheduledMessage, action.kind, action.microbatch)
            stage_parts = parts[action.kind][action.stage]
            for part in stage_parts:
                for number in part.waits:
                    while (waited := message(number)) not in arrivals:
                        yield action, waited
                    now = max(now, arrivals[waited])
                stop = now + seconds(action) / len(stage_parts)
                result.parts.append((rank, action, now, stop))
                now = stop
                for number in part.sends:
                    sent = message(number)
                    arrivals[sent] = now + transfer_s
                    if sent in waiting:
                        ready.append(waiting.pop(sent))

    runs = [run(rank) for rank in range(schedule.num_ranks)]
    while ready:
        rank = ready.popleft()
        result.stuck.pop(rank, None)
        if (blocked := next(runs[rank], None)) is not None:
            result.stuck[rank] = blocked
            waiting[blocked[1]] = rank
    return result
