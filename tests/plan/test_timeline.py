"""Simulated timelines are those of a plain fixed point and of the formulas."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.schedule_check import chain
from shardwise.plan.schedules import SCHEDULES, Action, Schedule, make_schedule
from shardwise.plan.timeline import Timeline, TimeSpan, ideal_bubble, simulate_schedule
from tests.plan.strategies import proven


def made(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    return make_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches)


def equal_stages(schedule: Schedule, forward_s: float = 1.0, backward_s: float = 2.0) -> Timeline:
    stages = schedule.num_stages
    times = {"forward_s": [forward_s] * stages, "backward_s": [backward_s] * stages}
    return simulate_schedule(schedule, chain(stages), forward_s=times["forward_s"], backward_s=times["backward_s"])


def plain_stops(
    schedule: Schedule, forward_s: list[float], backward_s: list[float], transfer_s: float
) -> dict[Action, float]:
    """When each action of a chain of stages stops: pushed later until everything fits."""
    stops = {action: 0.0 for order in schedule.orders for action in order}
    changed = True
    while changed:
        changed = False
        for order in schedule.orders:
            free = 0.0
            for action in order:
                giver = action.stage + (-1 if action.kind == "F" else 1)
                other = Action(action.kind, action.microbatch, giver)
                far = transfer_s if schedule.num_ranks > 1 else 0.0
                start = max(free, stops[other] + far if other in stops else 0.0)
                free = start + (forward_s if action.kind == "F" else backward_s)[action.stage]
                changed |= stops[action] != free
                stops[action] = free
    return stops


@proven
@given(st.data())
def test_a_chain_takes_the_times_of_the_plain_fixed_point(data: st.DataObject) -> None:
    name, ranks, k = data.draw(st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 6)))
    schedule = made(name, ranks, 1 if name == "1f1b" else data.draw(st.integers(1, 3)), k)
    stages = schedule.num_stages
    times = st.lists(st.integers(1, 9).map(float), min_size=stages, max_size=stages)
    forward_s, backward_s, transfer_s = data.draw(times), data.draw(times), float(data.draw(st.integers(0, 3)))
    timeline = simulate_schedule(
        schedule, chain(stages), forward_s=forward_s, backward_s=backward_s, transfer_s=transfer_s
    )
    stops = {(span.kind, span.microbatch, span.stage): span.stop_s for span in timeline.spans if span.kind != "wait"}
    expected = plain_stops(schedule, forward_s, backward_s, transfer_s)
    assert stops == {(action.kind, action.microbatch, action.stage): stop for action, stop in expected.items()}
    assert timeline.makespan_s == max(expected.values())
    for rank in range(ranks):  # the spans of a rank follow each other without a gap, from 0 on
        mine = [span for span in timeline.spans if span.rank == rank]
        assert [span.start_s for span in mine] == [0.0, *(span.stop_s for span in mine[:-1])]
    assert sum(timeline.busy_s) == k * (sum(forward_s) + sum(backward_s))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("times", [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
def test_with_equal_stages_the_bubble_is_the_formulas_and_never_less(name: str, times: tuple[float, float]) -> None:
    for ranks in (1, 2, 3, 4, 6):
        for chunks in range(1, 4) if name != "1f1b" else [1]:
            for k in (1, 2, 3, 4, 5, 6, 7, 12):
                timeline = equal_stages(made(name, ranks, chunks, k), *times)
                makespan = Fraction(timeline.makespan_s)
                exact = 1 - Fraction(sum(timeline.busy_s)) / (ranks * makespan)
                formula = Fraction(ranks - 1, chunks * k + ranks - 1)
                assert exact >= formula
                if k >= ranks or chunks == 1:
                    assert exact == formula, (name, ranks, chunks, k)
                assert timeline.bubble == pytest.approx(float(exact), abs=1e-12)
                ideal = ideal_bubble(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=k)
                assert ideal == pytest.approx(float(formula), abs=1e-12)


def test_the_time_of_an_action_lies_in_equal_parts_between_its_waits() -> None:
    """Stage 0 computes, sends, waits for it to come back, and computes on: its forward has two parts, stage 1's one."""
    schedule = made("1f1b", 2, 1, 1)
    timeline = simulate_schedule(
        schedule, [(0, 1), (1, 0)], forward_s=[4.0, 3.0], backward_s=[8.0, 5.0], transfer_s=0.5
    )
    assert timeline.spans == (
        TimeSpan(0, "F", 0, 0, 0.0, 2.0),
        TimeSpan(0, "wait", 0, 0, 2.0, 6.0),
        TimeSpan(0, "F", 0, 0, 6.0, 8.0),
        TimeSpan(0, "B", 0, 0, 8.0, 12.0),
        TimeSpan(0, "wait", 0, 0, 12.0, 18.0),
        TimeSpan(0, "B", 0, 0, 18.0, 22.0),
        TimeSpan(1, "wait", 0, 1, 0.0, 2.5),
        TimeSpan(1, "F", 0, 1, 2.5, 5.5),
        TimeSpan(1, "wait", 0, 1, 5.5, 12.5),
        TimeSpan(1, "B", 0, 1, 12.5, 17.5),
    )


def test_what_stays_on_a_rank_needs_no_transfer_and_cuts_no_action() -> None:
    schedule = made("fthenb", 1, 2, 1)
    timeline = simulate_schedule(
        schedule, [(0, 1), (1, 0), (0, 1)], forward_s=[1.0, 2.0], backward_s=[3.0, 4.0], transfer_s=9.0
    )
    assert [(span.kind, span.stage, span.stop_s) for span in timeline.spans] == [
        ("F", 0, 1.0),
        ("F", 1, 3.0),
        ("B", 1, 7.0),
        ("B", 0, 10.0),
    ]


def test_waits_inside_a_measured_forward_are_not_busy_time() -> None:
    timeline = Timeline(
        2,
        (
            TimeSpan(0, "F", 0, 0, 100.0, 110.0),
            TimeSpan(0, "wait", 0, 0, 99.0, 101.0),
            TimeSpan(0, "send", 0, 0, 109.0, 110.0),
            TimeSpan(0, "wait", 0, 0, 104.0, 106.0),
            TimeSpan(0, "wait", 0, 0, 105.0, 107.0),
            TimeSpan(1, "B", 0, 1, 110.0, 120.0),
        ),
    )
    assert [(span.start_s, span.stop_s) for span in timeline.busy_spans()] == [
        (101.0, 104.0),
        (107.0, 110.0),
        (110.0, 120.0),
    ]
    assert (timeline.start_s, timeline.makespan_s, timeline.busy_s) == (99.0, 21.0, (6.0, 10.0))
    assert timeline.bubble == 1 - 16 / 42
