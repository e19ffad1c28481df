"""The line that says how far a run is: live on a terminal, plain lines elsewhere."""

from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from shardwise.train.loop import BEGINNING, Position
from shardwise.train.metrics import Observer, StepMetrics


def clock(seconds: float) -> str:
    """Minutes and seconds, hours when there are any.

    >>> clock(65.4), clock(3725)
    ('01:05', '1:02:05')
    """
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes:02}:{left:02}"


def count(number: float) -> str:
    """A number in three digits or so.

    >>> count(950), count(12345), count(9_999_680)
    ('950', '12.3 k', '10.0 M')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f}"


def size(num_bytes: int) -> str:
    """Bytes in three digits or so.

    >>> size(950), size(12_345_678)
    ('950 B', '12.3 MB')
    """
    return f"{count(num_bytes)}B" if num_bytes >= 1000 else f"{num_bytes} B"


@dataclass(slots=True)
class _Pace:
    """Words about the run so far."""

    num_steps: int
    begin: Position
    held_out_loss: float | None
    saved_step: int | None = None

    def words(self, metrics: StepMetrics) -> list[str]:
        if metrics.held_out_loss is not None:
            self.held_out_loss = metrics.held_out_loss
        pace_s = (metrics.elapsed_s - self.begin.elapsed_s) / (metrics.step - self.begin.step)
        eta_s = pace_s * (self.num_steps - metrics.step)
        return [
            f"step {metrics.step}/{self.num_steps}",
            f"loss {metrics.loss:.4f}",
            *([] if self.held_out_loss is None else [f"held-out {self.held_out_loss:.4f}"]),
            f"{count(metrics.tokens_per_second)} tokens/s",
            f"eta {clock(eta_s)}",
            *([] if self.saved_step is None else [f"saved {self.saved_step}"]),
            *(["update skipped: gradient not finite"] if metrics.skipped else []),
        ]


class ProgressLine(Observer, Protocol):
    """An observer that shows how far a run is."""

    def on_save(self, step: int) -> None:
        """The save of an update is committed."""


class LiveLine:
    """One line, redrawn in place."""

    def __init__(self, console: Console, num_steps: int, *, begin: Position = BEGINNING) -> None:
        self._pace = _Pace(num_steps, begin, begin.held_out_loss)
        self._progress = Progress(BarColumn(24), TextColumn("{task.description}"), console=console)
        self._task: TaskID = self._progress.add_task("", total=num_steps, completed=begin.step)
        self._progress.start()

    def on_step(self, metrics: StepMetrics) -> None:
        """Redraw."""
        words = "  ".join(self._pace.words(metrics))
        self._progress.update(self._task, completed=metrics.step, description=words)

    def on_save(self, step: int) -> None:
        """Say so from the next update on."""
        self._pace.saved_step = step

    def close(self) -> None:
        """Leave the last state on the screen and give the cursor back."""
        self._progress.stop()


class PlainLines:
    """A line every `every` updates, and for each one that was evaluated or skipped."""

    def __init__(self, console: Console, num_steps: int, *, every: int, begin: Position = BEGINNING) -> None:
        self._console, self._every = console, every
        self._pace, self._first_step = _Pace(num_steps, begin, begin.held_out_loss), begin.step + 1

    def on_step(self, metrics: StepMetrics) -> None:
        """Print, when it is time."""
        words = self._pace.words(metrics)
        due = metrics.step % self._every == 0 or metrics.step in (self._first_step, self._pace.num_steps)
        if due or metrics.skipped or metrics.held_out_loss is not None:
            self._console.print("  ".join(words), highlight=False, markup=False, soft_wrap=True)

    def on_save(self, step: int) -> None:
        """Say so from the next line on."""
        self._pace.saved_step = step

    def close(self) -> None:
        """Nothing is left to do."""


def progress(console: Console, num_steps: int, *, every: int, begin: Position = BEGINNING) -> ProgressLine:
    """The live line on a terminal, plain lines elsewhere; the run goes on from `begin`."""
    if console.is_terminal:
        return LiveLine(console, num_steps, begin=begin)
    return PlainLines(console, num_steps, every=every, begin=begin)
