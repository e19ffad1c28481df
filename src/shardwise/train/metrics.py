"""What is known after each update, and the files it is written to."""

import dataclasses
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One update."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the global batch, before the update."""
    learning_rate: float
    grad_norm: float
    """2-norm of the averaged gradient, before clipping."""
    tokens_per_second: float
    """Of all ranks together, since the last update; evaluation not counted."""
    skipped: bool
    """The gradient was not finite, and the update was left out."""
    held_out_loss: float | None
    """Mean over the evaluation windows, after the update; None when not evaluated."""
    elapsed_s: float
    """Since training began."""


_MAY_BE_NAN = frozenset({"loss", "grad_norm"})


class Observer(Protocol):
    """Something that is told about every update, on rank 0."""

    def on_step(self, metrics: StepMetrics) -> None:
        """One update is complete."""

    def close(self) -> None:
        """No more updates come, because all are done or because the run stops."""


class MetricsFile:
    """`metrics.jsonl`: one JSON object per update, on disk as soon as the update is done.

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
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def on_step(self, metrics: StepMetrics) -> None:
        """Write one line; a number that is not finite has no JSON and becomes null."""
        values = dataclasses.asdict(metrics)
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Curves for TensorBoard, in a folder of their own."""

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier run wrote into the same folder from there on.
        self._writer: Any = SummaryWriter(log_dir=str(folder), purge_step=after_step + 1)

    def on_step(self, metrics: StepMetrics) -> None:
        """Add one point to each curve."""
        values = dataclasses.asdict(metrics)
        for name in ("loss", "learning_rate", "grad_norm", "tokens_per_second", "held_out_loss"):
            if values[name] is not None:
                self._writer.add_scalar(name, values[name], metrics.step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


def tensorboard_installed() -> bool:
    """Whether curves for TensorBoard can be written."""
    return importlib.util.find_spec("tensorboard") is not None


def _lines_of(path: Path, last_step: int) -> dict[str, StepMetrics]:
    """The whole lines of a file of metrics, up to an update; a run that was killed may have left a torn one."""
    lines = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            values: dict[str, Any] = json.loads(line)
            metrics = StepMetrics(**values | {key: math.nan for key in _MAY_BE_NAN if values[key] is None})
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
        if metrics.step <= last_step:
            lines[line] = metrics
    return lines
