"""Metrics of an evaluation are those of one process: torchmetrics, and means over rows, whatever each rank has."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils._pytree import tree_map
from torchmetrics import classification, regression

import shardwise as sw
from shardwise.engine.step.edges import Metric
from shardwise.errors import BatchError, MetricError, MismatchError
from tests.engine.loops import begun
from tests.engine.loops import plan_of as short_plan_of
from tests.engine.refusals import same_error_everywhere
from tests.oracle.program import adamw, seeded
from tests.refusals import Refusals

Pair = tuple[torch.Tensor, torch.Tensor]
BOTH = short_plan_of("dp_shard=2")


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


class Joined(torchmetrics.Metric):
    """Makes one tensor of a state that begins as a list."""

    seen: list[torch.Tensor] | torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, preds: torch.Tensor) -> None:
        self.seen = torch.cat([self.seen, preds]) if isinstance(self.seen, torch.Tensor) else preds

    def compute(self) -> torch.Tensor:
        assert isinstance(self.seen, torch.Tensor)
        return self.seen.sort().values


def scores(seed: int, rows: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randint(2, (rows,), generator=generator)


def classifier() -> nn.Module:
    return nn.Linear(4, 2)


def pair_loss(output: torch.Tensor, batch: Pair) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def second(output: torch.Tensor, batch: Pair) -> Pair:
    return output.softmax(-1)[:, 1], batch[1]


def first_score(output: torch.Tensor, batch: Pair) -> torch.Tensor:
    return output[:, 0]


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
        "pearson": (regression.PearsonCorrCoef(), lambda output, batch: (output[:, 0], batch[0][:, 0])),  # None
        "mean": (torchmetrics.MeanMetric(), first_score),
        "largest": (torchmetrics.MaxMetric(), lambda output, batch: {"value": output}),
        "all": (torchmetrics.CatMetric(), first_score),
        "updates": (MeanOfUpdates(), second),
        "joined": (Joined(), first_score),
        "both": torchmetrics.MetricCollection(
            {"precision": classification.MulticlassPrecision(2), "recall": classification.MulticlassRecall(2)}
        ),
        "sum": (classification.BinaryF1Score() + classification.BinaryAUROC(), second),
        # A wrapper with states, which does not count its updates.
        "window": (torchmetrics.wrappers.Running(torchmetrics.SumMetric(), 9), first_score),
        "right": right,
        "spread": spread,
    }


def alone(batches: Sequence[Pair]) -> dict[str, Any]:
    """The same in one process, in plain torchmetrics and torch."""
    model, found, rows = seeded(classifier)(), {}, [len(batch[1]) for batch in batches]
    with torch.no_grad():
        outputs = [model(batch[0]) for batch in batches]
    pairs = list(zip(outputs, batches, strict=True))
    for name, metric in all_metrics().items():
        metric, inputs = metric if isinstance(metric, tuple) else (metric, lambda output, batch: (output, batch[1]))
        if name in ("right", "spread"):
            means = [float(metric(*pair).double().mean()) for pair in pairs]
            found[name] = math.fsum(map(math.prod, zip(means, rows, strict=True))) / sum(rows)
            continue
        for pair in pairs:
            each = inputs(*pair)
            keywords = each if isinstance(each, dict) else {}
            metric.update(*(() if keywords else each if isinstance(each, tuple) else (each,)), **keywords)
        found[name] = metric.compute()
    return found


SUMS_ROUND = ("pearson", "mean", "updates", "window", "spread", "right")
"""Their states are sums of numbers that are rounded, in another order on several ranks."""


def assert_equal(got: Mapping[str, Any], wanted: Mapping[str, Any], *, exactly: bool) -> None:
    numbers = partial(torch.as_tensor, dtype=torch.float64, device="cpu")
    one, other = (tree_map(numbers, dict(each)) for each in (got, wanted))
    assert one.keys() == other.keys()
    for name, value in other.items():
        rtol = 0 if exactly or name not in SUMS_ROUND else 1e-5
        torch.testing.assert_close(one[name], value, rtol=rtol, atol=0, msg=name)


# What Running wraps is asked before its first update where a rank has no rows, and says so.
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric SumMetric")
@pytest.mark.parametrize("rows", [[[8]], [[2], [], [7, 1]], [[0, 4], [6]], [[3], [3]]])
def test_every_kind_of_metric_is_that_of_one_process(rows: list[list[int]]) -> None:
    """It travels in the exchange that an evaluation makes anyway, and the objects are left as they were."""
    batches = [[scores(10 * rank + at, n) for at, n in enumerate(of_rank)] for rank, of_rank in enumerate(rows)]

    def run(channel: sw.Channel) -> list[Any]:
        watched, metrics = sw.Recorded(channel), all_metrics()
        plan = short_plan_of(f"dp_shard={channel.size}", 3)
        engine = begun(watched, classifier, plan, optimizer=adamw, loss=pair_loss)
        found, calls = [], []
        for asked_for in (metrics, metrics, None):
            watched.clear()
            found.append(engine.evaluate(batches[channel.rank], metrics=asked_for).metrics)
            calls.append([(call.operation, call.purpose) for call in watched.calls])
        assert not any(each[0].update_called for each in metrics.values() if isinstance(each, tuple))
        assert calls[1] == calls[2]
        return found[:2]

    wanted = alone([batch for of_rank in batches for batch in of_rank if len(batch[1])])
    for both in sw.simulate(len(rows), run):
        for found in both:
            assert_equal(found, wanted, exactly=len(rows) == 1)


def test_metrics_are_counted_on_the_device(fake: str) -> None:
    def run(channel: sw.Channel) -> Any:
        engine = begun(channel, lambda: classifier().to(channel.device), BOTH, loss=pair_loss)
        metrics = {name: all_metrics()[name] for name in ("all", "mean", "right")}
        return engine.evaluate([scores(channel.rank, 2 + channel.rank), scores(7, 1)], metrics=metrics).metrics

    for one, other in zip(sw.simulate(2, run), sw.simulate(2, run, device=fake), strict=True):
        assert_equal(one, other, exactly=False)


class NoTensors(torchmetrics.Metric):
    seen: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [])

    def update(self, *_: Any) -> None:
        self.seen.append("text")

    def compute(self) -> int:
        return len(self.seen)


class Shaped(torchmetrics.Metric):
    """Keeps the sum over rows of whatever it gets, in the shape that it has."""

    sums: torch.Tensor

    def __init__(self, shape: Callable[[torch.Tensor], Any] = torch.flatten) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(()), dist_reduce_fx="sum")
        self.shape = shape

    def update(self, preds: torch.Tensor, *_: Any) -> None:
        self.sums = self.shape(preds)

    def compute(self) -> torch.Tensor:
        return self.sums.sum()


def shaped(channel: sw.Channel) -> None:
    """Ranks have other rows."""
    engine = begun(channel, classifier, BOTH, loss=pair_loss)
    engine.evaluate(scores(0, 2 + channel.rank), metrics={"a": Shaped()})


def asked(metrics: dict[int, Any], batch: Any = None) -> None:
    """What both of two ranks say, which ask for "b" where nothing else is said; they go on."""

    def run(channel: sw.Channel) -> None:
        settings: Any = {"loss": lambda output, batch: output.mean(), "loss_weight": lambda batch: 1}
        engine = begun(channel, classifier, BOTH, **settings)
        try:
            engine.evaluate(scores(0, 2) if batch is None else batch, metrics=metrics.get(channel.rank, {"b": right}))
        finally:
            assert engine.evaluate(scores(0, 2), metrics={"b": right}).metrics["b"] >= 0

    raise same_error_everywhere(2, run)


def uncounted(metric: Any, batch: Any = None) -> None:
    begun(sw.comm.alone(), classifier, loss=lambda output, batch: output.mean(), loss_weight=lambda batch: 1).evaluate(
        {"input": torch.ones(2, 4)} if batch is None else batch, metrics={"a": metric}
    )


UNEQUAL = [{"input": torch.ones(2, 4), "boxes": torch.ones(3, 4)}]
REFUSED = Refusals(
    "engine.evaluation_metrics",
    {
        "a number": partial(asked, {0: {"a": 3}}),
        "a list": partial(asked, {1: [right]}),
        "other names on ranks": partial(asked, {1: {"a": right}}),
        "none on a rank": partial(asked, {0: None}),
        "inputs that are no pair": lambda: uncounted(torchmetrics.MeanMetric()),
        "an empty tensor": lambda: uncounted(lambda *_: torch.ones(0)),
        "a text": lambda: uncounted(lambda *_: "x"),
        "a state of texts": lambda: uncounted(NoTensors(), (torch.ones(2, 4), torch.ones(2))),
        "a sparse state": lambda: uncounted(Shaped(torch.Tensor.to_sparse), (torch.ones(2, 4), torch.ones(2))),
        "a list in place of a tensor": lambda: uncounted(Shaped(list), (torch.ones(2, 4), torch.ones(2))),
        "a state of other shapes on ranks": lambda: sw.simulate(2, shaped),
        "unequal rows": lambda: uncounted(lambda *_: 1.0, UNEQUAL),
    },
    kind=(MetricError, MismatchError, BatchError),
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_metric_or_cannot_be_counted_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_what_a_metric_raises_has_its_name() -> None:
    def failing(output: torch.Tensor, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError("no rows")

    with pytest.raises(ZeroDivisionError) as caught:
        uncounted(failing)
    assert "shardwise: in the metric 'a'" in caught.value.__notes__
