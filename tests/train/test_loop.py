"""The loop alone, with an engine that only takes notes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.comm import Channel, alone
from shardwise.data import Data, DataPlace, first_batches
from shardwise.engine.reports import EvaluationReport, StepReport
from shardwise.errors import DivergedError
from shardwise.plan import Plan
from shardwise.space import Mesh
from shardwise.train.callbacks import Callback, Position, StepMetrics, TrainingLoop
from shardwise.train.config import TrainTable
from shardwise.train.corpus import Corpus, TextSamples, text_batch
from shardwise.train.loop import evaluate, fit
from shardwise.train.run_data import RunData
from shardwise.train.run_state import OtherSamples
from shardwise.train.run_tokenizer import ByteTokens


@dataclass(slots=True, kw_only=True)
class NotingEngine:
    """Every call takes one second on its clock; the loss of rows is the mean of their tokens."""

    optimizers: tuple[torch.optim.Optimizer, ...] = field(
        default_factory=lambda: (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0),)
    )
    plan: Plan = field(default_factory=lambda: Plan(mesh=Mesh()))
    channel: Channel = field(default_factory=alone)
    asked: list[Callable[[], bool]] = field(default_factory=list)
    asked_to_stop: bool = False
    num_averaged: int = 0
    seconds: float = 0.0
    evaluated: list[list[int]] = field(default_factory=list)

    def ask_in_steps(self, stop: Callable[[], bool]) -> Callable[[], None]:
        self.asked.append(stop)
        return lambda: self.asked.remove(stop)

    def step(self, batch: Mapping[str, Any], **turn: Any) -> StepReport:
        self.seconds += 1.0
        wishes = [each() for each in self.asked]
        self.asked_to_stop = any(wishes)
        for optimizer in self.optimizers:
            optimizer.step()
        found = self._report(batch)
        return StepReport(
            loss=found.loss,
            weight=found.weight,
            grad_norm=1.0,
            skipped=False,
            num_microbatches=1,
            stop=self.asked_to_stop,
        )

    def evaluate(self, batch: Mapping[str, Any], *, metrics: Mapping[str, Any] | None = None) -> EvaluationReport:
        self.seconds += 1.0
        self.evaluated.append(batch["input_ids"][:, 0].tolist())
        return self._report(batch)

    def _report(self, batch: Mapping[str, Any]) -> EvaluationReport:
        assert batch["input_ids"] is batch["labels"] or not len(batch["labels"])
        tokens = batch["input_ids"].float()
        # An engine tells all ranks the same, whatever this one has: here a rank without rows gives weight all the same.
        return EvaluationReport(loss=float(tokens.mean()) if len(tokens) else 0.0, weight=max(1, len(tokens)))


class Notes(Callback):
    def __init__(self) -> None:
        self.metrics: list[StepMetrics] = []
        self.positions: list[Position] = []

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        self.metrics.append(metrics)
        self.positions.append(loop.position)


CORPUS = Corpus(
    training=np.arange(100, dtype=np.uint8),
    held_out=np.arange(100, 128, dtype=np.uint8).reshape(7, 4),
    vocabulary_size=256,
    tokenizer=ByteTokens(),
)


def data_of(*, global_batch: int) -> RunData:
    samples = TextSamples(corpus=CORPUS, seed=0)
    return RunData(
        data=Data(samples, global_batch=global_batch, collate=text_batch),
        samples=OtherSamples(seed=0, global_batch=global_batch, num_samples=None),
        held_out=CORPUS.held_out.astype(np.int64),
        collate=text_batch,
        tokens_per_row=4,
        corpus=CORPUS,
    )


def fitted(
    engine: "NotingEngine", train: TrainTable, *callbacks: Callback, begin: Position | None = None
) -> float | None:
    """`fit` on one rank, from the batch on where it begins; the last held-out loss."""
    data, place = data_of(global_batch=train.global_batch), DataPlace()
    batches: Iterator[Any] = iter(first_batches(data.data, place, train.steps))
    for _ in range(begin.step if begin is not None else 0):
        next(batches)
    trained: Any = engine
    settings: Any = {"steps": train.steps, "now_s": lambda: engine.seconds}
    with TrainingLoop(trained, callbacks, begin=begin or Position(), **settings) as loop:
        held_out = data.evaluation(place, train.global_batch)
        fit(trained, train, batches, held_out, loop, tokens_per_row=4, now_s=lambda: engine.seconds)
    assert not engine.asked, "a loop that is over asks no more"
    return loop.position.held_out_loss


def test_the_pace_counts_updates_and_not_evaluations() -> None:
    engine, notes = NotingEngine(), Notes()
    train = TrainTable(steps=5, global_batch=5, evaluate_every=2)
    last = fitted(engine, train, notes)
    assert [metrics.tokens_per_second for metrics in notes.metrics] == [20.0] * 5
    assert [metrics.elapsed_s for metrics in notes.metrics] == [1.0, 4.0, 5.0, 8.0, 11.0]
    assert [metrics.held_out_loss is not None for metrics in notes.metrics] == [False, True, False, True, True]
    assert last == notes.metrics[-1].held_out_loss == pytest.approx(np.arange(100, 128).mean())


def test_data_ranks_together_evaluate_every_held_out_row_once() -> None:
    held_out = CORPUS.held_out.astype(np.int64)
    for num_data_ranks in (1, 2, 3, 5, 9):
        batches: list[list[int]] = [[], []]
        for data_rank in range(num_data_ranks):
            engine: Any = NotingEngine()
            place = DataPlace(data_rank=data_rank, num_data_ranks=num_data_ranks)
            loss = evaluate(engine, data_of(global_batch=5).evaluation(place, 5))["loss"]
            assert num_data_ranks > 1 or loss == pytest.approx(held_out.mean())
            for batch, rows in zip(batches, engine.evaluated, strict=True):
                batch += rows
        assert batches == [[100, 104, 108, 112, 116], [120, 124]]


def test_every_optimizer_of_the_engine_follows_the_schedule() -> None:
    optimizers = tuple(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr) for lr in (1.0, 8.0))
    engine = NotingEngine(optimizers=optimizers)
    train = TrainTable(steps=2, global_batch=4, decay="linear", min_learning_rate=0.25)
    fitted(engine, train)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.25, 2.0]


def test_from_each_position_the_loop_goes_on_as_it_would_have() -> None:
    train = TrainTable(steps=5, global_batch=5, evaluate_every=2, decay="linear", warmup_steps=2)
    engine, notes = NotingEngine(), Notes()
    last = fitted(engine, train, notes)
    assert [position.step for position in notes.positions] == [1, 2, 3, 4, 5]
    for begin in notes.positions:
        engine.optimizers = NotingEngine().optimizers
        for group in engine.optimizers[0].param_groups:
            group["initial_lr"] = group["lr"]
        later, before = Notes(), len(engine.evaluated)
        again = fitted(engine, train, later, begin=begin)
        assert later.metrics == notes.metrics[begin.step :]
        assert again == last
        assert len(engine.evaluated) > before, "also a loop without updates evaluates"


def test_a_run_whose_steps_are_all_skipped_names_the_scale_of_its_losses() -> None:
    class Skipping(NotingEngine):
        def step(self, batch: Mapping[str, Any], **turn: Any) -> StepReport:
            return replace(NotingEngine.step(self, batch), skipped=True, loss_scale=2.0**20)

    with pytest.raises(DivergedError, match=r"Losses were scaled by 1048576: see precision.loss_scale"):
        fitted(Skipping(), TrainTable(steps=50, global_batch=4))
