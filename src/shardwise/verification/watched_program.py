"""A program that is watched: it is given a `parallelize` whose engine tells of each of its steps.

program(parallelize)
    parallelize(model, ..)     made(): hooks go on the model
    engine.step(batch)         begin(batch) -> the step of the engine, with a loss that is noted -> end(report)
    ..                         the program is left after the last update that is compared
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm import Channel
from shardwise.engine import Engine, parallelize
from shardwise.engine.forward.batch_digests import describe_batch, digest_of_lines
from shardwise.engine.forward.batches import (
    Batch,
    BatchRows,
    LossFunction,
    LossWeight,
    Microbatch,
    RowDims,
    count_rows,
    given_microbatches,
    moved_to,
    rows_of,
    split_batch,
    with_tensors,
)
from shardwise.engine.step.exchange import weigh
from shardwise.engine.step.reports import StepReport
from shardwise.errors import ModelError
from shardwise.plan import Plan
from shardwise.space import Portion
from shardwise.verification.program import Subject, check_rows
from shardwise.verification.run_recording import NotedLoss, Recorder

_HOST = torch.device("cpu")


class Enough(BaseException):
    """The updates that are compared have been made: the program is left where it is."""


class WatchedProgram(ABC):
    """A run of a program, on one rank or in the one process."""

    engine: Engine[Any]

    def __init__(self, subject: Subject, plan: Plan, channel: Channel) -> None:
        """plan, channel: of this run."""
        self.subject, self.plan, self.channel = subject, plan, channel
        self.num_updates = 0
        """Updates that have ended."""
        self._is_in_step = False
        self._recorder: Recorder | None = None
        self._weight: LossWeight | None = None
        self._rows = BatchRows(0)

    @property
    def recorder(self) -> Recorder:
        """Notes what the model computes, once it is there."""
        assert self._recorder is not None, "the program has made its engine"
        return self._recorder

    @abstractmethod
    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """An update begins."""

    @abstractmethod
    def end(self, report: StepReport) -> None:
        """An update has been made."""

    @abstractmethod
    def made(self, model: torch.nn.Module) -> Sequence[Mapping[str, Portion]]:
        """The model is under its plan; for each rank along tp, portions whose gradients are noted apart."""

    def run(self) -> None:
        """Run the program up to its last update that is compared. Raises ModelError where it makes none."""
        try:
            self.subject.program(self.parallelize)
        except Enough:
            return
        finally:
            if self._recorder is not None:
                self._recorder.remove()
        if not self.num_updates:
            raise ModelError(
                "the program made no update; it has to give its model to the parallelize that it is called with, and "
                "to call engine.step for each update"
            )

    def parallelize(
        self,
        model: torch.nn.Module,
        *,
        loss: LossFunction | None = None,
        loss_weight: LossWeight | None = None,
        rows: RowDims = 0,
        **settings: Any,
    ) -> Engine[Any]:
        """As `shardwise.parallelize`, under the plan and on the ranks of this run; once."""
        if self._recorder is not None:
            raise ModelError(
                "the program made a second engine, and one is compared; put the models into one module, with groups"
            )
        self._rows = BatchRows(rows)
        self._weight = loss_weight and (lambda microbatch: loss_weight(moved_to(microbatch, _HOST)))
        self.engine = engine = parallelize(
            model,
            self.plan,
            loss=self._noted(loss),
            # On the host, which has to know what has no weight: an engine computes nothing of it.
            loss_weight=self._weight,
            channel=self.channel,
            rows=rows,
            **settings,
        )
        self._recorder = Recorder(model, engine.pipeline, portions=self.made(model))
        # The program calls the step of its engine, and nothing else says where an update begins and ends.
        self._step = engine.step
        vars(engine)["step"] = self.step
        return engine

    def step(
        self, batch: Batch, *, microbatches: int | None = None, loss: LossFunction | None = None, **given: Any
    ) -> StepReport:
        """As `Engine.step`."""
        if self._is_in_step:  # an engine that is laid out anew begins its step again
            return self._step(batch, loss=loss, microbatches=microbatches, **given)
        parts = self._cut(batch, microbatches)
        self._is_in_step = True
        try:
            self.begin(parts)
            number = None if microbatches is None else len(parts)
            report = self._step(self.given(batch, parts), loss=self._noted(loss), microbatches=number, **given)
            self.end(report)
        finally:
            self._is_in_step = False
        self.num_updates += 1
        if self.num_updates == self.subject.num_updates:
            raise Enough
        return report

    def given(self, batch: Batch, parts: Sequence[Microbatch]) -> Batch:
        """What the engine is given for a batch and its microbatches."""
        return batch

    def counted(self, microbatches: Sequence[Microbatch]) -> tuple[int, ...]:
        """The numbers of those that are computed: an engine leaves out those with a weight of 0."""
        weights = weigh(microbatches, self._weight, rows=self._rows)
        return tuple(at for at, weight in enumerate(weights) if weight)

    def _cut(self, batch: Batch, microbatches: int | None) -> Sequence[Microbatch]:
        if (parts := given_microbatches(batch)) is not None:
            return parts
        number = self.plan.merge.microbatches
        if microbatches is not None:  # of a data rank
            number = microbatches * number // self.subject.plan.merge.microbatches
        check_rows(self.num_updates, count_rows(batch, self._rows), number, 1)
        return self.cut(batch, number, _HOST)

    def cut(self, batch: Batch, number: int, device: torch.device) -> Sequence[Microbatch]:
        """Equal microbatches of a batch, on a device."""
        return split_batch(with_tensors(batch), number, device, self._rows)

    def shares(self, batch: Batch, number: int) -> Iterator[Batch]:
        """Equal shares of the rows of a batch."""
        size = count_rows(batch, self._rows) // number
        return (rows_of(batch, range(at * size, (at + 1) * size), self._rows) for at in range(number))

    def _noted(self, loss: LossFunction | None) -> LossFunction | None:
        return None if loss is None else NotedLoss(loss, lambda: self._recorder)


def digests_of(microbatches: Sequence[Microbatch]) -> tuple[str, ...]:
    """Of all values of each microbatch."""
    return tuple(digest_of_lines(describe_batch(moved_to(each, _HOST))) for each in microbatches)
