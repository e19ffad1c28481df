"""The loop: batches in, updates and evaluations, metrics out. It knows nothing of how an update is made.

    for each update    batch of this data rank ->  engine.step  ->  learning rates  ->  evaluation, when it is time
                       ->  callbacks (files, saves, those of the user)  ->  stop, if a rank asked for it

All ranks run it with equal settings, and everything that decides its course (skipped, stop, the position) is equal on
all. So they make the same calls of the engine.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from shardwise.engine import Engine
from shardwise.engine.forward.batches import Batch
from shardwise.errors import DivergedError
from shardwise.runs.callbacks import TrainingLoop, values_of
from shardwise.train.config import TrainTable
from shardwise.train.learning_rates import SchedulerMaker, advance, decaying
from shardwise.train.turns import Turns

# A bad batch may skip an update or a few. After so many different batches the fault is in the parameters, and skipped
# updates do not change those.
PATIENCE_UPDATES = 20
"""So many updates in a row whose gradient is not finite end a run."""


def fit(
    engine: Engine[nn.Module],
    train: TrainTable,
    batches: Iterator[Batch],
    held_out: Sequence[Batch],
    loop: TrainingLoop,
    *,
    tokens_per_row: int,
    scheduler: SchedulerMaker | None = None,
    by_step: bool = True,
    turns: Turns | None = None,
    metrics: Mapping[str, Any] | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    now_s: Callable[[], float] = time.perf_counter,
) -> None:
    """Make the updates up to `train.steps`, or up to the one after which a callback or a signal ends the loop.

    batches: this data rank's rows of each update, from `loop.position` on. held_out: its rows of each batch of an
    evaluation. loop: entered; its engine holds the values of its position, and groups have the full learning rate as
    `initial_lr` where that is no beginning. scheduler: None for the decay of [train]. turns: of the updates.
    metrics: of evaluations, by name. around: makes the context of each update. The last update is evaluated, but for
    one after a signal.
    """

    def evaluated() -> dict[str, float]:
        # Before the first average the averages are the first weights. Each evaluation of these gives the same, and a
        # callback would take that for a run that does not improve.
        with loop.engine.averaged() if train.evaluate_average and loop.engine.num_averaged else nullcontext():
            return evaluate(engine, held_out, metrics)

    begin = loop.position
    # A save of the last update was resumed, or callbacks had ended the run. It still reports its held-out loss, as it
    # would have at its end.
    if begin.step >= train.steps or loop.stopped_by:
        loop.evaluated(evaluated())
        return
    make_scheduler = scheduler if scheduler is not None else decaying(train)
    schedulers = [make_scheduler(optimizer, begin.num_taken) for optimizer in engine.optimizers if by_step]
    if train.evaluate_first and begin.step == 0:
        loop.evaluated(evaluated())
    tokens_per_update = train.global_batch * tokens_per_row
    for step in range(begin.step + 1, train.steps + 1):
        update_began_s = now_s()
        batch = next(batches)
        with around():
            report = engine.step(batch, **(turns.of(step) if turns else {}))
        num_skipped = loop.position.num_skipped + 1 if report.skipped else 0
        if num_skipped == PATIENCE_UPDATES:
            scale = report.loss_scale
            advice = "" if scale is None else f". Losses were scaled by {scale:.10g}: see precision.loss_scale"
            raise DivergedError(
                f"the gradient has not been finite since step {step + 1 - num_skipped}: {num_skipped} updates in a "
                "row were skipped. Lower train.learning_rate, lengthen train.warmup_steps, or set "
                f"train.clip_grad_norm{advice}"
            )
        # A skipped update does not use up a learning rate: else a run whose first updates are skipped would miss its
        # warm-up.
        if not report.skipped:
            for each in schedulers:
                advance(each)
        seconds = now_s() - update_began_s
        is_due = step % train.evaluate_every == 0 or step == train.steps or loop.ends()
        found = evaluated() if is_due else None
        loop.after_step(report, found, rows=tokens_per_update, seconds=seconds)
        if loop.is_last:
            return


def evaluate(
    engine: Engine[nn.Module], held_out: Sequence[Batch], metrics: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """The mean loss over the rows of all data ranks, further losses and metrics, by name; a rank may have no rows."""
    # All ranks make each call, those without rows too: it exchanges sums.
    if metrics:
        # In one call: most metrics of all rows are no mean of those of parts.
        microbatches = [part for each in held_out for part in (each if isinstance(each, list) else [each])]
        return values_of(engine.evaluate(microbatches, metrics=metrics))
    reports = [engine.evaluate(batch) for batch in held_out]
    # Parts may differ by one row: `weight` in the reports says how much each loss counts.
    weight = sum(report.weight for report in reports)
    values = [values_of(report) for report in reports]
    return {
        name: sum(each[name] * report.weight for each, report in zip(values, reports, strict=True)) / weight
        for name in values[0]
    }
