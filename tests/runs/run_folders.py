"""Folders of runs, as runs leave them."""

from pathlib import Path
from typing import Any

from shardwise.engine.step.reports import RankTimes
from shardwise.runs.callbacks import StepMetrics
from shardwise.runs.metrics_file import MetricsFile
from shardwise.runs.run_folder import RunMark

ANY: Any = None
"""For callbacks that do not ask their loop."""


def times(rank: int, compute_s: float, waited_for: dict[int, float]) -> RankTimes:
    return RankTimes(
        rank=rank,
        compute_s=compute_s,
        waiting_s=sum(waited_for.values()),
        waited_for=waited_for,
        outside_s=0.001,
        sent_bytes=1200,
        received_bytes=2_400_000,
        peak_bytes=612_000_000,
        late_steps=0,
    )


def step(number: int, *ranks: RankTimes) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=2.0 / number,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens_per_second=12_345.0,
        skipped=False,
        held_out_loss=None,
        elapsed_s=2.0 * number,
        ranks=ranks,
    )


def written(folder: Path, *steps: StepMetrics, num_ranks: int = 2, rows: str = "tokens") -> RunMark:
    folder.mkdir()
    file = MetricsFile(folder / "metrics.jsonl")
    file.on_begin(ANY)
    mark = RunMark(folder, steps=20, num_ranks=num_ranks, rows=rows)
    for each in steps:
        file.on_step(ANY, each)
    file.on_end(ANY, None)
    return mark
