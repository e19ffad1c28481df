"""Whether a schedule can be run with the transfers that a model really has, and one that can where it cannot."""

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, groupby, pairwise

from shardwise.errors import PlanError
from shardwise.plan.schedule_walk import Transfers, walk
from shardwise.plan.schedules import SCHEDULES, Action, Schedule, warmed_up


def check(schedule: Schedule, transfers: Transfers) -> list[str]:
    """What is wrong with running `schedule`, one finding each; none: every rank gets through.

    `transfers`: (source stage, destination stage) of what one microbatch moves, in program order; a value may go
    back to an earlier stage, and stages may pass several. Each rank runs its order alone; a send never blocks, a wait
    lasts until what it waits for is sent. `schedule_walk` says which transfers belong to which action.
    """
    return _foreign(schedule, transfers) + _structure(schedule) or _deadlocks(schedule, transfers)


def adapt(schedule: Schedule, transfers: Transfers, *, steps_back: bool = False) -> Schedule:
    """The schedule itself where it can be run with these transfers, else the nearest that can; its name says how.

    Stages that feed each other cannot run ahead of each other: under "1f1b" they advance in step. Where that is not
    enough, each microbatch goes through all stages of a rank before the next. Raises PlanError with the findings
    where the schedule has none of the names that `make_schedule` knows, or nothing can be run.

    steps_back: a rank works on one of its stages again after a later one, or waits in a forward for what other stages
    tell, so that the actions of its stages are not apart.
    """
    findings = check(schedule, transfers)
    if steps_back and schedule.num_chunks > 1:
        findings.append(
            "a rank works on one of its stages after a later one, or waits there for what other stages tell; stages of "
            "such a rank go forward and back together"
        )
    if not findings:
        return schedule
    if schedule.name in SCHEDULES and not _foreign(schedule, transfers):
        candidates = [_in_step(schedule, transfers)] if schedule.num_chunks == 1 and schedule.name == "1f1b" else []
        for candidate in [*candidates, _one_by_one(schedule)]:
            if not check(candidate, transfers):
                return candidate
    if schedule.name not in SCHEDULES:
        findings.append(f"a schedule of your own is not changed; those named {', '.join(SCHEDULES)} are")
    raise PlanError(*(f"schedule {schedule.name!r}: {finding}" for finding in findings))


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
            f"deadlock: rank {rank} in {action} (microbatch {action.microbatch}, stage {action.stage}) waits for "
            f"the {what} of stage {giver} from rank {schedule.rank_of(giver)} "
            f"(transfer {message.transfer}: {source}>{destination})"
        )
    return findings


def _in_step(schedule: Schedule, transfers: Transfers) -> Schedule:
    """1F1B in which no stage runs ahead of one that it, or an earlier stage, gets values back from."""
    num_stages, k = schedule.num_stages, schedule.num_microbatches
    reached = [{stage} for stage in range(num_stages)]
    for _ in range(num_stages):
        for source, destination in transfers:
            reached[source] |= reached[destination]
    mutual = [max(other for other in reached[stage] if stage in reached[other]) for stage in range(num_stages)]
    leads = list(accumulate(mutual, max))  # the later stage that each keeps step with
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
