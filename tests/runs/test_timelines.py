"""Drawings, pictures and traces of timelines: every forward and backward is in them, at its place and in its width."""

import json
import re
from pathlib import Path

import pytest

from shardwise.errors import PlanError
from shardwise.plan import schedules
from shardwise.plan.schedule_check import chain
from shardwise.plan.schedules import make_schedule
from shardwise.plan.timeline import Timeline, TimeSpan, simulate_schedule
from shardwise.runs.timeline_files import save_picture, save_trace
from shardwise.runs.timeline_text import draw_timeline, seconds_text


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


def texts_of(svg: Path) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_picture_has_a_row_per_rank_the_number_of_every_microbatch_and_stages_apart(tmp_path: Path) -> None:
    save_picture(equal_stages("1f1b", 3, 1, 4, 0.01, 0.02), tmp_path / "a.svg", title="three stages")
    texts = texts_of(tmp_path / "a.svg")
    assert {"rank 0", "rank 1", "rank 2", "forward", "backward", "idle", "three stages; bubble 33.3%", "ms"} <= {*texts}
    assert texts.count("3") == 2 * 3
    save_picture(equal_stages("interleaved", 2, 2, 2), tmp_path / "a.svg", title="two chunks")
    legend = [text for text in texts_of(tmp_path / "a.svg") if text.startswith(("forward", "backward"))]
    assert legend == [f"{way}, stages {each}" for way in ("forward", "backward") for each in ("0 to 1", "2 to 3")]


def test_one_timeline_has_one_svg(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save_picture(equal_stages("fthenb", 2, 1, 2), tmp_path / name, title="same")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    "timeline", [equal_stages("1f1b", 4, 1, 40), equal_stages("interleaved", 2, 6, 3), Timeline(2, ())]
)
def test_pictures_of_many_bars_of_many_chunks_and_of_nothing_are_drawn(tmp_path: Path, timeline: Timeline) -> None:
    save_picture(timeline, tmp_path / "a.PNG", title="any")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"ends neither in \.png nor in \.svg"):
        save_picture(equal_stages("1f1b", 2, 1, 2), tmp_path / "a.jpeg", title="any")
    assert list(tmp_path.iterdir()) == []


def test_the_trace_has_a_named_row_per_rank_and_every_span_in_microseconds(tmp_path: Path) -> None:
    spans = (
        TimeSpan(1, "F", 3, 5, 100.25, 100.5),
        TimeSpan(0, "wait", 2, 4, 100.0, 100.125),
        TimeSpan(0, "B", 2, 4, 100.125, 101.0),
    )
    save_trace(Timeline(2, spans), tmp_path / "trace.json", title="a run")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(event["name"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    assert names["process_name", 0] == {"name": "a run"}
    assert [names["thread_name", rank] for rank in (0, 1)] == [{"name": "rank 0"}, {"name": "rank 1"}]
    assert [
        (event["name"], event["tid"], event["ts"], event["dur"], event["args"])
        for event in events
        if event["ph"] == "X"
    ] == [
        ("F3.5", 1, 250_000.0, 250_000.0, {"microbatch": 3, "stage": 5}),
        ("wait 2.4", 0, 0.0, 125_000.0, {"microbatch": 2, "stage": 4}),
        ("B2.4", 0, 125_000.0, 875_000.0, {"microbatch": 2, "stage": 4}),
    ]
