"""Metrics of evaluations: functions, and objects of torchmetrics, over the held-out rows of all ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassF1Score

from shardwise.engine.reports import EvaluationReport
from shardwise.errors import ConfigError
from shardwise.train import RunConfig, check_references
from shardwise.train.callbacks import values_of
from shardwise.train.run_build import build_metrics
from tests.train.runs import Finished, finished, small_run
from tests.train.test_rows import KINDS, run_of

MINE = """
def accuracy(output, batch, scale=1.0):
    return (output.argmax(-1) == batch["labels"]).float() * scale


def pair(output, batch):
    return output.argmax(-1), batch["labels"]


class Error:
    def __init__(self, power=1):
        if not power:
            raise ValueError("no power")
        self.power = power

    def __call__(self, output, batch):
        return (output - batch["labels"][:, None]).abs() ** self.power
"""

METRICS = (
    "train.metrics.accuracy=mine.py:accuracy",
    "train.metric_options.accuracy.scale=100.0",
    "train.metrics.error=mine.py:Error",
    "train.metric_options.error.power=2",
    "train.metrics.f1=torchmetrics.classification:MulticlassF1Score",
    "train.metric_options.f1={num_classes=3, average='macro'}",
    "train.metrics.chosen=torchmetrics.classification:MulticlassF1Score",
    "train.metric_options.chosen={num_classes=3, average='macro'}",
    "train.metric_inputs.chosen=mine.py:pair",
)


def measured(folder: Path, *overrides: str) -> RunConfig:
    (folder / "mine.py").write_text(MINE)
    config = run_of(folder, "jsonl", *overrides)
    check_references(config)
    return config


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["mesh.dp_shard=4", "sharding.stage=3", "train.microbatch=3"],
        ["mesh.pp=2", "mesh.dp_replicate=3", "train.trace=true"],
    ],
)
def test_metrics_are_those_of_all_held_out_rows(tmp_path: Path, overrides: list[str]) -> None:
    # The learning rate is so small that the model of the last evaluation is the first one.
    still = ("train.learning_rate=1e-12", "train.weight_decay=0.0", "train.evaluate_every=3")
    config = measured(tmp_path, *METRICS, *still, *overrides)
    with torch.no_grad():
        from shardwise.train.run_build import build_model

        model = build_model(config).eval()
        batch = KINDS["jsonl"][1](range(4, 50, 5))
        output = model(batch["input_ids"], batch["attention_mask"])
    f1 = MulticlassF1Score(num_classes=3, average="macro")(output, batch["labels"]).item()
    expected = {
        "accuracy": (output.argmax(-1) == batch["labels"]).float().mean().item() * 100,
        "error": (output - batch["labels"][:, None]).square().mean().item(),
        "f1": f1,
        "chosen": f1,
    }
    through: Finished = finished(config)
    for line in (through.metrics[2], through.metrics[-1]):
        assert line["held_out"] == pytest.approx(expected, rel=1e-5)


def test_metrics_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        measured(tmp_path, "train.metrics.f1=mine.py:pair", "train.metric_options.fl={}", "train.metric_inputs.x=m:n")
    assert list(caught.value.problems) == [
        "train.metric_options.fl: unknown setting; did you mean train.metric_options.f1?",
        "train.metric_inputs.x: unknown setting; did you mean train.metric_inputs.f1?",
    ]
    with pytest.raises(
        ConfigError, match=r"^train\.metric_options: given without train\.metrics, which it belongs to$"
    ):
        small_run(tmp_path, "train.metric_options.f1.num_classes=3")
    with pytest.raises(ConfigError, match=r"^train\.metrics\.loss: evaluations have a loss already"):
        measured(tmp_path, "train.metrics.loss=mine.py:accuracy")
    with pytest.raises(ConfigError, match=r"'accuracy' is a metric .* and an entry of the loss; give one of them"):
        values_of(
            EvaluationReport(loss=1.0, weight=2.0, losses={"loss": 1.0, "accuracy": 0.5}, metrics={"accuracy": 0.4})
        )
    with pytest.raises(ConfigError, match=r"mine\.py:accuracy is no metric of torchmetrics; leave it out"):
        build_metrics(measured(tmp_path, "train.metrics.a=mine.py:accuracy", "train.metric_inputs.a=mine.py:pair"))
    with pytest.raises(ConfigError, match=r"train\.metrics\.a: mine\.py:Error raised ValueError: no power"):
        build_metrics(measured(tmp_path, "train.metrics.a=mine.py:Error", "train.metric_options.a.power=0"))
    unfit: Any = build_metrics(measured(tmp_path, "train.metrics.f1=torchmetrics:MeanMetric"))["f1"]
    with pytest.raises(ConfigError, match=r"train\.metric_inputs\.f1: missing; the output is no tensor with \.logits"):
        unfit[1](3, {"labels": 1})
