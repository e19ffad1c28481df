"""What a Trainer or a module asks for that an engine does not do is refused in words, by all ranks."""

import sys
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.lightning import Strategy
from tests.lightning.lightning_modules import PLANS, Net, fitted, under


class LooksAtGradients(Net):
    def on_after_backward(self) -> None:
        """Would find none."""


class ClipsItself(Net):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        """Would clip nothing."""


class SkipsTheOptimizer(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()


class GivesNothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class LogsAnExtreme(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch[0]).square().mean()
        self.log("largest", loss, reduce_fx="max")
        return loss


class LogsAMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out: torch.Tensor = self(batch[0])
        self.accuracy.update(out.detach(), batch[1])
        self.log("accuracy", self.accuracy)
        return out


class TakesTheLoader(Net):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        loss: torch.Tensor = self(next(dataloader_iter)[0]).sum()
        return loss


class Peeks(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Would find no gradients."""


@pytest.mark.parametrize(
    ("plan", "build", "settings", "message"),
    [
        ("stage 1", LooksAtGradients, {}, "LooksAtGradients.on_after_backward would find no gradients"),
        ("stage 1", ClipsItself, {}, "clip by gradient_clip_val or the plan"),
        ("stage 1", SkipsTheOptimizer, {}, "call optimizer.step(closure=optimizer_closure)"),
        ("stage 1", TakesTheLoader, {}, "take (batch, batch_idx)"),
        ("pp", GivesNothing, {}, "training_step returned no loss"),
        ("stage 1", LogsAnExtreme, {}, "Log it in on_train_batch_end"),
        ("stage 1", Net, {"sync_batchnorm": True}, "sync_batchnorm"),
        ("one rank", Net, {"callbacks": [Peeks()]}, "Peeks.on_before_optimizer_step"),
        ("one rank", Net, {"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]}, "Plan(average=sw.Average"),
        ("pp", lambda: Net(width=8), {"gradient_clip_val": 0.5, "plan": sw.Plan(clip_grad_norm=1.0)}, "give one"),
    ],
)
def test_what_an_engine_does_not_do(plan: str, build: Any, settings: dict[str, Any], message: str) -> None:
    given = settings.pop("plan", PLANS[plan])

    def run(strategy: Strategy) -> str:
        others = dict(settings)
        with pytest.raises(ShardwiseError) as raised:
            fitted(strategy, build, *others.pop("callbacks", ()), **others)
        return str(raised.value)

    assert all(message in each for each in under(given, run))


def test_a_metric_object_of_a_module_counts_all_batches() -> None:
    def run(strategy: Any) -> float:
        return float(fitted(strategy, LogsAMetric)[0].callback_metrics["accuracy"])

    expected = run("auto")
    for name in ("one rank", "stage 3", "tp"):
        assert under(PLANS[name], run) == [expected] * PLANS[name].mesh.size


def test_a_metric_object_under_stages_is_refused() -> None:
    def run(strategy: Strategy) -> str:
        with pytest.raises(ShardwiseError) as raised:
            fitted(strategy, LogsAMetric)
        return str(raised.value)

    assert all("stage" in each for each in under(PLANS["pp"], run))


@pytest.mark.parametrize("room", ["lightning", "accelerate"])
def test_a_missing_package_is_named_with_the_command(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"shardwise.{room}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, room, None)
    with pytest.raises(ShardwiseError, match=rf'pip install "shardwise\[{room}\]"'):
        import_module(f"shardwise.{room}")
