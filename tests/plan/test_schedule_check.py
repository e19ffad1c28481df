"""The check of a schedule finds exactly what a plain execution cannot run; an adapted schedule can be run."""

from collections import Counter
from collections.abc import Iterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.schedule_check import adapt, chain, check, one_by_one_after
from shardwise.plan.schedules import SCHEDULES, Action, Schedule, make_schedule
from tests.properties import tried

Transfers = list[tuple[int, int]]
FEEDBACK = [(0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 3)]
"""Four stages; the third gives the first a value to work on again."""


def is_sound(schedule: Schedule) -> bool:
    """The rules of a schedule, said plainly over all pairs of actions."""
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    everything = [Action(kind, m, s) for kind in ("F", "B") for m in microbatches for s in stages]
    if Counter(action for order in schedule.orders for action in order) != Counter(everything):
        return False
    for rank, order in enumerate(schedule.orders):
        for at, first in enumerate(order):
            if first.stage % schedule.num_ranks != rank:
                return False
            for second in order[at + 1 :]:
                same_stage, same_microbatch = first.stage == second.stage, first.microbatch == second.microbatch
                if same_stage and first.kind == second.kind and second.microbatch < first.microbatch:
                    return False
                if same_microbatch and (first.kind, second.kind) == ("B", "F"):
                    return False
                upwards = second.stage > first.stage
                if same_microbatch and first.kind == second.kind and not same_stage and upwards != (first.kind == "F"):
                    return False
    return True


def steps(schedule: Schedule, rank: int, transfers: Transfers, happened: set[tuple[str, int, int]]) -> Iterator[None]:
    """Run a rank's order, one event of the program at a time; yields before each, and while it cannot happen."""
    program = [
        (stage, number, is_sent)
        for number, ends in enumerate(transfers)
        for stage, is_sent in zip(ends, (True, False), strict=True)
        if stage % schedule.num_ranks == rank
    ]
    at = [0] * schedule.num_microbatches
    taken: dict[tuple[int, int], list[tuple[str, int, bool]]] = {}
    for action in schedule.orders[rank]:
        m = action.microbatch
        if action.kind == "F":
            start = at[m]
            while at[m] < len(program) and program[at[m]][0] <= action.stage:
                at[m] += 1
            events = [("value", number, is_sent) for _, number, is_sent in program[start : at[m]]]
            taken[m, action.stage] = events
        else:
            events = [("gradient", number, not is_sent) for _, number, is_sent in reversed(taken[m, action.stage])]
        for what, number, is_sent in events:
            yield
            while not is_sent and (what, m, number) not in happened:
                yield
            if is_sent:
                happened.add((what, m, number))


def finishes(schedule: Schedule, transfers: Transfers, random: Random) -> bool:
    """Execute it: each rank walks through the program of every microbatch, one event at a time, in any order of ranks.

    Every transfer is an event at its source's and one at its destination's rank, those within a rank too. A forward
    goes on until the program enters a later stage of the rank; a backward takes back what its forward did.
    """
    happened: set[tuple[str, int, int]] = set()
    runs = {rank: steps(schedule, rank, transfers, happened) for rank in range(schedule.num_ranks)}
    most_events = 4 * len(transfers) * schedule.num_microbatches
    for _ in range(most_events + 1):  # while any rank can go on, each of these rounds has an event or more
        for rank in random.sample(sorted(runs), len(runs)):
            if next(runs[rank], "ended") == "ended":
                del runs[rank]
    return not runs


def random_order(random: Random, rank: int, num_ranks: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    """Any sound order of one rank: again and again one of the actions that may come next."""
    stages = range(rank, num_ranks * num_chunks, num_ranks)
    waits = {}
    for m in range(num_microbatches):
        for s in stages:
            waits[Action("F", m, s)] = [Action("F", m - 1, s), Action("F", m, s - num_ranks)]
            waits[Action("B", m, s)] = [Action("B", m - 1, s), Action("B", m, s + num_ranks), Action("F", m, s)]
    order: list[Action] = []
    eager = random.choice([0.1, 0.5, 0.9])
    while left := [action for action in waits if action not in order]:
        ready = [action for action in left if all(other in order for other in waits[action] if other in waits)]
        kinds = [action for action in ready if (action.kind == "B") == (random.random() < eager)]
        order.append(random.choice(kinds or ready))
    return order


def random_transfers(random: Random, num_stages: int) -> Transfers:
    """A chain with more between it, or pairs without order; feedback and repeated pairs among them."""
    pairs = chain(num_stages) if random.random() < 0.7 else []
    for _ in range(random.randrange(4)):
        pairs.insert(random.randint(0, len(pairs)), (random.randrange(num_stages), random.randrange(num_stages)))
    return pairs


def random_case(random: Random, *, broken: bool) -> tuple[Schedule, Transfers]:
    num_ranks, num_chunks, num_microbatches = random.randint(1, 3), random.randint(1, 2), random.randint(1, 3)
    if random.random() < 0.4:
        name = random.choice(["fthenb", "interleaved"])
        made = make_schedule(name, num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=num_microbatches)
        orders = [list(order) for order in made.orders]
    else:
        orders = [random_order(random, rank, num_ranks, num_chunks, num_microbatches) for rank in range(num_ranks)]
    if broken:
        order = random.choice(orders)
        at, to = random.randrange(len(order)), random.randrange(len(order))
        change = random.randrange(4)
        if change == 0:
            order[at], order[to] = order[to], order[at]
        elif change == 1:
            del order[at]
        elif change == 2:
            order.insert(to, order[at])
        else:
            random.choice(orders).insert(0, order.pop(at))
    schedule = Schedule("random", num_ranks * num_chunks, num_microbatches, tuple(map(tuple, orders)))
    return schedule, random_transfers(random, schedule.num_stages)


# Of a seed: where each random number is one of Hypothesis's own, a case takes ten times as long.
randoms = st.integers(0, 2**32 - 1).map(Random)
thorough = tried(150)


@tried(250)
@given(randoms)
def test_the_check_finds_something_exactly_where_a_rule_is_broken_or_the_execution_gets_stuck(random: Random) -> None:
    broken = random.random() < 0.5
    schedule, transfers = random_case(random, broken=broken)
    sound = is_sound(schedule)
    assert sound or broken
    assert (check(schedule, transfers) == []) == (sound and finishes(schedule, transfers, random))


@thorough
@given(randoms)
def test_an_adapted_schedule_can_be_run_and_one_that_can_be_run_is_left_alone(random: Random) -> None:
    name, num_ranks, k = random.choice(SCHEDULES), random.randint(1, 4), random.randint(1, 5)
    chunks = 1 if name == "1f1b" else random.randint(1, 3)
    schedule = make_schedule(name, num_ranks=num_ranks, num_chunks=chunks, num_microbatches=k)
    transfers = random_transfers(random, schedule.num_stages)
    adapted = adapt(schedule, transfers)
    assert is_sound(adapted)
    assert finishes(adapted, transfers, random)
    assert (adapted is schedule) == finishes(schedule, transfers, random)
    assert (adapted is schedule) == (adapted.name == schedule.name)


def of(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    return make_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches)


def test_stages_that_feed_each_other_advance_in_step_and_the_others_as_before() -> None:
    adapted = adapt(of("1f1b", 4, 1, 4), FEEDBACK)
    assert adapted.text() == (
        "1f1b, stages 0 to 2 in step: 4 stages, 4 ranks, 4 microbatches\n"
        "rank 0: F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0\n"
        "rank 1: F0.1 F1.1 B0.1 F2.1 B1.1 F3.1 B2.1 B3.1\n"
        "rank 2: F0.2 F1.2 B0.2 F2.2 B1.2 F3.2 B2.2 B3.2\n"
        "rank 3: F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.3 B3.3\n"
    )
    around = [(0, 1), (0, 2), (2, 0), (0, 2), (2, 3)]  # stage 1 may not lag behind stage 0 either
    assert adapt(of("1f1b", 4, 1, 6), around).name == "1f1b, stages 0 to 2 in step"
    two = [(0, 1), (1, 0), (0, 1), (1, 2), (2, 3), (3, 2), (2, 3)]
    assert adapt(of("1f1b", 4, 1, 6), two).name == "1f1b, stages 0 to 1 and 2 to 3 in step"


def test_a_chain_with_feedback_to_any_stage_still_overlaps_microbatches() -> None:
    for stages in range(2, 7):
        for first in range(stages - 1):
            for last in range(first + 1, stages):
                there = [(stage, stage + 1) for stage in range(first, last)]
                transfers = [*chain(first + 1), *there, (last, first), *there, *chain(stages)[last:]]
                adapted = adapt(of("1f1b", stages, 1, 8), transfers)
                assert check(adapted, transfers) == []
                assert "microbatch by microbatch" not in adapted.name


def test_a_schedule_with_chunks_that_deadlocks_becomes_one_microbatch_after_the_other() -> None:
    adapted = adapt(of("interleaved", 2, 2, 3), [*chain(4), (3, 0), (0, 3)])
    assert adapted.text() == (
        "interleaved, as fthenb microbatch by microbatch: 4 stages, 2 ranks, 3 microbatches\n"
        "rank 0: F0.0 F0.2 F1.0 F1.2 F2.0 F2.2 B0.2 B0.0 B1.2 B1.0 B2.2 B2.0\n"
        "rank 1: F0.1 F0.3 F1.1 F1.3 F2.1 F2.3 B0.3 B0.1 B1.3 B1.1 B2.3 B2.1\n"
    )


def test_paths_that_fit_alone_and_may_not_together_go_one_microbatch_after_the_other() -> None:
    schedule = of("interleaved", 2, 2, 3)
    back, straight = [(0, 2), (2, 1), (1, 3)], chain(4)
    assert adapt(schedule, back) is schedule
    assert adapt(schedule, straight) is schedule
    assert adapt(schedule, straight, back).name == "interleaved, as fthenb microbatch by microbatch"
    assert adapt(schedule, straight, [(0, 3)]) is schedule


@thorough
@given(randoms)
def test_what_is_left_when_one_forward_took_another_path_can_be_run_whatever_paths_follow(random: Random) -> None:
    name, num_ranks, k = random.choice(SCHEDULES), random.randint(1, 4), random.randint(1, 5)
    chunks = 1 if name == "1f1b" else random.randint(1, 3)
    schedule = make_schedule(name, num_ranks=num_ranks, num_chunks=chunks, num_microbatches=k)
    last = random.randrange(k)
    changed = one_by_one_after(schedule, last)
    assert is_sound(changed)
    # All ranks have the rest in one order, each with its part of it.
    rests = []
    for before, order in zip(schedule.orders, changed.orders, strict=True):
        ends = 1 + max(at for at, action in enumerate(order) if (action.kind, action.microbatch) == ("F", last))
        assert order[:ends] == before[:ends]
        rests.append([(action.microbatch, action.kind == "B") for action in order[ends:]])
    assert all(rest == sorted(rest) for rest in rests)


def test_a_schedule_of_the_users_own_is_never_changed() -> None:
    written = make_schedule(of("1f1b", 4, 1, 6).text(), num_ranks=4, num_chunks=1, num_microbatches=6)
    assert adapt(written, chain(4)) is written
