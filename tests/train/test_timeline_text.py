"""Drawings of timelines show what is so, in the width that there is."""

import pytest

from shardwise.plan import schedules
from shardwise.plan.schedule_check import chain
from shardwise.plan.schedules import make_schedule
from shardwise.plan.timeline import Timeline, simulate_schedule
from shardwise.train.timeline_text import draw_timeline, seconds_text


def equal_stages(
    name: str, ranks: int, chunks: int, microbatches: int, forward_s: float = 1.0, backward_s: float = 2.0
) -> Timeline:
    schedule = make_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches)
    stages = schedule.num_stages
    return simulate_schedule(schedule, chain(stages), forward_s=[forward_s] * stages, backward_s=[backward_s] * stages)


def test_the_drawing_names_stages_where_ranks_have_several_and_there_is_room() -> None:
    timeline = equal_stages("interleaved", 2, 2, 2)
    assert draw_timeline(timeline, width=70) == (
        "rank 0  0.0-1.0-0.2-1.2-........0.2=====....1.2=====0.0=====1.0=====\n"
        "rank 1  ....0.1-1.1-0.3-0.3=====1.3-1.3=====0.1=====1.1=====........\n"
        "3.6- forward, 3.6= backward of microbatch 3, stage 6; . idle; 15 s, bubble 20.0%\n"
    )
    assert draw_timeline(timeline, width=40).startswith("rank 0  0-1-0-1-....0===..1===0===1===\n")


@pytest.mark.parametrize("width", [30, 60, 100, 250])
def test_the_drawing_keeps_to_its_width_and_every_row_to_the_same_time(width: int) -> None:
    for name, ranks, chunks, k in (("1f1b", 4, 1, 64), ("interleaved", 4, 2, 8), ("fthenb", 11, 1, 3)):
        timeline = equal_stages(name, ranks, chunks, k, 0.0013, 0.00271)
        *rows, _ = draw_timeline(timeline, width=width).splitlines()
        assert len({len(row) for row in rows}) == 1
        assert len(rows[0]) <= width
        assert [row.split()[1] for row in rows] == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (2.5, "2.5 s"), (0.0123456, "12.35 ms"), (3e-6, "3 us"), (0.9996, "999.6 ms")]
)
def test_times_are_told_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), [("1f1b", 3, 1, 5), ("interleaved", 2, 2, 4)])
def test_the_figures_of_the_schedules_hold(name: str, ranks: int, chunks: int, microbatches: int) -> None:
    timeline = equal_stages(name, ranks, chunks, microbatches)
    *rows, legend = draw_timeline(timeline, width=71 if name == "1f1b" else 100).splitlines()
    assert schedules.__doc__ is not None
    assert all(f"    {row}\n" in schedules.__doc__ for row in rows)
    assert legend.partition("idle; ")[2] in schedules.__doc__
    whole = equal_stages("1f1b", 2, 1, 4, 2.0, 4.0)
    assert whole.makespan_s == 30.0
    assert whole.bubble == pytest.approx(0.2)
