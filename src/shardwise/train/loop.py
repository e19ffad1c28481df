"""The loop: batches in, updates and evaluations, metrics out. It knows nothing of how an update is made.

    for each update    batch of this data rank ->  engine.step  ->  learning rates  ->  evaluation, when it is time
                       ->  observers (rank 0 has some)  ->  keeper (saves)  ->  stop, if a rank asked for it

All ranks run it with equal settings, and everything that decides its course (skipped, stop, the position) is equal on
all. So they make the same calls of the engine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.engine.batches import Batch
from shardwise.engine.rank_times import RankTimes
from shardwise.errors import DivergedError
from shardwise.train.config import TrainTable
from shardwise.train.learning_rates import SchedulerMaker, decaying

# A bad batch may skip an update or a few. After so many different batches the fault is in the parameters, and skipped
# updates do not change those.
PATIENCE_UPDATES = 20
"""So many updates in a row whose gradient is not finite end a run."""


class Evaluated(Protocol):
    """The report of an evaluation."""

    @property
    def loss(self) -> float:
        """The mean over the rows of all data ranks."""

    @property
    def weight(self) -> float:
        """The weights of the rows of all data ranks, summed."""


class Stepped(Protocol):
    """The report of an update."""

    @property
    def loss(self) -> float:
        """The mean over the rows of all data ranks, before the update."""

    @property
    def grad_norm(self) -> float:
        """2-norm of the averaged gradient, before clipping."""

    @property
    def skipped(self) -> bool:
        """The gradient was not finite and nothing was updated."""

    @property
    def stop(self) -> bool:
        """Some rank has asked to stop."""

    @property
    def loss_scale(self) -> float | None:
        """What the losses were multiplied by for their backward; None where they were not."""

    @property
    def ranks(self) -> tuple[RankTimes, ...]:
        """What each rank did with its time."""


# A protocol, so that the loop is tested with an engine of ten lines, and `Tracer` can stand in the engine's place.
class Trainee(Protocol):
    """The part of an engine that the loop needs."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that `step` runs."""

    def step(self, batch: Batch, *, stop: Callable[[], bool] | None = None) -> Stepped:
        """One update from this data rank's rows. stop: whether this rank asks to stop; the report says it of all."""

    def evaluate(self, batch: Batch) -> Evaluated:
        """The loss over the rows of all data ranks; this one may have none of them."""


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
    """Of all ranks together, since the last update; evaluation not counted. Rows, where the data are no text."""
    skipped: bool
    """The gradient was not finite, and the update was left out."""
    held_out_loss: float | None
    """Mean over the evaluation windows, after the update; None when not evaluated."""
    elapsed_s: float
    """Since training began."""
    loss_scale: float | None = None
    """The factor on the losses of this update; None where the plan has none."""
    ranks: tuple[RankTimes, ...] = ()
    """What each rank did with its time, up to the norm of this update."""


class Observer(Protocol):
    """Something that gets the metrics of every update, on rank 0."""

    def on_step(self, metrics: StepMetrics) -> None:
        """One update is complete."""

    def close(self) -> None:
        """No more updates come, because all are done or because the run stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run is: all that the loop has to know to go on from there."""

    step: int = 0
    """Updates that were tried."""
    num_taken: int = 0
    """Updates that were taken. The schedule counts these: a skipped one does not use up its learning rate."""
    num_skipped: int = 0
    """Updates that were skipped in a row, up to now."""
    held_out_loss: float | None = None
    """The result of the last evaluation."""
    elapsed_s: float = 0.0
    """Since training began."""


BEGINNING = Position()
"""Of a run that nothing has been done of."""


class Keeper(Protocol):
    """Something that keeps a run, so that it can go on."""

    def after_update(self, position: Position) -> None:
        """An update was tried, and its evaluation made. Called on every rank."""

    def leave(self, position: Position) -> None:
        """The run stops here, before its last update. Called on every rank, after `after_update`."""


def fit(
    engine: Trainee,
    train: TrainTable,
    batches: Iterator[Batch],
    held_out: Sequence[Batch],
    *,
    tokens_per_row: int,
    observers: Sequence[Observer],
    begin: Position = BEGINNING,
    keeper: Keeper | None = None,
    stop: Callable[[], bool] | None = None,
    scheduler: SchedulerMaker | None = None,
    now_s: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Make the updates up to `train.steps` and return the held-out loss after the last one.

    batches: this data rank's rows of each update, from `begin` on. held_out: its rows of each batch of an evaluation.
    begin: where an earlier run was, whose values the engine holds; its groups then have the full learning rate as
    `initial_lr`. When no update is left, it evaluates. stop: whether this rank asks to stop; once any rank does, all
    return None after the same update. scheduler: None for the decay of [train].
    """
    position = begin
    # A save of the last update was resumed. The run still reports its held-out loss, as it would have at its end.
    if position.step >= train.steps:
        return evaluate(engine, held_out)
    make_scheduler = scheduler if scheduler is not None else decaying(train)
    schedulers = [make_scheduler(optimizer, position.num_taken) for optimizer in engine.optimizers]
    tokens_per_update = train.global_batch * tokens_per_row
    # As if the run had begun so long ago: the time between two parts of it does not count.
    began_s = now_s() - position.elapsed_s
    for update in range(position.step, train.steps):
        update_began_s = now_s()
        learning_rate = float(schedulers[0].get_last_lr()[0])
        batch = next(batches)
        # The wish to stop travels in the exchange that the step makes anyway, so all ranks know of it after the same
        # update.
        report = engine.step(batch) if stop is None else engine.step(batch, stop=stop)
        num_skipped = position.num_skipped + 1 if report.skipped else 0
        if num_skipped == PATIENCE_UPDATES:
            raise DivergedError(
                f"the gradient has not been finite since step {update + 2 - num_skipped}: {num_skipped} updates in a "
                "row were skipped. Lower train.learning_rate, lengthen train.warmup_steps, or set "
                f"train.clip_grad_norm{_scale_advice(report.loss_scale)}"
            )
        # A skipped update does not use up a learning rate: else a run whose first updates are skipped would miss its
        # warm-up.
        if not report.skipped:
            for each in schedulers:
                each.step()
        update_s = now_s() - update_began_s
        step = update + 1
        evaluated = step % train.evaluate_every == 0 or step == train.steps
        found = evaluate(engine, held_out) if evaluated else None
        position = Position(
            step=step,
            num_taken=position.num_taken + (not report.skipped),
            num_skipped=num_skipped,
            held_out_loss=found if evaluated else position.held_out_loss,
            elapsed_s=now_s() - began_s,
        )
        metrics = StepMetrics(
            step=step,
            loss=report.loss,
            learning_rate=learning_rate,
            grad_norm=report.grad_norm,
            tokens_per_second=tokens_per_update / update_s if update_s > 0 else 0.0,
            skipped=report.skipped,
            held_out_loss=found,
            elapsed_s=position.elapsed_s,
            loss_scale=report.loss_scale,
            ranks=report.ranks if observers else (),
        )
        for observer in observers:
            observer.on_step(metrics)
        if keeper is not None:
            keeper.after_update(position)
        if stop is not None and report.stop and step < train.steps:
            if keeper is not None:
                keeper.leave(position)
            return None
    assert position.held_out_loss is not None, "the last update is evaluated"
    return position.held_out_loss


def _scale_advice(loss_scale: float | None) -> str:
    return "" if loss_scale is None else f". Losses were scaled by {loss_scale:.10g}: see precision.loss_scale"


def evaluate(engine: Trainee, held_out: Sequence[Batch]) -> float:
    """The mean loss over the rows of all data ranks; this one may have none of a batch."""
    # Parts may differ by one row: `weight` in the reports says how much each loss counts. All ranks make each call,
    # those without rows too: it exchanges sums.
    reports = [engine.evaluate(batch) for batch in held_out]
    return sum(report.loss * report.weight for report in reports) / sum(report.weight for report in reports)
