"""What a run leaves behind: metrics, the line of progress, the picture, the sample."""

import dataclasses
import io
import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]

from shardwise.checkpoint import SaveReport
from shardwise.runs.callbacks import Callback, Position, StepMetrics
from shardwise.runs.metrics_file import MetricsFile
from shardwise.runs.quantities import clock, count, size
from shardwise.train.observers import (
    LiveLine,
    LossCurve,
    PlainLines,
    TensorBoard,
    progress,
    smoothed,
)
from tests.runs.run_folders import ANY, times


def at(step: int, **changed: Any) -> StepMetrics:
    """An update, two seconds after the one before."""
    made = StepMetrics(
        step=step,
        loss=3.25,
        learning_rate=0.5,
        grad_norm=1.5,
        tokens_per_second=12_345.0,
        skipped=False,
        held_out_loss=None,
        elapsed_s=2.0 * step,
    )
    return dataclasses.replace(made, **changed)


def shown(observer: Callback, *steps: StepMetrics) -> None:
    """A run of these updates, from its begin to its end."""
    observer.on_begin(ANY)
    for each in steps:
        observer.on_step(ANY, each)
    observer.on_end(ANY, None)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """A curve as TensorBoard reads it."""
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(name)]


def saved(step: int) -> SaveReport:
    return SaveReport(location="", step=step, num_tensors=0, num_bytes=0, written_bytes=0)


def test_metrics_are_on_disk_after_each_update_as_json_without_nan(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.on_begin(ANY)
    file.on_step(ANY, at(1))
    expected = dataclasses.asdict(at(1))
    for name in ("loss_scale", "losses", "held_out", "learning_rates", "rows", "ranks"):
        del expected[name]  # only where there are some
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [expected]
    file.on_step(ANY, at(2, loss=float("nan"), grad_norm=float("inf"), skipped=True, loss_scale=65536.0))
    second = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert [second[name] for name in ("loss", "grad_norm", "skipped", "loss_scale")] == [None, None, True, 65536.0]
    file.on_end(ANY, None)


def test_metrics_are_continued_after_a_step_and_torn_lines_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    shown(MetricsFile(path), at(1), at(2, loss=float("nan"), skipped=True), *map(at, range(3, 6)))
    before = path.read_text().splitlines()
    for rest in ('{"step": 6, "lo', "null", "[1]", '{"step": 1}', ""):
        path.write_text("\n".join([*before, rest]))
        kept: list[StepMetrics] = []
        shown(MetricsFile(path, after_step=3, remember=kept.append), at(4))
        assert path.read_text().splitlines() == before[:4]
        assert [each.step for each in kept] == [1, 2, 3]
        assert math.isnan(kept[1].loss)
    path.unlink()
    shown(MetricsFile(path, after_step=3))
    assert path.read_text() == ""
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_long_file_is_continued_line_by_line(tmp_path: Path) -> None:
    path, kept = tmp_path / "metrics.jsonl", 200
    ranks = tuple(times(rank, 0.1, {0: 0.5}) for rank in range(64))
    made = at(1, rows="rows", losses={"a": 1.0, "ranks": 2.0})  # a name of the user's
    shown(MetricsFile(path), *(dataclasses.replace(made, step=step, ranks=ranks) for step in range(1, kept + 11)))
    lines = path.read_text().splitlines()
    assert ('"rows_per_second": 12345.0' in lines[0], lines[0].count("_per_second")) == (True, 1)
    size = path.stat().st_size
    with path.open("a") as torn:
        torn.write(lines[3][: lines[3].rindex("}, {") + 1])  # which ends like a whole one
    seen: list[StepMetrics] = []
    tracemalloc.start()
    shown(MetricsFile(path, after_step=kept, remember=seen.append))
    assert tracemalloc.get_traced_memory()[1] < size / 5
    tracemalloc.stop()
    assert path.read_text().splitlines() == lines[:kept]
    assert seen == [dataclasses.replace(made, step=step) for step in range(1, kept + 1)]


def test_the_curve_is_smoothed_at_the_places_that_a_picture_shows() -> None:
    for num in (1, 59, 60, 1999, 2000, 350_000):
        losses = [1.0 / (at + 1) if at % 97 else math.nan for at in range(num)]
        steps, means = smoothed(range(1, num + 1), losses)
        assert len(steps) == len(means) <= min(num, 2000)
        for step, mean in list(zip(steps, means, strict=True))[:: max(1, len(steps) // 50)]:
            reach = min(num // 60, step - 1)
            near = [each for each in losses[step - 1 - reach : step + reach] if math.isfinite(each)]
            expected = sum(near) / len(near) if near else math.nan
            assert mean == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_tensorboard_of_the_newest_run_reads_as_one_curve_also_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second are read in the order of their count as text, where 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    scaled = {"loss_scale": 65536.0, "skipped": True}
    shown(TensorBoard(tmp_path), at(9, loss=9.0))
    names = {"loss", "learning_rate", "grad_norm", "tokens_per_second"}
    assert set(EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]) == names
    shown(TensorBoard(tmp_path), *(at(step, loss=float(step), **scaled) for step in range(1, 6)))
    shown(TensorBoard(tmp_path, after_step=3), *(at(step, loss=30.0 + step, **scaled) for step in range(4, 6)))
    assert scalars(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 34.0), (5, 35.0)]
    assert scalars(tmp_path, "loss_scale") == [(step, 65536.0) for step in range(1, 6)]
    assert scalars(tmp_path, "skipped") == [(step, 1.0) for step in range(1, 6)]


def test_tensorboard_has_a_curve_per_rank(tmp_path: Path) -> None:
    shown(TensorBoard(tmp_path), at(1, ranks=(times(0, 0.5, {1: 0.25}), times(1, 0.75, {}))))
    for name, value in {
        "most compute_s": 0.75,
        "most waiting_s": 0.25,
        "most outside_s": pytest.approx(0.001),
        "most peak_bytes": 612_000_000,
        "compute_s of 0": 0.5,
        "waiting_s of 1": 0.0,
    }.items():
        assert scalars(tmp_path, f"ranks/{name}") == [(1, value)]


def test_plain_lines_come_when_due_and_when_there_is_news() -> None:
    out = io.StringIO()
    lines = PlainLines(Console(file=out, width=40), 9, every=4)
    for step in range(1, 10):
        lines.on_step(ANY, at(step, held_out_loss=2.5 if step == 6 else None, skipped=step == 7))
        if step == 8:
            lines.on_save(ANY, saved(step))
    printed = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in printed] == [f"step {step}/9" for step in (1, 4, 6, 7, 8, 9)]
    assert printed[0] == "step 1/9  loss 3.2500  lr 0.5  12.3 k tokens/s  eta 00:16"
    assert printed[-1] == "step 9/9  loss 3.2500  held-out 2.5000  lr 0.5  12.3 k tokens/s  eta 00:00  saved 8"
    assert "skipped" in printed[3]


def test_the_time_left_of_a_resumed_run_follows_from_its_own_pace() -> None:
    out = io.StringIO()
    begin = Position(step=100, elapsed_s=1000.0, held_out_loss=2.0)
    PlainLines(Console(file=out, width=100), 104, every=50, begin=begin).on_step(ANY, at(101, elapsed_s=1002.0))
    assert out.getvalue() == "step 101/104  loss 3.2500  held-out 2.0000  lr 0.5  12.3 k tokens/s  eta 00:06\n"


def test_times_and_counts_are_short() -> None:
    assert [clock(s) for s in (0, 59.6, 65, 3599, 3725)] == ["00:00", "01:00", "01:05", "59:59", "1:02:05"]
    counts = {7: "7", 999: "999", 1000: "1.0 k", 12_345: "12.3 k", 9_999_680: "10.0 M", 2e9: "2.0 G"}
    assert {number: count(number) for number in counts} == counts
    assert [size(n) for n in (0, 999, 1000, 12_345_678)] == ["0 B", "999 B", "1.0 kB", "12.3 MB"]


@pytest.mark.slow
def test_the_picture_shows_a_run_even_of_one_update_and_with_nan_and_its_end_is_said(tmp_path: Path) -> None:
    for name, losses in (("one", [3.0]), ("many", [3.0, float("nan"), 2.0, 1.5])):
        curve = LossCurve(tmp_path / f"{name}.png", title=name, baseline=2.5, unit="byte")
        for step, loss in enumerate(losses, start=1):
            curve.on_step(ANY, at(step, loss=loss, held_out_loss=loss if step == 1 else None))
        curve.draw()
        with Image.open(tmp_path / f"{name}.png") as picture:
            colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
            assert picture.size == (1296, 720)
            assert colours is not None
            held_out, training = (200, 69, 47), (47, 93, 155)
            assert {colour for _, colour in colours} >= ({held_out} if name == "one" else {held_out, training})
    assert curve.words() == "trained many; 4 updates in 00:08; loss 3.0000 at step 1, 1.5000 at step 4"


def terminal(width: int, *, term: str = "xterm") -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=width, height=24, _environ={"TERM": term}), out


LATE = at(199, held_out_loss=2.5, elapsed_s=199.0)


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (120, []),
        (92, ["saved 150"]),
        (80, ["saved 150", "lr 0.5"]),
        (60, ["saved 150", "lr 0.5", "held-out 2.5000"]),
        (45, ["saved 150", "lr 0.5", "held-out 2.5000", "12.3 k tokens/s"]),
    ],
)
def test_a_narrow_terminal_loses_what_the_end_repeats_and_never_the_time_left(width: int, left_out: list[str]) -> None:
    console, out = terminal(width)
    line = LiveLine(console, 250)
    line.on_begin(ANY)
    line.on_save(ANY, saved(150))
    line.on_step(ANY, LATE)
    line.on_end(ANY, None)
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).strip())[-1]
    assert len(last) <= width
    words = ["step 199/250", "loss 3.2500", "held-out 2.5000", "lr 0.5", "12.3 k tokens/s", "eta 00:51", "saved 150"]
    assert re.split(" {2,}", last.partition(" ")[2].strip()) == [word for word in words if word not in left_out]


def test_a_dumb_terminal_gets_plain_lines() -> None:
    console, out = terminal(80, term="dumb")
    lines = progress(console, 250, every=1)
    shown(lines, LATE)
    assert isinstance(lines, PlainLines)
    assert "\x1b" not in out.getvalue()
    assert isinstance(progress(terminal(80)[0], 250, every=1), LiveLine)
