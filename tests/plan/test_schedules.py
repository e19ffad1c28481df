"""Schedules have every action once, in orders that a pipeline can run, and a text that parses back."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
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


def test_1f1b_is_the_well_known_order() -> None:
    assert made("1f1b", 3, 1, 4).text() == (
        "1f1b: 3 stages, 3 ranks, 4 microbatches\n"
        "rank 0: F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0\n"
        "rank 1: F0.1 F1.1 B0.1 F2.1 B1.1 F3.1 B2.1 B3.1\n"
        "rank 2: F0.2 B0.2 F1.2 B1.2 F2.2 B2.2 F3.2 B3.2\n"
    )


def test_fthenb_ends_all_forwards_before_the_first_backward() -> None:
    assert made("fthenb", 2, 2, 2).text() == (
        "fthenb: 4 stages, 2 ranks, 2 microbatches\n"
        "rank 0: F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0\n"
        "rank 1: F0.1 F1.1 F0.3 F1.3 B0.3 B1.3 B0.1 B1.1\n"
    )


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


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    for ranks in range(1, 7):
        for microbatches in range(1, 12):
            assert made("interleaved", ranks, 1, microbatches).orders == made("1f1b", ranks, 1, microbatches).orders


def test_1f1b_keeps_no_more_microbatches_in_flight_than_stages_that_follow() -> None:
    for ranks in range(1, 8):
        for microbatches in range(1, 12):
            for rank, order in enumerate(made("1f1b", ranks, 1, microbatches).orders):
                assert most_in_flight(order) == min(ranks - rank, microbatches)


def test_interleaved_keeps_memory_bounded_however_many_microbatches_there_are() -> None:
    for ranks, chunks in ((2, 2), (3, 2), (4, 3)):
        for microbatches in (ranks, 2 * ranks - 1, 10 * ranks - 1, 10 * ranks + 1):
            largest_group = -(-microbatches // max(1, microbatches // ranks))
            for rank, order in enumerate(made("interleaved", ranks, chunks, microbatches).orders):
                assert most_in_flight(order) <= 2 * (ranks - rank - 1) + (chunks - 1) * largest_group + 1


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


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("", "line 1: '' is not a heading such as"),
        ("\n\nrank 0: F0.0\n", "line 3: 'rank 0: F0.0' is not a heading such as"),
        ("x: 1 stage, 1 rank, 1 microbatch\nrank 0: F0.0 f0.0\n", "line 2: 'f0.0' is not an action such as"),
        ("x: 1 stage, 1 rank, 1 microbatch\n\nrank 0: B0.0.1\n", "line 3: 'B0.0.1' is not an action such as"),
        (
            "x: 2 stages, 2 ranks, 1 microbatch\nrank 0: F0.0\nrank 2: F0.1\n",
            "line 3: 'rank 2: F0.1' is not the line of",
        ),
        ("x: 2 stages, 2 ranks, 1 microbatch\nrank 0: F0.0\n", "the heading says 2 ranks, and 1 have a line"),
        ("x: 3 stages, 2 ranks, 1 microbatch\nrank 0:\nrank 1:\n", "3 stages cannot be dealt out evenly to 2 ranks"),
        ("x: 1 stage, 1 rank, 0 microbatches\nrank 0:\n", "0 microbatches; at least 1 is needed"),
        ("x: 1 stage, 0 ranks, 1 microbatch\n", "1 stages cannot be dealt out evenly to 0 ranks"),
    ],
)
def test_a_text_that_is_no_schedule_is_told_by_its_line(text: str, finding: str) -> None:
    with pytest.raises(PlanError, match=re.escape(finding)):
        Schedule.parse(text)


def test_every_bad_word_of_a_text_is_told_at_once() -> None:
    with pytest.raises(PlanError) as raised:
        Schedule.parse("x: 2 stages, 2 ranks, 1 microbatch\nrank 0: A B\nrank 7: C\n")
    assert len(raised.value.problems) == 4


@pytest.mark.parametrize("name", ["", " padded", "two\nlines"])
def test_a_name_without_a_text_form_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="is not a line of text"):
        Schedule(name, 1, 1, ((),))


def test_a_written_schedule_is_taken_as_it_is_and_not_under_a_name_of_ours() -> None:
    ours = made("1f1b", 2, 1, 3)
    written = make_schedule(ours.text(), num_ranks=2, num_chunks=1, num_microbatches=3)
    assert (written.name, written.orders) == ("1f1b as written", ours.orders)
    own = make_schedule(
        "own: 1 stage, 1 rank, 1 microbatch\nrank 0: F0.0 B0.0", num_ranks=1, num_chunks=1, num_microbatches=1
    )
    assert (own.name, own.orders) == ("own", ((Action("F", 0, 0), Action("B", 0, 0)),))


def refusals() -> list[tuple[Callable[[], object], list[str]]]:
    text = made("interleaved", 2, 2, 8).text()
    return [
        (
            lambda: make_schedule(text, num_ranks=4, num_chunks=1, num_microbatches=4),
            [
                "schedule: 'interleaved' is written for pp = 2, the mesh gives 4; change one of them",
                "schedule: 'interleaved' is written for chunks = 2, the plan gives 1; change one of them",
                "schedule: 'interleaved' is written for k (microbatches) = 8, the batch gives 4; change one of them",
            ],
        ),
        (
            lambda: made("1F1Bs", 2, 1, 2),
            ["schedule: '1F1Bs' is neither a name nor a text of several lines; did you mean '1f1b'?"],
        ),
        (
            lambda: made("zero bubble", 2, 1, 2),
            [
                "schedule: 'zero bubble' is neither a name nor a text of several lines; "
                "known are fthenb, 1f1b, interleaved"
            ],
        ),
        (
            lambda: made("1f1b", 2, 3, 2),
            [
                "schedule: '1f1b' runs 1 chunk of stages per rank, and chunks=3 is asked; "
                "write schedule='interleaved' or chunks=1"
            ],
        ),
        (
            lambda: made("1f1b", 2, 0, 0),
            [
                "schedule: 0 chunks asked; at least 1 is needed",
                "schedule: 0 microbatches asked; at least 1 is needed",
            ],
        ),
    ]


@pytest.mark.parametrize(("ask", "problems"), refusals())
def test_what_cannot_be_made_is_refused_with_both_numbers(ask: Callable[[], object], problems: list[str]) -> None:
    with pytest.raises(PlanError) as raised:
        ask()
    assert list(raised.value.problems) == problems
