"""The observers of a run: the files of metrics, the loss curve and the line of progress. Rank 0 alone has them.

An observer gets every update (`on_step`) and is closed at the end. `Audience` opens all of them, on rank 0, once the
first step is known. A run that goes on continues its files; one that is over leaves them alone.
"""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shardwise.checkpoint import SaveReport
from shardwise.engine.rank_times import slowest
from shardwise.errors import ConfigError
from shardwise.train.config import RunConfig
from shardwise.train.loop import BEGINNING, Observer, Position, StepMetrics
from shardwise.train.quantities import clock, count, size
from shardwise.train.run_folder import METRICS, RunMark

_MAY_BE_NAN = frozenset({"loss", "grad_norm"})
_MOST_RANKS = 64
"""In a line of metrics."""
_MOST_CURVES = 16
"""Ranks that get curves."""


class MetricsFile:
    """`metrics.jsonl`: one JSON object per update, on disk as soon as the update is done.

    `ranks` has the times of the ranks: of those that were busy longest, where there are more than 64.
    after_step: the file is continued: lines of updates up to this one stay, others go. 0: it begins anew.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        lines = _lines_of(path, after_step) if after_step else {}
        self.kept: Sequence[StepMetrics] = list(lines.values())
        """The updates before, as far as the file has them."""
        # In one act: a run that is stopped here has the old file or the new one.
        begun = path.with_name(f"{path.name}.part")
        begun.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        begun.replace(path)
        # A line is handed to the system as soon as it is written: a killed run keeps the updates that it made.
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def on_step(self, metrics: StepMetrics) -> None:
        """Write one line; a number that is not finite has no JSON and becomes null."""
        values = _without_ranks(metrics)
        if metrics.loss_scale is None:
            del values["loss_scale"]  # lines of plans without one are as they were
        if metrics.ranks:
            shown = sorted(metrics.ranks, key=lambda each: -each.busy_s)[:_MOST_RANKS]
            shown.sort(key=lambda each: each.rank)
            values["ranks"] = [_finite(dataclasses.asdict(each)) for each in shown]
            values["slowest"] = slowest(metrics.ranks)
        self._file.write(json.dumps(_finite(values), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Curves for TensorBoard, in a separate folder."""

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier run wrote into the same folder from there on.
        self._writer: Any = SummaryWriter(log_dir=str(folder), purge_step=after_step + 1)

    def on_step(self, metrics: StepMetrics) -> None:
        """Add one point to each curve."""
        values = _without_ranks(metrics)
        names = ["loss", "learning_rate", "grad_norm", "tokens_per_second", "held_out_loss", "loss_scale"]
        if metrics.loss_scale is not None:
            names.append("skipped")  # 1 or 0: a dynamic scale is halved where it is 1
        for name in names:
            if values[name] is not None:
                self._writer.add_scalar(name, values[name], metrics.step)
        # One card for each figure: the rank that computed longest, and waits and memory of the rank with the most.
        for name in ("compute_s", "waiting_s", "outside_s", "peak_bytes") if metrics.ranks else ():
            self._writer.add_scalar(
                f"ranks/most {name}", max(getattr(each, name) for each in metrics.ranks), metrics.step
            )
        for each in metrics.ranks[:_MOST_CURVES] if len(metrics.ranks) > 1 else ():
            self._writer.add_scalar(f"ranks/compute_s of {each.rank}", each.compute_s, metrics.step)
            self._writer.add_scalar(f"ranks/waiting_s of {each.rank}", each.waiting_s, metrics.step)

    def close(self) -> None:
        """Write the buffered points."""
        self._writer.close()


def _without_ranks(metrics: StepMetrics) -> dict[str, Any]:
    values = dataclasses.asdict(dataclasses.replace(metrics, ranks=()))
    del values["ranks"]
    return values


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def tensorboard_installed() -> bool:
    """Whether curves for TensorBoard can be written."""
    return importlib.util.find_spec("tensorboard") is not None


def _lines_of(path: Path, last_step: int) -> dict[str, StepMetrics]:
    """The whole lines of a file of metrics, up to an update. A run that was killed may have left a torn one."""
    lines = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            values: dict[str, Any] = json.loads(line)
            values = {key: value for key, value in values.items() if key not in ("ranks", "slowest")}
            metrics = StepMetrics(**values | {key: math.nan for key in _MAY_BE_NAN if values[key] is None})
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError):
            continue
        # Updates after the save were made by the earlier run too, but are made again now: their lines would be there
        # twice.
        if metrics.step <= last_step:
            lines[line] = metrics
    return lines


_INK, _MUTED, _GRID = "#22252b", "#8a8f98", "#e6e8eb"
_TRAINING, _SMOOTHED, _HELD_OUT = "#9db4d3", "#2f5d9b", "#c8452f"


class LossCurve:
    """Collects the losses of a run and draws them."""

    def __init__(self, path: Path, *, title: str, baseline: float | None, unit: str) -> None:
        """unit: what a loss is a mean over. baseline: the loss of a model that knows frequencies alone, of a text."""
        self.path = path
        self._title, self._baseline, self._unit = title, baseline, unit
        self._training: list[tuple[int, float]] = []
        self._held_out: list[tuple[int, float]] = []
        self._elapsed_s = 0.0

    def on_step(self, metrics: StepMetrics) -> None:
        """Remember one update."""
        self._training.append((metrics.step, metrics.loss))
        self._elapsed_s = metrics.elapsed_s
        if metrics.held_out_loss is not None:
            self._held_out.append((metrics.step, metrics.held_out_loss))

    def close(self) -> None:
        """Nothing is held."""

    def words(self) -> str:
        """What was trained, for how long, and how far the loss fell."""
        (first, first_loss), (last, last_loss) = self._training[0], self._training[-1]
        return (
            f"trained {self._title}; {last} updates in {clock(self._elapsed_s)}; "
            f"loss {first_loss:.4f} at step {first}, {last_loss:.4f} at step {last}"
        )

    def draw(self) -> None:
        """Write the picture, a PNG."""
        # Not pyplot, which keeps every figure in a list of the process and may look for a screen.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5), dpi=144, layout="constrained")
        axes = figure.subplots()
        steps, losses = zip(*self._training, strict=True)
        axes.plot(steps, losses, color=_TRAINING, linewidth=0.8, alpha=0.6)
        axes.plot(steps, _smoothed(losses), color=_SMOOTHED, linewidth=1.8, label="training (smoothed)")
        if self._held_out:
            at, values = zip(*self._held_out, strict=True)
            axes.plot(at, values, "o-", color=_HELD_OUT, linewidth=1.6, markersize=4.5, label="held-out")
            axes.annotate(
                f"{values[-1]:.3f}", (at[-1], values[-1]), xytext=(0, 9), textcoords="offset points", ha="center",
                color=_HELD_OUT, fontweight="bold",
            )  # fmt: skip
        if self._baseline is not None:
            axes.axhline(self._baseline, color=_MUTED, linewidth=1.2, linestyle=(0, (5, 4)))
            axes.annotate(
                f"{self._unit}-frequency model {self._baseline:.3f}", (1.0, self._baseline),
                xycoords=("axes fraction", "data"), xytext=(-4, 4), textcoords="offset points", ha="right",
                color=_MUTED,
            )  # fmt: skip
        axes.set_title(self._title, loc="left", color=_INK, fontsize=12)
        axes.set_xlabel("update", color=_INK)
        axes.set_ylabel("loss" if self._baseline is None else f"loss (nats per {self._unit})", color=_INK)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, max(steps) * 1.03)
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.9))
        figure.savefig(self.path)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean over the neighbours on both sides, about a thirtieth of the run. Values that are not finite do not count."""
    smooth = []
    for at in range(len(values)):
        # Near the beginning only as wide as there are neighbours on the left: a one-sided mean would hide how fast the
        # loss falls at first.
        reach = min(len(values) // 60, at)
        near = [value for value in values[at - reach : at + reach + 1] if math.isfinite(value)]
        smooth.append(sum(near) / len(near) if near else math.nan)
    return smooth


@dataclass(slots=True)
class _Pace:
    """Words about the run so far."""

    num_steps: int
    begin: Position
    held_out_loss: float | None
    rows: str = "tokens"
    saved_step: int | None = None

    def words(self, metrics: StepMetrics) -> list[str]:
        if metrics.held_out_loss is not None:
            self.held_out_loss = metrics.held_out_loss
        # Of this run alone: an earlier part may have run on another number of ranks.
        pace_s = (metrics.elapsed_s - self.begin.elapsed_s) / (metrics.step - self.begin.step)
        eta_s = pace_s * (self.num_steps - metrics.step)
        return [
            f"step {metrics.step}/{self.num_steps}",
            f"loss {metrics.loss:.4f}",
            *([] if self.held_out_loss is None else [f"held-out {self.held_out_loss:.4f}"]),
            f"{count(metrics.tokens_per_second)} {self.rows}/s",
            f"eta {clock(eta_s)}",
            *([] if self.saved_step is None else [f"saved {self.saved_step}"]),
            *(["update skipped: gradient not finite"] if metrics.skipped else []),
        ]


class ProgressLine(Observer, Protocol):
    """An observer that shows how far a run is."""

    def on_save(self, step: int) -> None:
        """The save of an update is committed."""


_LONGEST_BAR, _SHORTEST_BAR = 24, 8
_SPARED_WORDS = ("saved ", "held-out ")
"""What a narrow line leaves out, the first one first; both are said again at the end of the run."""


class LiveLine:
    """One line, redrawn in place, as wide as the terminal."""

    def __init__(self, console: Console, num_steps: int, *, begin: Position = BEGINNING, rows: str = "tokens") -> None:
        self._pace, self._console = _Pace(num_steps, begin, begin.held_out_loss, rows), console
        self._bar = BarColumn(_LONGEST_BAR)
        self._progress = Progress(self._bar, TextColumn("{task.description}"), console=console)
        self._task: TaskID = self._progress.add_task("", total=num_steps, completed=begin.step)
        self._progress.start()

    def on_step(self, metrics: StepMetrics) -> None:
        """Redraw."""
        words = self._pace.words(metrics)
        # One column stays free: in the last one some terminals go on to the next line.
        room = self._console.width - len(" ") - 1
        for spared in _SPARED_WORDS:
            if len("  ".join(words)) > room - _SHORTEST_BAR:
                words = [word for word in words if not word.startswith(spared)]
        line = "  ".join(words)
        self._bar.bar_width = min(_LONGEST_BAR, max(_SHORTEST_BAR, room - len(line)))
        self._progress.update(self._task, completed=metrics.step, description=line)

    def on_save(self, step: int) -> None:
        """Say so from the next update on."""
        self._pace.saved_step = step

    def close(self) -> None:
        """Leave the last state on the screen and give the cursor back."""
        self._progress.stop()


class PlainLines:
    """A line every `every` updates, and for each one that was evaluated or skipped."""

    def __init__(
        self, console: Console, num_steps: int, *, every: int, begin: Position = BEGINNING, rows: str = "tokens"
    ) -> None:
        self._console, self._every = console, every
        self._pace, self._first_step = _Pace(num_steps, begin, begin.held_out_loss, rows), begin.step + 1

    def on_step(self, metrics: StepMetrics) -> None:
        """Print, when it is time."""
        words = self._pace.words(metrics)
        # The first line comes at once, so that a slow run is seen to run.
        due = metrics.step % self._every == 0 or metrics.step in (self._first_step, self._pace.num_steps)
        if due or metrics.skipped or metrics.held_out_loss is not None:
            self._console.print("  ".join(words), highlight=False, markup=False, soft_wrap=True)

    def on_save(self, step: int) -> None:
        """Say so from the next line on."""
        self._pace.saved_step = step

    def close(self) -> None:
        """Nothing is left to do."""


def progress(
    console: Console, num_steps: int, *, every: int, begin: Position = BEGINNING, rows: str = "tokens"
) -> ProgressLine:
    """The live line on a terminal that can redraw one, plain lines elsewhere; the run goes on from `begin`.

    rows: what a run reads so many of per second.
    """
    if console.is_interactive:  # a terminal, and not TERM=dumb
        return LiveLine(console, num_steps, begin=begin, rows=rows)
    return PlainLines(console, num_steps, every=every, begin=begin, rows=rows)


class Audience:
    """The observers of a run, closed when the context ends; none until `open`."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self._line: ProgressLine | None = None
        self._curve: LossCurve | None = None
        self._saved: SaveReport | None = None
        self._mark: RunMark | None = None

    def open(self, config: RunConfig, console: Console, begin: Position, *, title: str, baseline: float | None) -> None:
        """Open the files of a run that begins or goes on; a run that is over already leaves them alone.

        Raises ConfigError when the output folder cannot be written to.
        """
        if begin.step >= config.train.steps:
            return
        rows = "rows" if config.data.unit == "row" else "tokens"
        self._curve = LossCurve(config.output / "loss.png", title=title, baseline=baseline, unit=config.data.unit)
        try:
            config.output.mkdir(parents=True, exist_ok=True)
            file = MetricsFile(config.output / METRICS, after_step=begin.step)
            self._mark = RunMark(config.output, steps=config.train.steps, num_ranks=config.plan.mesh.size, rows=rows)
        except OSError as error:
            raise ConfigError(
                f"train.output: the folder {config.output} cannot be written to ({error.strerror}); name another one"
            ) from error
        self.observers += [file, self._curve]
        # The curve of the whole run, with what an earlier process made of it.
        for metrics in file.kept:
            self._curve.on_step(metrics)
        if tensorboard_installed():
            self.observers.append(TensorBoard(config.output / "tensorboard", after_step=begin.step))
        self._line = progress(console, config.train.steps, every=config.train.log_every, begin=begin, rows=rows)
        self.observers.append(self._line)

    def on_commit(self, report: SaveReport) -> None:
        """A save is committed."""
        self._saved = report
        if self._line is not None and report.step is not None:
            self._line.on_save(report.step)

    def last_words(self, config: RunConfig) -> list[str]:
        """Draw the picture, and say what was trained and where everything is."""
        lines = [] if self._curve is None else [self._curve.words()]
        if self._saved is not None:
            lines.append(f"saved step {self._saved.step} to {config.saves} ({size(self._saved.num_bytes)})")
        if self._curve is None:
            return lines
        if importlib.util.find_spec("matplotlib") is None:
            return [*lines, "no picture of the loss: matplotlib is not installed"]
        self._curve.draw()
        return [*lines, f"loss curve: {self._curve.path}"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Also after an error: a live line must give the cursor back before a message is printed.
        for observer in reversed(self.observers):
            observer.close()
        if self._mark is not None:
            self._mark.end(error)
