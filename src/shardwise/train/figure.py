"""The picture of a run: training and held-out loss against the number of updates."""

import math
from collections.abc import Sequence
from pathlib import Path

from shardwise.train.metrics import StepMetrics

_INK, _MUTED, _GRID = "#22252b", "#8a8f98", "#e6e8eb"
_TRAINING, _SMOOTHED, _HELD_OUT = "#9db4d3", "#2f5d9b", "#c8452f"


class LossCurve:
    """Collects the losses of a run and draws them."""

    def __init__(self, path: Path, *, title: str, baseline: float, unit: str) -> None:
        self.path = path
        self._title, self._baseline, self._unit = title, baseline, unit
        self._training: list[tuple[int, float]] = []
        self._held_out: list[tuple[int, float]] = []

    def on_step(self, metrics: StepMetrics) -> None:
        """Remember one update."""
        self._training.append((metrics.step, metrics.loss))
        if metrics.held_out_loss is not None:
            self._held_out.append((metrics.step, metrics.held_out_loss))

    def close(self) -> None:
        """Nothing is held."""

    def draw(self) -> None:
        """Write the picture, a PNG."""
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
        axes.axhline(self._baseline, color=_MUTED, linewidth=1.2, linestyle=(0, (5, 4)))
        axes.annotate(
            f"{self._unit}-frequency model {self._baseline:.3f}", (1.0, self._baseline),
            xycoords=("axes fraction", "data"), xytext=(-4, 4), textcoords="offset points", ha="right", color=_MUTED,
        )  # fmt: skip
        axes.set_title(self._title, loc="left", color=_INK, fontsize=12)
        axes.set_xlabel("update", color=_INK)
        axes.set_ylabel(f"loss (nats per {self._unit})", color=_INK)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, max(steps) * 1.03)
        axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.9))
        figure.savefig(self.path)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean over the neighbours on both sides, about a thirtieth of the run; what is not a number does not count."""
    smooth = []
    for at in range(len(values)):
        reach = min(len(values) // 60, at)
        near = [value for value in values[at - reach : at + reach + 1] if math.isfinite(value)]
        smooth.append(sum(near) / len(near) if near else math.nan)
    return smooth
