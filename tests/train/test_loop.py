"""The loop alone, with an engine that only takes notes; and evaluations of runs against plain ones."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassF1Score

import shardwise as sw
from shardwise.comm import Channel, alone
from shardwise.data import Data, DataPlace, first_batches
from shardwise.engine.reports import EvaluationReport, StepReport
from shardwise.errors import DivergedError
from shardwise.plan import Plan
from shardwise.space import Mesh
from shardwise.train import RunConfig, check_references
from shardwise.train.callbacks import Callback, Position, StepMetrics, TrainingLoop
from shardwise.train.config import TrainTable
from shardwise.train.corpus import Corpus, TextSamples, evaluation_rows, read_corpus
from shardwise.train.corpus import text_batch as tokens_batch
from shardwise.train.loop import evaluate, fit
from shardwise.train.references import resolve
from shardwise.train.run_build import build_model
from shardwise.train.run_data import RunData
from shardwise.train.run_state import OtherSamples
from shardwise.train.run_tokenizer import ByteTokens
from tests.train.row_kinds import run_of, text_batch
from tests.train.runs import finished, laid_out, small_run


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
        data=Data(samples, global_batch=global_batch, collate=tokens_batch),
        samples=OtherSamples(seed=0, global_batch=global_batch, num_samples=None),
        held_out=CORPUS.held_out.astype(np.int64),
        collate=tokens_batch,
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


# Evaluations of runs -------------------------------------------------------------------------------------------------


def measured(config: RunConfig, names: Mapping[str, str], step: int, net: Any) -> dict[str, float]:
    """What functions of net.py measure over all held-out rows, by `net` with the weights of a save."""
    corpus = read_corpus(config.data, config.folder)
    rows = torch.from_numpy(evaluation_rows(corpus, config.train.global_batch * config.train.evaluate_batches))
    found: dict[str, float] = {}
    with torch.no_grad():
        logits = net(rows)
        for name, reference in names.items():
            value: Any = resolve(reference, folder=config.folder, key=name)(logits, {"labels": rows})
            values = value if isinstance(value, dict) else {name: value.mean()}
            found |= {each: float(one) for each, one in values.items()}
    return found


def net_of(config: RunConfig) -> tuple[Any, dict[str, torch.Tensor]]:
    """A net, and its weights to load into."""
    net: Any = resolve("net.py:Net", folder=config.folder, key="net")
    made = net(width=8)
    return made, {name: parameter.data for name, parameter in made.named_parameters()}


LAYOUTS = [[], ["mesh.dp_shard=2", "train.microbatch=2"], ["mesh.dp_shard=3", "sharding.stage=3"], ["mesh.pp=2"]]
EACH = ("checkpoint.every=1", "checkpoint.keep=9", "train.evaluate_every=2")


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_metrics_and_losses_by_name_are_those_of_all_held_out_rows(tmp_path: Path, layout: list[str]) -> None:
    words = ("train.metrics={hits = 'net.py:hits'}", "model.loss=net.py:two_losses", "train.evaluate_first=true")
    config = laid_out(tmp_path, *EACH, *words, "train.evaluate_batches=3", *layout)
    done = finished(config)
    net, weights = net_of(config)
    for line in done.metrics:
        if line["step"] in (4, 6):
            sw.load(config.saves, weights, step=line["step"], strict=False, channel=alone())
            expected = measured(config, {"hits": "net.py:hits", "loss": "net.py:two_losses"}, line["step"], net)
            assert line["held_out_loss"] == pytest.approx(expected.pop("loss"), rel=1e-5)
            assert line["held_out"] == pytest.approx(expected, rel=1e-5)
        if line["step"]:
            assert line["loss"] == pytest.approx(line["losses"]["token"] + 0.01 * line["losses"]["size"], rel=1e-5)
    assert set(done.metrics[0]) == {"step", "held_out_loss", "held_out"}
    assert f"hits {done.metrics[-1]['held_out']['hits']:.4f}" in done.printed


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=" ".join)
def test_evaluations_are_those_of_the_averages_and_training_is_as_without(tmp_path: Path, layout: list[str]) -> None:
    words = [*EACH, "average.decay=0.5", *layout]
    config = laid_out(tmp_path, *words)
    done = finished(config)
    net, weights = net_of(config)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    losses = []
    for step in range(1, 7):
        sw.load(config.saves, weights, step=step, strict=False, channel=alone())
        averaged.update_parameters(net)
        losses.append(measured(config, {"loss": "net.py:two_losses"}, step, averaged)["token"])
    assert done.curve("held_out_loss") == pytest.approx(losses[1::2], rel=1e-5)
    other = finished(laid_out(tmp_path, *words, f"train.output={tmp_path / 'other'}", "train.evaluate_average=false"))
    assert other.curve("loss") == done.curve("loss")
    assert other.curve("held_out_loss") != done.curve("held_out_loss")


def test_before_the_first_average_evaluations_are_those_of_the_weights(tmp_path: Path) -> None:
    """The averages are then the weights of the beginning: a run would stop early, for it seems not to improve."""
    words = ["average.start=3", "train.evaluate_every=1", "mesh.dp_shard=2"]
    done = finished(laid_out(tmp_path, *words)).curve("held_out_loss")
    other = finished(laid_out(tmp_path, *words, "train.evaluate_average=false")).curve("held_out_loss")
    assert done[:4] == other[:4], "the first average is taken after step 4, and is a copy of the weights"
    assert done[4:] != other[4:]


F1 = "torchmetrics.classification:MulticlassF1Score"
METRICS = (
    "train.metrics={accuracy='nets.py:accuracy', error='nets.py:Error', f1='" + F1 + "', chosen='" + F1 + "'}",
    "train.metric_options={accuracy={scale=100.0}, error={power=2}, f1={num_classes=3, average='macro'}, "
    "chosen={num_classes=3, average='macro'}}",
    "train.metric_inputs.chosen=nets.py:pair",
)


@pytest.mark.parametrize(
    "layout", [["mesh.dp_shard=4", "sharding.stage=3", "train.microbatch=3"], ["mesh.pp=2", "mesh.dp_replicate=3"]]
)
def test_metrics_with_states_are_those_of_all_held_out_rows(tmp_path: Path, layout: list[str]) -> None:
    # The learning rate is so small that the model of the last evaluation is the first one.
    still = ("train.learning_rate=1e-12", "train.weight_decay=0.0", "train.evaluate_every=3")
    config = run_of(tmp_path, "jsonl", *METRICS, *still, *layout)
    check_references(config)
    batch: Any = text_batch(range(4, 50, 5))
    with torch.no_grad():
        output = build_model(config).eval()(batch["input_ids"], batch["attention_mask"])
    f1 = MulticlassF1Score(num_classes=3, average="macro")(output, batch["labels"]).item()
    expected = {
        "accuracy": (output.argmax(-1) == batch["labels"]).float().mean().item() * 100,
        "error": (output - batch["labels"][:, None]).square().mean().item(),
        **{"f1": f1, "chosen": f1},
    }
    through = finished(config)
    for line in (through.metrics[2], through.metrics[-1]):
        assert line["held_out"] == pytest.approx(expected, rel=1e-5)


def test_early_stopping_and_best_saves_go_by_a_metric(tmp_path: Path) -> None:
    options = "options = {metric = 'hits', mode = 'max'"
    tables = (
        f"train.callbacks=[{{factory = 'shardwise.train:BestSave', {options}}}}}, "
        f"{{factory = 'shardwise.train:EarlyStopping', {options}, patience = 2, min_delta = 9.0}}}}]"
    )
    words = ("train.metrics={hits = 'net.py:hits'}", "train.evaluate_first=true", "train.evaluate_every=1", *EACH[:2])
    done = finished(small_run(tmp_path, *words, tables, "train.steps=9"))
    assert "ended after step 3: hits has not improved in 2 evaluations" in done.printed
    hits = {line["step"]: line["held_out"]["hits"] for line in done.metrics}
    best = max(hits.values())
    found = sw.checkpoint.open(tmp_path / "out" / "checkpoints" / "best")
    assert found.extra["best"] == {"metric": "hits", "value": best}
    assert found.step == min(step for step, value in hits.items() if value == best)
    # It came before the count of the other one in the file, and has it all the same.
    assert found.extra["run"]["callbacks"]["EarlyStopping"]["best"] == hits[0]
