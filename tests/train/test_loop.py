"""The loop by a clock of its own, and evaluations of runs against plain ones."""

from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics.classification import MulticlassF1Score

import shardwise as sw
from shardwise.comm import alone
from shardwise.runs.callbacks import Callback, StepMetrics, TrainingLoop
from shardwise.train import RunConfig, check_references
from shardwise.train.config import TrainTable
from shardwise.train.corpus import evaluation_rows, read_corpus
from shardwise.train.loop import fit
from shardwise.train.references import resolve
from shardwise.train.run_build import build_model
from tests.train.row_kinds import run_of, text_batch
from tests.train.runs import finished, laid_out, small_run


class Ticking(nn.Module):
    """The mean of what it is given; each call takes one second on its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))
        self.seconds = 0.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seconds += 1.0
        return rows.mean() + 0 * self.offset


class Notes(Callback):
    def __init__(self) -> None:
        self.metrics: list[StepMetrics] = []

    def on_step(self, loop: TrainingLoop, metrics: StepMetrics) -> None:
        self.metrics.append(metrics)


def test_the_pace_counts_updates_and_not_evaluations_whose_batches_count_by_their_rows() -> None:
    model, notes = Ticking(), Notes()
    engine = sw.parallelize(model, sw.Plan(), optimizer=torch.optim.SGD(model.parameters()), channel=alone(),
                            loss=lambda output, batch: output)  # fmt: skip
    train = TrainTable(steps=5, global_batch=5, evaluate_every=2)
    held_out = [{"rows": rows} for rows in torch.arange(28.0).view(7, 4).split(5)]
    with TrainingLoop(engine, [notes], steps=train.steps, now_s=lambda: model.seconds) as loop:
        batches = repeat({"rows": torch.ones(5, 4)})
        fit(engine, train, batches, held_out, loop, tokens_per_row=4, now_s=lambda: model.seconds)
    assert [metrics.tokens_per_second for metrics in notes.metrics] == [20.0] * 5
    assert [metrics.elapsed_s for metrics in notes.metrics] == [1.0, 4.0, 5.0, 8.0, 11.0]
    assert [metrics.held_out_loss for metrics in notes.metrics] == [None, 13.5, None, 13.5, 13.5]


def test_every_optimizer_follows_the_schedule(tmp_path: Path) -> None:
    two = ("train.optimizer=gan.py:two", "train.decay=linear", "train.warmup_steps=0", "train.clip_grad_norm=null")
    finished(run_of(tmp_path, "turns", *two, "train.min_learning_rate=0.25", "checkpoint.every=6"))
    optimizers = sw.checkpoint.open(tmp_path / "out" / "checkpoints").contents.settings["optimizers"]
    rates = [group["settings"]["lr"] for optimizer in optimizers for group in optimizer["groups"]]
    assert rates == [0.25 * 0.02] * 2


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


LAYOUTS = [["mesh.dp_shard=3", "sharding.stage=3"], ["mesh.pp=2"]]
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
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


def test_metrics_with_states_are_those_of_all_held_out_rows(tmp_path: Path) -> None:
    # The learning rate is so small that the model of the last evaluation is the first one.
    still = ("train.learning_rate=1e-12", "train.weight_decay=0.0", "train.evaluate_every=3")
    config = run_of(tmp_path, "jsonl", *METRICS, *still, "mesh.pp=2", "mesh.dp_replicate=3")
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
