"""What a Trainer or a module asks for that an engine does not do is refused in words, by all ranks."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.lightning import Strategy
from tests.contracts.adapter_cases import refused_on_all
from tests.lightning.lightning_modules import (
    PLANS,
    ByHand,
    Gan,
    Net,
    TwoOptimizers,
    assert_near,
    fitted,
    under,
    weights,
)
from tests.refusals import Refusals


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


def fit(plan: str | sw.Plan, build: Callable[[], Any] = Net, *callbacks: Any, **settings: Any) -> Callable[[], None]:
    """A training that is refused on all ranks, in the same words."""
    made = PLANS[plan] if isinstance(plan, str) else plan

    def on(channel: sw.Channel) -> None:
        fitted(Strategy(made, channel=channel), build, *callbacks, **settings)

    return partial(refused_on_all, made, on)


CLIPPED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "clipped": ("stage 3", {"clip_grad_norm": {"0": 0.05, "1": 0.1}}, {"clip_grad_norm": 0.05}),
    "clipped_by_value": ("pp", {"clip_grad_value": 0.01}, {"clip_grad_value": 0.02}),
    "one_clipped": ("stage 3", None, {"clip_grad_value": 0.01}),
}
"""Forms of two optimizers that clip, with a plan, what of it does the same, and what does not."""

REFUSED = Refusals(
    "lightning.trainer_settings",
    {
        "looks at gradients": fit("stage 1", LooksAtGradients),
        "clips itself": fit("stage 1", ClipsItself),
        "skips the optimizer": fit("stage 1", SkipsTheOptimizer),
        "takes the loader": fit("stage 1", TakesTheLoader),
        "gives no loss": fit("pp", GivesNothing),
        "logs an extreme": fit("stage 1", LogsAnExtreme),
        "a metric object under stages": fit("pp", LogsAMetric),
        "sync_batchnorm": fit("stage 1", sync_batchnorm=True),
        "a callback that looks at gradients": fit("one rank", Net, Peeks()),
        "another library's averages": fit("one rank", Net, pl.callbacks.StochasticWeightAveraging(0.1)),
        "two clips": fit(replace(PLANS["pp"], clip_grad_norm=1.0), gradient_clip_val=0.5),
        "chunks of stages by hand": fit(
            sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="interleaved")), ByHand
        ),
        "batches that accumulate by hand": fit("stage 1", lambda: ByHand(steps=False)),
        "a clip that the plan has not": fit("stage 1", lambda: ByHand(clip=0.5)),
        "an old graph": fit("stage 1", lambda: Gan("old_graph")),
        **{
            f"{style} under {plan}": fit(plan, lambda style=style: TwoOptimizers(style))  # type: ignore[misc]
            for plan, styles in {
                "one rank": ("in_turns", "twice", "dropped_of_one"),
                "stage 3": ("one_steps", "toggled_between", "rate_between"),
                "pp": ("one_steps", "in_turns", "toggled_between", "rate_between"),
            }.items()
            for style in styles
        },
        **{
            form: fit(replace(PLANS[plan], **other), lambda form=form: TwoOptimizers(form))  # type: ignore[misc]
            for form, (plan, _, other) in CLIPPED.items()
        },
    },
)


@pytest.mark.filterwarnings("ignore:Detected call of")  # a scheduler steps, and its optimizer does not
@pytest.mark.parametrize("case", REFUSED)
def test_what_an_engine_does_not_do(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("form", ["clipped", "clipped_by_value"])
def test_gradients_of_an_update_of_all_are_clipped_as_those_of_each_optimizer(form: str) -> None:
    name, same, _ = CLIPPED[form]
    expected = weights(fitted("auto", lambda: TwoOptimizers(form))[0])
    plain = weights(fitted("auto", lambda: TwoOptimizers("ordinary"))[0])
    assert not torch.allclose(expected["head.weight"], plain["head.weight"], rtol=1e-3)
    plan = replace(PLANS[name], **same)
    for state in under(plan, lambda strategy: weights(fitted(strategy, lambda: TwoOptimizers(form))[0])):
        assert_near(expected, state)


def test_a_metric_object_of_a_module_counts_all_batches() -> None:
    def run(strategy: Any) -> float:
        return float(fitted(strategy, LogsAMetric)[0].callback_metrics["accuracy"])

    expected = run("auto")
    for name in ("stage 3", "tp"):
        assert under(PLANS[name], run) == [expected] * PLANS[name].mesh.size


@pytest.mark.parametrize("room", ["lightning", "accelerate"])
def test_a_missing_package_is_named_with_the_command(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"shardwise.{room}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, room, None)
    with pytest.raises(ShardwiseError, match=rf'pip install "shardwise\[{room}\]"'):
        import_module(f"shardwise.{room}")
