"""Any loop as a run whose folder `shardwise top` shows: its metrics, the times of its ranks, and how it ended."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn

from shardwise.comm.agreement import agreed
from shardwise.engine import Engine
from shardwise.runs.callbacks import Callback, Position, TrainingLoop
from shardwise.runs.json_lines import lines_up_to
from shardwise.runs.metrics_file import MetricsFile
from shardwise.runs.run_folder import METRICS, RunMark, begun


@contextmanager
def recorded(
    engine: Engine[nn.Module],
    folder: Path | str,
    *,
    steps: int | None,
    step: int | None = None,
    rows: str = "rows",
) -> Iterator[TrainingLoop]:
    """A loop whose `after_step` writes `metrics.jsonl`, next to `run.json` in a folder; rank 0 writes.

    steps: the number of the last update; None: it is not known. step: of the update after which the loop begins, left
    out: the engine's; the lines of updates up to it stay. rows: what `after_step` counts. All ranks enter and leave it
    together.
    Raises ConfigError, the same on all ranks, for a folder that cannot be written to.

    >>> with recorded(engine, "runs/mine", steps=100) as loop:      # doctest: +SKIP
    ...     for batch in data.on(engine):
    ...         loop.after_step(engine.step(batch))
    """
    folder, begin = Path(folder), engine.steps if step is None else step
    callbacks: list[Callback] = []
    elapsed_s = 0.0
    mark: RunMark | None = None
    with ExitStack() as stack:
        with agreed(engine.channel, purpose="verdict on the folder of a run", only=0):
            if engine.channel.rank == 0:
                num_ranks = engine.channel.size
                mark = stack.enter_context(begun(folder, steps=steps, num_ranks=num_ranks, rows=rows))
                before = lines_up_to(folder / METRICS, begin, before="ranks") if begin else ()
                elapsed_s = max((values.get("elapsed_s") or 0.0 for _, values in before), default=0.0)
                callbacks.append(MetricsFile(folder / METRICS, after_step=begin))
        position = Position(step=begin, elapsed_s=elapsed_s)
        with TrainingLoop(engine, callbacks, steps=steps, begin=position, folder=folder, rows=rows) as loop:
            yield loop
        if mark is not None and loop.is_interrupted and loop.step != steps:
            mark.said = f"stopped after step {loop.step}"
