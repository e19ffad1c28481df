"""Who is told of a run: on rank 0 the files, the picture and the console, elsewhere nobody."""

import importlib.util
from types import TracebackType
from typing import Self

from rich.console import Console

from shardwise.checkpoint import SaveReport
from shardwise.errors import ConfigError
from shardwise.train.config import RunConfig
from shardwise.train.figure import LossCurve
from shardwise.train.loop import Position
from shardwise.train.metrics import MetricsFile, Observer, TensorBoard, tensorboard_installed
from shardwise.train.progress import ProgressLine, progress, size


class Audience:
    """The observers of a run, closed when the context ends; none until `open`."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self._line: ProgressLine | None = None
        self._curve: LossCurve | None = None
        self._saved: SaveReport | None = None

    def open(self, config: RunConfig, console: Console, begin: Position, *, title: str, baseline: float) -> None:
        """Open the files of a run that begins or goes on; a run that is over already leaves them alone.

        Raises ConfigError when the output folder cannot be written to.
        """
        if begin.step >= config.train.steps:
            return
        self._curve = LossCurve(config.output / "loss.png", title=title, baseline=baseline, unit=config.data.unit)
        try:
            config.output.mkdir(parents=True, exist_ok=True)
            file = MetricsFile(config.output / "metrics.jsonl", after_step=begin.step)
        except OSError as error:
            raise ConfigError(
                f"train.output: the folder {config.output} cannot be written to ({error.strerror}); name another one"
            ) from error
        self.observers += [file, self._curve]
        for metrics in file.kept:
            self._curve.on_step(metrics)
        if tensorboard_installed():
            self.observers.append(TensorBoard(config.output / "tensorboard", after_step=begin.step))
        self._line = progress(console, config.train.steps, every=config.train.log_every, begin=begin)
        self.observers.append(self._line)

    def on_commit(self, report: SaveReport) -> None:
        """A save is committed."""
        self._saved = report
        if self._line is not None and report.step is not None:
            self._line.on_save(report.step)

    def last_words(self, config: RunConfig) -> list[str]:
        """Draw the picture, and say where everything is."""
        lines = []
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
        for observer in reversed(self.observers):
            observer.close()
