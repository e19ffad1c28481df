"""Pictures and traces of timelines: every forward and backward is in them, at its place."""

import json
import re
from pathlib import Path

import pytest

from shardwise.errors import PlanError
from shardwise.plan.schedule_check import chain
from shardwise.plan.schedules import make_schedule
from shardwise.plan.timeline import Timeline, TimeSpan, simulate_schedule
from shardwise.train.timeline_files import save_picture, save_trace


def simulated(name: str, ranks: int, chunks: int, microbatches: int) -> Timeline:
    schedule = make_schedule(name, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches)
    stages = schedule.num_stages
    return simulate_schedule(schedule, chain(stages), forward_s=[0.01] * stages, backward_s=[0.02] * stages)


def texts_of(svg: Path) -> list[str]:
    return re.findall(r">([^<>]+)</text>", svg.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_picture_has_a_row_per_rank_the_number_of_every_microbatch_and_stages_apart(tmp_path: Path) -> None:
    save_picture(simulated("1f1b", 3, 1, 4), tmp_path / "a.svg", title="three stages")
    texts = texts_of(tmp_path / "a.svg")
    assert {"rank 0", "rank 1", "rank 2", "forward", "backward", "idle", "three stages; bubble 33.3%", "ms"} <= {*texts}
    assert texts.count("3") == 2 * 3
    save_picture(simulated("interleaved", 2, 2, 2), tmp_path / "a.svg", title="two chunks")
    legend = [text for text in texts_of(tmp_path / "a.svg") if text.startswith(("forward", "backward"))]
    assert legend == [f"{way}, stages {each}" for way in ("forward", "backward") for each in ("0 to 1", "2 to 3")]


def test_one_timeline_has_one_svg(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save_picture(simulated("fthenb", 2, 1, 2), tmp_path / name, title="same")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("timeline", [simulated("1f1b", 4, 1, 40), simulated("interleaved", 2, 6, 3), Timeline(2, ())])
def test_pictures_of_many_bars_of_many_chunks_and_of_nothing_are_drawn(tmp_path: Path, timeline: Timeline) -> None:
    save_picture(timeline, tmp_path / "a.PNG", title="any")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"ends neither in \.png nor in \.svg"):
        save_picture(simulated("1f1b", 2, 1, 2), tmp_path / "a.jpeg", title="any")
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
