"""Metrics of an evaluation are those of one process: torchmetrics, and means over rows, whatever each rank has."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics import classification, regression

import shardwise as sw
from shardwise.comm.recorded import Recorded
from shardwise.engine.evaluation_metrics import Metric
from shardwise.errors import BatchError, MetricError, MismatchError, ShardwiseError
from tests.engine.expected import adamw, seeded
from tests.engine.hybrid_models import data_rank, decoder, num_data_ranks, plan_of
from tests.engine.models import NUM_WORDS
from tests.engine.test_given_microbatches import Words, count_words, given, word_loss

Pair = tuple[torch.Tensor, torch.Tensor]


class MeanOfUpdates(torchmetrics.Metric):
    """A state that is a mean over updates, one that is a maximum, and one without a reduction."""

    mean: torch.Tensor
    most: torch.Tensor
    least: torch.Tensor
    last: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros((), dtype=torch.float64), dist_reduce_fx="mean")
        self.add_state("most", torch.tensor(-math.inf), dist_reduce_fx="max")
        self.add_state("least", torch.tensor(math.inf), dist_reduce_fx="min")
        self.add_state("last", [], dist_reduce_fx=None)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.mean = self.mean + (preds.double().mean() - self.mean) / self.update_count
        self.most = torch.maximum(self.most, preds.max())
        self.least = torch.minimum(self.least, preds.min())
        self.last.append(preds[:1])

    def compute(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean, "most": self.most, "least": self.least, "last": torch.cat(self.last).flatten()}


def scores(seed: int, rows: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randint(2, (rows,), generator=generator)


def classifier() -> nn.Module:
    return seeded(lambda: nn.Linear(4, 2))()


def pair_loss(output: torch.Tensor, batch: Pair) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def second(output: torch.Tensor, batch: Pair) -> Pair:
    return output.softmax(-1)[:, 1], batch[1]


def right(output: torch.Tensor, batch: Pair) -> torch.Tensor:
    return output.argmax(-1) == batch[1]


def spread(output: torch.Tensor, batch: Pair) -> torch.Tensor:
    return output.std()


def all_metrics() -> dict[str, Metric]:
    """New ones, of all kinds of states."""
    return {
        "accuracy": classification.MulticlassAccuracy(2, average="micro"),  # sum, of output and target
        "per class": classification.MulticlassF1Score(2, average=None),
        "auroc": (classification.BinaryAUROC(), second),  # cat
        "binned auroc": (classification.BinaryAUROC(thresholds=11), second),
        "confusion": classification.MulticlassConfusionMatrix(2),
        "pearson": (regression.PearsonCorrCoef(), lambda output, batch: (output[:, 0], batch[0][:, 0])),  # None
        "mean": (torchmetrics.MeanMetric(), lambda output, batch: output[:, 0]),
        "largest": (torchmetrics.MaxMetric(), lambda output, batch: {"value": output}),
        "all": (torchmetrics.CatMetric(), lambda output, batch: output[:, 0]),
        "updates": (MeanOfUpdates(), second),
        "both": torchmetrics.MetricCollection(
            {"precision": classification.MulticlassPrecision(2), "recall": classification.MulticlassRecall(2)}
        ),
        "sum": (classification.BinaryF1Score() + classification.BinaryAUROC(), second),
        # A wrapper with states, which does not count its updates.
        "window": (torchmetrics.wrappers.Running(torchmetrics.SumMetric(), 9), lambda output, batch: output[:, 0]),
        "right": right,
        "spread": spread,
    }


def alone(batches: Sequence[Pair]) -> dict[str, Any]:
    """The same in one process, in plain torchmetrics and torch."""
    model, found, rows = classifier(), {}, [len(batch[1]) for batch in batches]
    with torch.no_grad():
        outputs = [model(batch[0]) for batch in batches]
    for name, metric in all_metrics().items():
        metric, inputs = metric if isinstance(metric, tuple) else (metric, lambda output, batch: (output, batch[1]))
        if name in ("right", "spread"):
            values = [metric(output, batch).double() for output, batch in zip(outputs, batches, strict=True)]
            found[name] = math.fsum(
                float(value.mean()) * count for value, count in zip(values, rows, strict=True)
            ) / sum(rows)
            continue
        for output, batch in zip(outputs, batches, strict=True):
            given = inputs(output, batch)
            if isinstance(given, dict):
                metric.update(**given)
            else:
                metric.update(*(given if isinstance(given, tuple) else (given,)))
        found[name] = metric.compute()
    return found


SUMS_ROUND = ("pearson", "mean", "updates", "window", "spread", "right")
"""Their states are sums of numbers that are rounded, in another order on several ranks."""


def assert_equal(got: Mapping[str, Any], wanted: Mapping[str, Any], *, exactly: bool) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        for one, other in zip(_flat(got[name]), _flat(value), strict=True):
            if exactly or name not in SUMS_ROUND:
                assert one == other, name
            else:
                assert one == pytest.approx(other, rel=1e-5), name


def _flat(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [each for key in sorted(value) for each in _flat(value[key])]
    return torch.as_tensor(value, dtype=torch.float64).flatten().tolist()


# What Running wraps is asked before its first update where a rank has no rows, and says so.
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric SumMetric")
@pytest.mark.parametrize("rows", [[[8]], [[5, 3], [4]], [[2], [], [7, 1]], [[0, 4], [6]]])
def test_every_kind_of_metric_is_that_of_one_process(rows: list[list[int]]) -> None:
    batches = [[scores(10 * rank + at, n) for at, n in enumerate(of_rank)] for rank, of_rank in enumerate(rows)]

    def run(channel: sw.Channel) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), sharding=sw.Sharding(stage=3))
        engine = sw.parallelize(classifier(), plan, optimizer=adamw, loss=pair_loss, channel=channel)
        metrics = all_metrics()
        report = engine.evaluate(batches[channel.rank], metrics=metrics)
        assert not any(each[0].update_called for each in metrics.values() if isinstance(each, tuple)), "left as it was"
        return report.metrics, engine.evaluate(batches[channel.rank], metrics=metrics).metrics

    wanted = alone([batch for of_rank in batches for batch in of_rank if len(batch[1])])
    for found, again in sw.simulate(len(rows), run):
        assert_equal(found, wanted, exactly=len(rows) == 1)
        assert_equal(again, wanted, exactly=len(rows) == 1)


LAYOUTS = {
    "dp": sw.Mesh(dp_shard=2),
    "pp": sw.Mesh(pp=2),
    "tp": sw.Mesh(tp=2),
    "dp pp": sw.Mesh(dp_shard=2, pp=2),
    "dp tp": sw.Mesh(dp_shard=2, tp=2),
}


def word_metrics() -> dict[str, Metric]:
    def words(output: torch.Tensor, batch: Words) -> Pair:
        # Of scores that are equal but for rounding, a rank along tp may take another one for the larger.
        return output.flatten(0, 1).float().round(decimals=4), batch["labels"].flatten()

    return {
        "f1": (classification.MulticlassF1Score(NUM_WORDS), words),
        "auroc": (classification.MulticlassAUROC(NUM_WORDS), words),
        "right": lambda output, batch: (output.argmax(-1) == batch["labels"]).double().mean(1),
    }


@pytest.mark.parametrize(
    ("layout", "stage"), [("dp", 3), ("pp", 0), ("pp", 3), ("tp", 1), ("dp pp", 2), ("dp pp", 3), ("dp tp", 3)]
)
def test_metrics_are_those_of_one_process_under_every_plan(layout: str, stage: int) -> None:
    mesh = LAYOUTS[layout]
    num_ranks = num_data_ranks(mesh)

    def run(channel: sw.Channel) -> tuple[float, Mapping[str, Any]]:
        plan = plan_of(mesh, stage=stage, schedule="interleaved" if layout == "dp pp" else "1f1b")
        engine = sw.parallelize(
            decoder(), plan, optimizer=adamw, loss=word_loss, loss_weight=count_words, channel=channel
        )
        parts = given(0, data_rank(mesh, channel.rank), num_ranks)
        report = engine.evaluate(parts, metrics=word_metrics())
        assert report.loss == engine.evaluate(parts).loss
        engine.step(parts)
        return report.loss, report.metrics

    parts = [part for rank in range(num_ranks) for part in given(0, rank, num_ranks)]
    model, metrics = decoder(), word_metrics()
    means = []
    with torch.no_grad():
        for part in parts:
            output = model(part["words"])
            for name in ("f1", "auroc"):
                metric, inputs = metrics[name]
                metric.update(*inputs(output, part))
            means += metrics["right"](output, part).tolist()
    wanted = {
        "f1": metrics["f1"][0].compute().item(),
        "auroc": metrics["auroc"][0].compute().item(),
        "right": math.fsum(means) / len(means),
    }
    for _, found in sw.simulate(mesh.size, run):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_metrics_travel_in_the_exchange_that_an_evaluation_makes_anyway() -> None:
    def calls(channel: sw.Channel, metrics: Mapping[str, Metric] | None) -> list[tuple[str, str]]:
        watched = Recorded(channel)
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(classifier(), plan, optimizer=adamw, loss=pair_loss, channel=watched)
        watched.calls.clear()
        engine.evaluate([scores(channel.rank, 3)], metrics=metrics)
        return [(call.operation, call.purpose) for call in watched.calls]

    one, other = (sw.simulate(2, partial(calls, metrics=metrics)) for metrics in (None, all_metrics()))
    assert one == other


def test_metrics_are_counted_on_the_device(fake: str) -> None:
    def run(channel: sw.Channel) -> Mapping[str, Any]:
        model = classifier().to(channel.device)
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=pair_loss, channel=channel)
        metrics = {
            "largest": (torchmetrics.MaxMetric(), lambda output, batch: output[:, 0]),
            "all": (torchmetrics.CatMetric(), lambda output, batch: output[:, 0]),
            "right": right,
        }
        return engine.evaluate([scores(channel.rank, 2 + channel.rank), scores(7, 1)], metrics=metrics).metrics

    for one, other in zip(sw.simulate(2, run), sw.simulate(2, run, device=fake), strict=True):
        assert_equal(one, other, exactly=False)


@pytest.mark.parametrize(
    ("metrics", "kind", "message"),
    [
        ({0: {"a": 3}}, MetricError, "the metric 'a' is a int. Give f(output, batch) -> tensor"),
        ({1: [right]}, MetricError, "rank 1: metrics is a list; give a dict of metrics by name"),
        ({1: {"a": right}}, MismatchError, "rank 0 asks for the metrics ['b'], and rank 1 for ['a']; give"),
        ({0: None}, MismatchError, "rank 0 asks for the metrics [], and rank 1 for ['b']; give"),
    ],
)
def test_what_is_no_metric_is_refused_on_all_ranks(
    metrics: dict[int, Any], kind: type[ShardwiseError], message: str
) -> None:
    def run(channel: sw.Channel) -> str:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(classifier(), plan, optimizer=adamw, loss=pair_loss, channel=channel)
        with pytest.raises(kind) as caught:
            engine.evaluate(scores(0, 2), metrics=metrics.get(channel.rank, {"b": right}))
        assert engine.evaluate(scores(0, 2), metrics={"b": right}).metrics["b"] >= 0
        return str(caught.value)

    first, second = sw.simulate(2, run)
    assert first == second
    assert message in first


class NoTensors(torchmetrics.Metric):
    seen: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [])

    def update(self, *_: Any) -> None:
        self.seen.append("text")

    def compute(self) -> int:
        return len(self.seen)


@pytest.mark.parametrize(
    ("metric", "batch", "kind", "message"),
    [
        (
            torchmetrics.MeanMetric(),
            {"input": torch.ones(2, 4)},
            MetricError,
            "here they are a Tensor and a dict. Give",
        ),
        (lambda *_: torch.ones(0), {"input": torch.ones(2, 4)}, MetricError, "the metric 'a' gave an empty tensor"),
        (lambda *_: "x", {"input": torch.ones(2, 4)}, MetricError, "the metric 'a' gave a str; give a number"),
        (NoTensors(), (torch.ones(2, 4), torch.ones(2)), MetricError, "a state 'seen' that is no tensor and no list"),
        (
            lambda *_: 1.0,
            [{"input": torch.ones(2, 4), "boxes": torch.ones(3, 4)}],
            BatchError,
            "all tensors of a batch have the same number of rows",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_in_words(
    metric: Metric, batch: Any, kind: type[ShardwiseError], message: str
) -> None:
    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(
            classifier(),
            sw.Plan(),
            optimizer=adamw,
            loss=lambda output, batch: output.mean(),
            loss_weight=lambda batch: 1,
            channel=channel,
        )
        with pytest.raises(kind) as caught:
            engine.evaluate(batch, metrics={"a": metric})
        assert message in str(caught.value)

    sw.simulate(1, run)


def test_what_a_metric_raises_has_its_name() -> None:
    def failing(output: torch.Tensor, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("no rows")

    engine = sw.parallelize(classifier(), sw.Plan(), optimizer=adamw, loss=lambda output, batch: output.mean())
    with pytest.raises(ZeroDivisionError) as caught:
        engine.evaluate({"input": torch.ones(2, 4)}, metrics={"b": lambda *_: 1.0, "a": failing})
    assert "shardwise: in the metric 'a'" in caught.value.__notes__
