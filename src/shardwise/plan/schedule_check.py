"""Whether a schedule can be run with the transfers that a model really has, and the nearest one that can.

A schedule is made before anyone knows which values cross between stages; the first forward shows that. `walk` runs the
schedule against these transfers in thought: who waits for what, and when. `check` finds faults and deadlocks, and
`adapt` gives up as little as it can. One microbatch's transfers are (source stage, destination stage) in program order.
Every rank walks through the same program. What it meets at a local stage below the highest that it has entered belongs
to that highest one:

    transfers     0>1  1>2  2>0  0>2          (4 stages on 2 ranks)
    rank 0, F.0   send                        runs on until it would enter stage 2
            F.2        recv  local  local     stage 0 again, but stage 2 was entered
    rank 1, F.1   recv send

A backward is its forward reversed: it waits for the gradient of what was sent, and sends that of what was received.
(The engine waits for a gradient in the backward of the stage that made the value, which is the same one or a later one
of the rank: what passes here, passes there.)
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise

from shardwise.errors import PlanError
from shardwise.plan.schedules import SCHEDULES, Action, Schedule, warmed_up

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
            # What stays on one rank needs no message. The stage counts as entered all the same.
            if source % num_ranks == destination % num_ranks:
                continue
            action = parts[entered[rank]]
            if is_sent:
                action[-1].sends.append(number)
            else:
                # A wait after a send begins a new part: what was computed before is on its way already, and a peer may
                # need it to give what is waited for. With one part per action, feedback would always deadlock.
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
    # Each rank is a generator that stops where it must wait. A send wakes the one rank that waits for it, so that the
    # walk takes time linear in the messages: no polling, and no clock. When nothing is ready, who still waits is stuck.
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


def check(schedule: Schedule, transfers: Transfers) -> list[str]:
    """What is wrong with running `schedule`, one finding each; none: every rank gets through.

    `transfers`: (source stage, destination stage) of each value of a microbatch, in program order. A value may go back
    to an earlier stage, and stages may pass several. Each rank runs its order alone; a send never blocks, a wait lasts
    until what it waits for is sent. `parts_of` says which transfers belong to which action.
    """
    # Deadlocks last: a walk makes sense only for a schedule with every action once, on the rank of its stage.
    return _foreign(schedule, transfers) + _structure(schedule) or _deadlocks(schedule, transfers)


def adapt(schedule: Schedule, *paths: Transfers, steps_back: bool = False) -> Schedule:
    """The schedule itself where it can be run with these transfers, else the nearest that can; its name says how.

    paths: the transfers of one microbatch; several, where microbatches take different paths.

    Stages that feed each other cannot run ahead of each other: under "1f1b" they advance in step. Where that is not
    enough, each microbatch goes through all stages of a rank before the next. Raises PlanError with the findings
    where the schedule has none of the names that `make_schedule` knows, or nothing can be run.

    steps_back: a rank works on one of its stages again after a later one, or waits in a forward for announcements. So
        the actions of its stages overlap.
    """
    # All ranks call this with the same arguments, and so come to the same schedule without a message.
    findings = [finding for transfers in paths for finding in check(schedule, transfers)]
    if schedule.num_chunks > 1 and steps_back:
        findings.append(
            "a rank works on one of its stages after a later one, or waits there for other stages. The stages of "
            "such a rank go forward and back together"
        )
    every = [transfer for transfers in paths for transfer in transfers]
    # Each path alone may fit where a mixture does not: forwards of several microbatches take turns on a rank.
    if schedule.num_chunks > 1 and len(paths) > 1 and any(target < source for source, target in every):
        findings.append("microbatches take different paths, and some of them go back to earlier stages")
    if not findings:
        return schedule
    if schedule.name in SCHEDULES and not _foreign(schedule, every):
        candidates = [_in_step(schedule, every)] if schedule.num_chunks == 1 and schedule.name == "1f1b" else []
        for candidate in [*candidates, _one_by_one(schedule)]:
            if not any(check(candidate, transfers) for transfers in paths):
                return candidate
    if schedule.name not in SCHEDULES:
        findings.append(f"a schedule of your own is not changed; those named {', '.join(SCHEDULES)} are")
    raise PlanError(*(f"schedule {schedule.name!r}: {finding}" for finding in dict.fromkeys(findings)))


def _foreign(schedule: Schedule, transfers: Transfers) -> list[str]:
    return [
        f"transfer {number}: {source}>{destination} is not between stages 0 to {schedule.num_stages - 1}"
        for number, (source, destination) in enumerate(transfers)
        if not (0 <= source < schedule.num_stages and 0 <= destination < schedule.num_stages)
    ]


def _structure(schedule: Schedule) -> list[str]:
    findings = []
    rows: dict[tuple[str, int], list[int]] = {
        (kind, stage): [] for kind in "FB" for stage in range(schedule.num_stages)
    }
    for rank, order in enumerate(schedule.orders):
        for action in order:
            known = action.stage < schedule.num_stages and action.microbatch < schedule.num_microbatches
            if not known or min(action.stage, action.microbatch) < 0:
                findings.append(
                    f"rank {rank} runs {action}: there are {schedule.num_microbatches} microbatches and "
                    f"{schedule.num_stages} stages, counted from 0"
                )
            elif schedule.rank_of(action.stage) != rank:
                findings.append(
                    f"rank {rank} runs {action}: stage {action.stage} is on rank {schedule.rank_of(action.stage)}"
                )
            else:
                rows[action.kind, action.stage].append(action.microbatch)
    for (kind, stage), row in rows.items():
        who = f"rank {schedule.rank_of(stage)}: {'forward' if kind == 'F' else 'backward'} of stage {stage}"
        if missing := set(range(schedule.num_microbatches)) - set(row):
            findings.append(f"{who} lacks {_microbatches(missing)}")
        if again := [each for each, count in Counter(row).items() if count > 1]:
            findings.append(f"{who} has {_microbatches(again)} more than once")
        elif row != sorted(row):
            later, sooner = next((a, b) for a, b in pairwise(row) if a > b)
            # Not for speed: sums of gradients depend on the order, and this one is that of a single process.
            findings.append(f"{who} has microbatch {later} before {sooner}; each stage takes them in ascending order")
    return findings or [finding for order in schedule.orders for finding in _sequence(order)]


def _sequence(order: tuple[Action, ...]) -> list[str]:
    """What is out of order on one rank: of a microbatch, forwards of ascending stages, then descending backwards."""
    findings = []
    num_ahead: dict[int, list[Action]] = {}
    for action in order:
        before = num_ahead.setdefault(action.microbatch, [])
        if before and _rank_in_microbatch(action) < _rank_in_microbatch(before[-1]):
            findings.append(f"{action} comes after {before[-1]}, on one rank; it must come before")
        before.append(action)
    return findings


def _rank_in_microbatch(action: Action) -> tuple[bool, int]:
    return (False, action.stage) if action.kind == "F" else (True, -action.stage)


def _deadlocks(schedule: Schedule, transfers: Transfers) -> list[str]:
    findings = []
    for rank, (action, message) in sorted(walk(schedule, transfers, lambda action: 0.0).stuck.items()):
        source, destination = transfers[message.transfer]
        what, giver = ("value", source) if message.kind == "F" else ("gradient", destination)
        findings.append(
            f"deadlock: rank {rank} in {action} (microbatch {action.microbatch}, stage {action.stage}) waits for the "
            f"{what} of stage {giver}, rank {schedule.rank_of(giver)} (transfer {message.transfer}: "
            f"{source}>{destination})"
        )
    return findings


def _in_step(schedule: Schedule, transfers: Transfers) -> Schedule:
    """1F1B in which no stage runs ahead of one that it, or an earlier stage, gets values back from.

    Where stage 2 gives a value back to stage 1 (transfers 0>1, 1>2, 2>1, 2>3), on 4 ranks:

        1f1b      rank 1   F0 F1 F2 (waits for the value 2>1 of microbatch 2)
                  rank 2   F0 F1 B0 (waits for the gradient of the value 2>1 of microbatch 0): a deadlock
        in step   rank 1   F0 F1 B0 F2 B1 B2
                  rank 2   F0 F1 B0 F2 B1 B2
    """
    num_stages, k = schedule.num_stages, schedule.num_microbatches
    # Which stages each one feeds, over others too; two that reach each other must not run ahead of each other.
    reached = [{stage} for stage in range(num_stages)]
    for _ in range(num_stages):
        for source, destination in transfers:
            reached[source] |= reached[destination]
    mutual = [max(other for other in reached[stage] if stage in reached[other]) for stage in range(num_stages)]
    # The later stage that each keeps step with. The largest so far: a stage between two that feed each other passes on
    # what they wait for, so it may not lag behind either.
    leads = list(accumulate(mutual, max))
    groups = [list(group) for _, group in groupby(range(num_stages), key=leads.__getitem__)]
    ranges = " and ".join(f"{group[0]} to {group[-1]}" for group in groups if len(group) > 1)
    orders = []
    for stage in range(num_stages):
        forwards = [Action("F", microbatch, stage) for microbatch in range(k)]
        backwards = [Action("B", microbatch, stage) for microbatch in range(k)]
        orders.append(tuple(warmed_up(forwards, backwards, num_stages - 1 - leads[stage])))
    return Schedule(f"{schedule.name}, stages {ranges} in step", num_stages, k, tuple(orders))


def _one_by_one(schedule: Schedule) -> Schedule:
    """All forwards, then all backwards, each microbatch through all stages of a rank before the next."""
    orders = []
    for rank in range(schedule.num_ranks):
        stages = range(rank, schedule.num_stages, schedule.num_ranks)
        every = range(schedule.num_microbatches)
        forwards = [Action("F", microbatch, stage) for microbatch in every for stage in stages]
        backwards = [Action("B", microbatch, stage) for microbatch in every for stage in reversed(stages)]
        orders.append((*forwards, *backwards))
    name = f"{schedule.name}, as fthenb microbatch by microbatch"
    return Schedule(name, schedule.num_stages, schedule.num_microbatches, tuple(orders))


def one_by_one_after(schedule: Schedule, microbatch: int) -> Schedule:
    """The schedule up to the end of a forward, then one microbatch after the other on all ranks.

    For a forward that takes another path than those that the schedule was made for. The ranks learn that at the end of
    this forward, each at another time. From there on, all of them run actions in one order, so none waits for an action
    that another has put off. Two stages on two ranks, and microbatch 1 is the first to take another path:

        1f1b      rank 0   F0 F1 B0 F2 B1 F3 B2 B3         rank 1   F0 B0 F1 B1 F2 B2 F3 B3
        changed   rank 0   F0 F1 | B0 B1 F2 B2 F3 B3       rank 1   F0 B0 F1 | B1 F2 B2 F3 B3

    microbatch: -1: from the beginning.
    """
    k = schedule.num_microbatches
    orders = []
    for order in schedule.orders:
        ends = [at + 1 for at, action in enumerate(order) if (action.kind, action.microbatch) == ("F", microbatch)]
        done = order[: max(ends, default=0)]
        rest = sorted(set(order[len(done) :]), key=lambda action: (action.microbatch, *_rank_in_microbatch(action)))
        orders.append((*done, *rest))
    name = f"{schedule.name}, one by one{f' after forward {microbatch}' if microbatch >= 0 else ''}"
    return Schedule(name, schedule.num_stages, k, tuple(orders))


def _microbatches(numbers: Iterable[int]) -> str:
    """Them as ranges: "microbatches 0 to 3, 7"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    text = ", ".join(" to ".join(map(str, each)) for each in ranges)
    return f"microbatch {text}" if text.isdigit() else f"microbatches {text}"
