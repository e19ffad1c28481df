"""The line of progress fits its terminal, and a terminal that cannot redraw a line gets plain ones."""

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.train.callbacks import StepMetrics
from shardwise.train.observers import LiveLine, LossCurve, PlainLines, progress
from tests.train.runs import LOOP, saved

STEP = StepMetrics(
    step=199,
    loss=3.25,
    learning_rate=0.5,
    grad_norm=1.5,
    tokens_per_second=12_345.0,
    skipped=False,
    held_out_loss=2.5,
    elapsed_s=199.0,
)


def terminal(width: int, *, term: str = "xterm") -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=width, height=24, _environ={"TERM": term}), out


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
    line.on_begin(LOOP)
    line.on_save(LOOP, saved(150))
    line.on_step(LOOP, STEP)
    line.on_end(LOOP, None)
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).strip())[-1]
    assert len(last) <= width
    words = ["step 199/250", "loss 3.2500", "held-out 2.5000", "lr 0.5", "12.3 k tokens/s", "eta 00:51", "saved 150"]
    assert re.split(" {2,}", last.partition(" ")[2].strip()) == [word for word in words if word not in left_out]


def test_a_dumb_terminal_gets_plain_lines() -> None:
    console, out = terminal(80, term="dumb")
    lines = progress(console, 250, every=1)
    lines.on_step(LOOP, STEP)
    lines.on_end(LOOP, None)
    assert isinstance(lines, PlainLines)
    assert "\x1b" not in out.getvalue()
    assert isinstance(progress(terminal(80)[0], 250, every=1), LiveLine)


def test_the_end_says_what_was_trained_and_how_far_the_loss_fell(tmp_path: Path) -> None:
    curve = LossCurve(tmp_path / "loss.png", title="demo: 10.2 M parameters, 2 ranks", baseline=3.2, unit="byte")
    for step, loss in ((1, 5.5), (2, 4.0), (3, 2.25)):
        curve.on_step(LOOP, dataclasses.replace(STEP, step=step, loss=loss, elapsed_s=30.0 * step))
    assert curve.words() == (
        "trained demo: 10.2 M parameters, 2 ranks; 3 updates in 01:30; loss 5.5000 at step 1, 2.2500 at step 3"
    )
