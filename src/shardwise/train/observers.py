"""The observers of a run: the files of metrics, the loss curve and the line of progress, callbacks that rank 0 has.

A run that goes on continues its files; one that is over leaves them alone.
"""

import importlib.util
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shardwise.checkpoint import SaveReport
from shardwise.runs.callbacks import BEGINNING, Callback, EvaluationValues, Position, StepMetrics, TrainingLoop
from shardwise.runs.metrics_file import MetricsFile
from shardwise.runs.quantities import clock, count
from shardwise.runs.run_folder import METRICS
from shardwise.train.config import RunConfig

_MOST_CURVES = 16
"""Ranks that get curves."""


class TensorBoard(Callback):
    """Curves for TensorBoard, in a separate folder."""

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        self._folder, self._after_step = folder, after_step

    def on_begin(self, loop: TrainingLoop) -> None:
        """Open the folder."""
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier run wrote into the same folder from there on.
        self._writer: Any = SummaryWriter(log_dir=str(self._folder), purge_step=self._after_step + 1)

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Add the first points, where no update comes with them."""
        if evaluation.step == 0:
            for name, value in evaluation.curves().items():
                self._writer.add_scalar(name, value, 0)

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        """Add one point to each curve."""
        for name, value in metrics.curves().items():
            self._writer.add_scalar(name, value, metrics.step)
        # One card for each figure: the rank that computed longest, and waits and memory of the rank with the most.
        for name in ("compute_s", "waiting_s", "outside_s", "peak_bytes") if metrics.ranks else ():
            self._writer.add_scalar(
                f"ranks/most {name}", max(getattr(each, name) for each in metrics.ranks), metrics.step
            )
        for each in metrics.ranks[:_MOST_CURVES] if len(metrics.ranks) > 1 else ():
            self._writer.add_scalar(f"ranks/compute_s of {each.rank}", each.compute_s, metrics.step)
            self._writer.add_scalar(f"ranks/waiting_s of {each.rank}", each.waiting_s, metrics.step)

    def on_end(self, loop: TrainingLoop, error: BaseException | None) -> None:
        """Write the buffered points."""
        self._writer.close()


_INK, _MUTED, _GRID = "#22252b", "#8a8f98", "#e6e8eb"
_TRAINING, _SMOOTHED, _HELD_OUT = "#9db4d3", "#2f5d9b", "#c8452f"
_PLACES = 1000


class LossCurve(Callback):
    """Collects the losses of a run and draws them."""

    def __init__(self, path: Path, *, title: str, baseline: float | None, unit: str) -> None:
        """unit: what a loss is a mean over. baseline: the loss of a model that knows frequencies alone, of a text."""
        self.path = path
        self.baseline = baseline
        self._title, self._unit = title, unit
        self._training: list[tuple[int, float]] = []
        self._held_out: dict[int, float] = {}
        self._elapsed_s = 0.0

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Remember it."""
        self.remember(evaluation)

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        """Remember one update."""
        self.remember(metrics)

    def remember(self, seen: StepMetrics | EvaluationValues) -> None:
        """Take an update or an evaluation into the curve."""
        if isinstance(seen, EvaluationValues):
            if seen.loss is not None:
                self._held_out[seen.step] = seen.loss
            return
        self._training.append((seen.step, seen.loss))
        self._elapsed_s = seen.elapsed_s
        if seen.held_out_loss is not None:
            self._held_out[seen.step] = seen.held_out_loss

    @property
    def has_updates(self) -> bool:
        """Whether there is something to draw."""
        return bool(self._training)

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
        axes.plot(*smoothed(steps, losses), color=_SMOOTHED, linewidth=1.8, label="training (smoothed)")
        if self._held_out:
            at, values = zip(*self._held_out.items(), strict=True)
            axes.plot(at, values, "o-", color=_HELD_OUT, linewidth=1.6, markersize=4.5, label="held-out")
            axes.annotate(
                f"{values[-1]:.3f}", (at[-1], values[-1]), xytext=(0, 9), textcoords="offset points", ha="center",
                color=_HELD_OUT, fontweight="bold",
            )  # fmt: skip
        if self.baseline is not None:
            axes.axhline(self.baseline, color=_MUTED, linewidth=1.2, linestyle=(0, (5, 4)))
            axes.annotate(
                f"{self._unit}-frequency model {self.baseline:.3f}", (1.0, self.baseline),
                xycoords=("axes fraction", "data"), xytext=(-4, 4), textcoords="offset points", ha="right",
                color=_MUTED,
            )  # fmt: skip
        axes.set_title(self._title, loc="left", color=_INK, fontsize=12)
        axes.set_xlabel("update", color=_INK)
        axes.set_ylabel("loss" if self.baseline is None else f"loss (nats per {self._unit})", color=_INK)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, max(steps) * 1.03)
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.9))
        figure.savefig(self.path)


def smoothed(steps: Sequence[int], losses: Sequence[float]) -> tuple[list[int], list[float]]:
    """Means over the neighbours on both sides, about a thirtieth of the run, at as many places as a picture shows.

    Losses that are not finite do not count.
    """
    values, means = np.asarray(losses), []
    places = range(0, len(values), max(1, len(values) // _PLACES))
    for at in places:
        # Near the beginning only as wide as there are neighbours on the left: a one-sided mean would hide how fast the
        # loss falls at first.
        reach = min(len(values) // 60, at)
        near = values[at - reach : at + reach + 1]
        finite = near[np.isfinite(near)]
        means.append(float(finite.mean()) if len(finite) else math.nan)
    return [steps[at] for at in places], means


class _ProgressWords(Callback):
    """Words about the run so far."""

    def __init__(self, num_steps: int, begin: Position, rows: str) -> None:
        self._num_steps, self._begin, self._rows = num_steps, begin, rows
        self._held_out = {} if begin.held_out_loss is None else {_LOSS: begin.held_out_loss}
        self._saved_step: int | None = None

    def on_save(self, loop: TrainingLoop, report: SaveReport) -> None:
        """Say so from the next line on."""
        self._saved_step = report.step

    def words(self, metrics: StepMetrics) -> dict[str, str]:
        """Words about an update by what they are about, in their order."""
        if metrics.held_out_loss is not None or metrics.held_out:
            self._held_out = {name: value for name, value in metrics.curves().items() if name.startswith("held_out")}
        # Of this run alone: an earlier part may have run on another number of ranks.
        pace_s = (metrics.elapsed_s - self._begin.elapsed_s) / (metrics.step - self._begin.step)
        eta_s = pace_s * (self._num_steps - metrics.step)
        words = {
            "step": f"step {metrics.step}/{self._num_steps}",
            "loss": f"loss {metrics.loss:.4f}",
            **self.evaluation_words(),
            "rate": f"lr {metrics.learning_rate:.3g}",
            "pace": f"{count(metrics.tokens_per_second)} {self._rows}/s",
            "eta": f"eta {clock(eta_s)}",
        }
        if self._saved_step is not None:
            words["saved"] = f"saved {self._saved_step}"
        if metrics.skipped:
            words["skipped"] = "update skipped: gradient not finite"
        return words

    def evaluation_words(self) -> dict[str, str]:
        """The held-out loss, and up to two metrics, by the names of their curves."""
        shown = sorted(self._held_out.items(), key=lambda each: each[0] != _LOSS)[: 1 + _SHOWN_METRICS]
        titles = {name: "held-out" if name == _LOSS else name.removeprefix("held_out/") for name, _ in shown}
        return {name: f"{titles[name]} {value:.4f}" for name, value in shown}


_LOSS = "held_out_loss"
_SHOWN_METRICS = 2
_LONGEST_BAR, _SHORTEST_BAR = 24, 8


class LiveLine(_ProgressWords):
    """One line, redrawn in place, as wide as the terminal."""

    def __init__(self, console: Console, num_steps: int, *, begin: Position = BEGINNING, rows: str = "tokens") -> None:
        super().__init__(num_steps, begin, rows)
        self._console = console
        self._bar = BarColumn(_LONGEST_BAR)
        self._progress = Progress(self._bar, TextColumn("{task.description}"), console=console)
        self._task: TaskID = self._progress.add_task("", total=num_steps, completed=begin.step)

    def on_begin(self, loop: TrainingLoop) -> None:
        """Draw it."""
        self._progress.start()

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Show one that no update comes with."""
        if evaluation.step == 0:
            self._held_out = evaluation.curves()
            self._progress.update(self._task, description="  ".join(self.evaluation_words().values()))

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        """Redraw."""
        words = self.words(metrics)
        # One column stays free: in the last one some terminals go on to the next line.
        room = self._console.width - len(" ") - 1
        # What a narrow line leaves out, in this order: files and the end of the run have it. Then the bar shrinks.
        spared = dict.fromkeys(("saved", "rate", *reversed(self.evaluation_words())), _SHORTEST_BAR) | {"pace": 1}
        for name, bar in spared.items():
            if len("  ".join(words.values())) > room - bar:
                words.pop(name, None)
        line = "  ".join(words.values())
        self._bar.bar_width = min(_LONGEST_BAR, max(1, room - len(line)))
        self._progress.update(self._task, completed=metrics.step, description=line)

    def on_end(self, loop: TrainingLoop, error: BaseException | None) -> None:
        """Leave the last state on the screen and give the cursor back."""
        self._progress.stop()


class PlainLines(_ProgressWords):
    """A line every `every` updates, and for each one that was evaluated or skipped."""

    def __init__(
        self, console: Console, num_steps: int, *, every: int, begin: Position = BEGINNING, rows: str = "tokens"
    ) -> None:
        super().__init__(num_steps, begin, rows)
        self._console, self._every = console, every

    def on_evaluation(self, loop: TrainingLoop, evaluation: EvaluationValues) -> None:
        """Print one that no update comes with."""
        if evaluation.step == 0:
            self._held_out = evaluation.curves()
            self._print([f"step 0/{self._num_steps}", *self.evaluation_words().values()])

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        """Print, when it is time."""
        # The first line comes at once, so that a slow run is seen to run.
        due = metrics.step % self._every == 0 or metrics.step in (self._begin.step + 1, self._num_steps)
        words = self.words(metrics)
        if due or metrics.skipped or metrics.held_out_loss is not None or metrics.held_out:
            self._print(words.values())

    def _print(self, words: Iterable[str]) -> None:
        self._console.print("  ".join(words), highlight=False, markup=False, soft_wrap=True)


def progress(
    console: Console, num_steps: int, *, every: int, begin: Position = BEGINNING, rows: str = "tokens"
) -> Callback:
    """The live line on a terminal that can redraw one, plain lines elsewhere; the run goes on from `begin`.

    rows: what a run reads so many of per second.
    """
    if console.is_interactive:  # a terminal, and not TERM=dumb
        return LiveLine(console, num_steps, begin=begin, rows=rows)
    return PlainLines(console, num_steps, every=every, begin=begin, rows=rows)


def observers_of(config: RunConfig, console: Console, begin: Position, curve: LossCurve) -> list[Callback]:
    """Those of a run that begins or goes on; for rank 0. They open their files when it begins."""
    # The curve of the whole run, with what an earlier process made of it.
    file = MetricsFile(config.output / METRICS, after_step=begin.step, remember=curve.remember)
    has_board = importlib.util.find_spec("tensorboard") is not None
    board = [TensorBoard(config.output / "tensorboard", after_step=begin.step)] if has_board else []
    line = progress(console, config.train.steps, every=config.train.log_every, begin=begin, rows=rows_of(config))
    return [file, curve, *board, line]


def rows_of(config: RunConfig) -> str:
    """What a run reads so many of per second."""
    return "rows" if config.data.unit == "row" else "tokens"


def picture_words(curve: LossCurve) -> str:
    """Draw the picture of the loss, and say where it is."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture of the loss: matplotlib is not installed"
    curve.draw()
    return f"loss curve: {curve.path}"
