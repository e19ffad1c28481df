"""Schedules have every action once, in orders that a pipeline can run, and a text that parses back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.schedule_check import chain, check
from shardwise.plan.schedules import SCHEDULES, Action, Schedule, make_schedule
from tests.plan.strategies import proven

SIZES = [
    (name, ranks, chunks, microbatches)
    for name in SCHEDULES
    for ranks in range(1, 7)
    for chunks in (range(1, 5) if name != "1f1b" else [1])
    for microbatches in range(1, 18)
]


def made(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    return make_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches)


def most_in_flight(order: tuple[Action, ...]) -> int:
    """The most forwards whose backward has not run yet."""
    most = flying = 0
    for action in order:
        flying += 1 if action.kind == "F" else -1
        most = max(most, flying)
    return most


def test_every_schedule_of_any_size_runs_a_chain_with_every_action_once_and_ascending() -> None:
    for sizes in SIZES:
        schedule = made(*sizes)
        _, ranks, chunks, microbatches = sizes
        assert check(schedule, chain(ranks * chunks)) == [], sizes
        for rank, order in enumerate(schedule.orders):
            for stage in range(rank, ranks * chunks, ranks):
                for kind in "FB":
                    row = [action.microbatch for action in order if (action.kind, action.stage) == (kind, stage)]
                    assert row == list(range(microbatches)), (sizes, kind, stage)
            assert len(order) == 2 * chunks * microbatches


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_interleaved_is_the_order_of_the_paper_where_ranks_divide_the_microbatches(
    ranks: int, chunks: int, rounds: int
) -> None:
    """By the paper's index arithmetic: pass i has chunk (i mod Pv) div P and microbatch P (i div Pv) + i mod P."""
    total = rounds * ranks * chunks

    def number(index: int) -> int:
        return ranks * (index // (ranks * chunks)) + index % ranks

    for rank, order in enumerate(made("interleaved", ranks, chunks, rounds * ranks).orders):
        warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
        expected = []
        for step in range(warmup + total):
            if step < total:
                chunk = step % (ranks * chunks) // ranks
                expected.append(Action("F", number(step), chunk * ranks + rank))
            if step >= warmup:
                chunk = chunks - 1 - (step - warmup) % (ranks * chunks) // ranks
                expected.append(Action("B", number(step - warmup), chunk * ranks + rank))
        assert list(order) == expected


def test_1f1b_keeps_no_more_microbatches_in_flight_than_stages_that_follow() -> None:
    for ranks in range(1, 8):
        for microbatches in range(1, 12):
            for rank, order in enumerate(made("1f1b", ranks, 1, microbatches).orders):
                assert most_in_flight(order) == min(ranks - rank, microbatches)


actions = st.builds(Action, st.sampled_from(["F", "B"]), st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1))
line_names = st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name.isprintable()).map(str.strip)


@st.composite
def any_schedules(draw: st.DrawFn) -> Schedule:
    orders = draw(st.lists(st.lists(actions, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple))
    stages = len(orders) * draw(st.integers(1, 5))
    return Schedule(draw(line_names.filter(bool)), stages, draw(st.integers(1, 1000)), orders)


@proven
@given(any_schedules())
def test_texts_parse_back_whatever_the_name_and_the_orders(schedule: Schedule) -> None:
    assert Schedule.parse(schedule.text()) == schedule
    shifted = "\n\n" + "".join(f"    {line}  \n\n" for line in schedule.text().splitlines())
    assert Schedule.parse(shifted) == schedule


def test_a_written_schedule_is_taken_as_it_is_and_not_under_a_name_of_ours() -> None:
    ours = made("1f1b", 2, 1, 3)
    written = make_schedule(ours.text(), num_ranks=2, num_chunks=1, num_microbatches=3)
    assert (written.name, written.orders) == ("1f1b as written", ours.orders)
    own = make_schedule(
        "own: 1 stage, 1 rank, 1 microbatch\nrank 0: F0.0 B0.0", num_ranks=1, num_chunks=1, num_microbatches=1
    )
    assert (own.name, own.orders) == ("own", ((Action("F", 0, 0), Action("B", 0, 0)),))
