"""Manual optimisation under plans, and what of it is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import PlanError, ShardwiseError
from shardwise.lightning import Strategy
from tests.lightning.lightning_modules import PLANS, Gan, Net, TwoOptimizers, assert_near, fitted, under, weights


@pytest.mark.parametrize(
    ("plan", "style"),
    [
        ("one rank", "toggled"),
        ("one rank", "in_closures"),
        ("stage 0", "in_closures"),
        ("stage 2, k = 2", "toggled"),
        ("stage 3", "toggled"),
        ("stage 3", "in_closures"),
        ("pp", "toggled"),
        ("pp", "in_closures"),
        ("tp", "toggled"),
        ("one rank", "dropped"),
        ("stage 3", "dropped"),
        ("pp", "dropped"),
    ],
)
def test_two_optimizers_in_turns_are_those_of_the_plain_trainer(plan: str, style: str) -> None:
    def run(strategy: Any) -> Any:
        trainer, seen = fitted(strategy, lambda: Gan(style))
        logged = {name: float(trainer.callback_metrics[name]) for name in ("critic", "generator")}
        return weights(trainer), logged, seen.rates, trainer.global_step

    state, logged, rates, steps = run("auto")
    for found, here, *counts in under(PLANS[plan], run):
        assert_near(state, found)
        if PLANS[plan].mesh.num_data_ranks == 1:  # a plain loss of other rows is another one
            assert_near(logged, here)
        assert counts == [rates, steps]
        assert plan != "one rank" or all(torch.equal(found[name], each) for name, each in state.items())


FORMS = ("ordinary", "schedulers_between", "two_losses", "then_toggled", "later_toggled", "some_batches")
BY_HAND = [name for name in PLANS if name != "interleaved"]


@pytest.mark.filterwarnings("ignore:Detected call of")  # a scheduler steps before its optimizer has
@pytest.mark.parametrize("plan", BY_HAND)
@pytest.mark.parametrize("form", FORMS)
def test_one_backward_for_two_optimizers_is_that_of_the_plain_trainer(plan: str, form: str) -> None:
    def run(strategy: Any) -> Any:
        trainer, seen = fitted(strategy, lambda: TwoOptimizers(form))
        logged = {name: float(each) for name, each in trainer.callback_metrics.items() if not name.startswith("val")}
        return weights(trainer), logged, seen.rates, trainer.global_step

    state, logged, rates, steps = run("auto")
    for found, here, *counts in under(PLANS[plan], run):
        assert_near(state, found)
        assert here.keys() == logged.keys()
        if PLANS[plan].mesh.num_data_ranks == 1:  # a plain loss of other rows is another one
            assert_near(logged, here)
        assert counts == [rates, steps]
        assert plan != "one rank" or all(torch.equal(found[name], each) for name, each in state.items())


@pytest.mark.parametrize(
    ("form", "right", "other"),
    [
        ("clipped", {"clip_grad_norm": {"0": 0.05, "1": 0.1}}, {"clip_grad_norm": 0.05}),
        ("clipped_by_value", {"clip_grad_value": 0.01}, {"clip_grad_value": 0.02}),
        ("one_clipped", None, {"clip_grad_value": 0.01}),
    ],
)
@pytest.mark.parametrize("name", ["one rank", "stage 3", "pp"])
def test_gradients_of_an_update_of_all_are_clipped_as_those_of_each_optimizer(
    form: str, right: Any, other: Any, name: str
) -> None:
    def refused(strategy: Strategy) -> str:
        with pytest.raises(ShardwiseError) as raised:
            fitted(strategy, lambda: TwoOptimizers(form))
        return str(raised.value)

    words = "some optimizers were clipped" if right is None else "would clip nothing"
    assert all(words in each for each in under(replace(PLANS[name], **other), refused))
    if right is not None:
        expected = weights(fitted("auto", lambda: TwoOptimizers(form))[0])
        plain = weights(fitted("auto", lambda: TwoOptimizers("ordinary"))[0])
        assert not torch.allclose(expected["head.weight"], plain["head.weight"], rtol=1e-3)
        plan = replace(PLANS[name], **right)
        for state in under(plan, lambda strategy: weights(fitted(strategy, lambda: TwoOptimizers(form))[0])):
            assert_near(expected, state)


class ByHand(Net):
    """One optimizer by hand, which needs no toggle."""

    def __init__(self, *, steps: bool = True, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.does_step, self.clip = steps, clip

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clip:
            self.clip_gradients(optimizer, self.clip)
        if self.does_step or batch_idx % 2:
            optimizer.step()


def test_one_optimizer_needs_no_toggle() -> None:
    expected = weights(fitted("auto", ByHand)[0])
    for name in ("stage 3", "pp"):
        for state in under(PLANS[name], lambda strategy: weights(fitted(strategy, ByHand)[0])):
            assert_near(expected, state)


def test_interleaved_stages_are_for_automatic_optimisation() -> None:
    plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(schedule="interleaved"))

    def run(strategy: Strategy) -> str:
        with pytest.raises(PlanError) as raised:
            fitted(strategy, ByHand)
        return str(raised.value)

    assert all("pipeline.schedule" in each for each in under(plan, run))


@pytest.mark.filterwarnings("ignore:Detected call of")  # a scheduler steps, and its optimizer does not
@pytest.mark.parametrize(
    ("build", "plan", "message"),
    [
        (lambda: Gan("untoggled"), "one rank", "self.toggle_optimizer(opt), the forward"),
        (lambda: Gan("untoggled"), "stage 3", "self.toggle_optimizer(opt), the forward"),
        (lambda: Gan("untoggled"), "pp", "self.toggle_optimizer(opt), the forward"),
        (lambda: Gan("old_graph"), "stage 1", "a forward that ran before its optimizer was known"),
        (lambda: Gan("never_stepped"), "stage 1", "without the opt.step()"),
        *(
            (lambda style=style: TwoOptimizers(style), plan, f"{words}.*self.toggle_optimizer(opt), the forward")
            for plan in ("one rank", "stage 3", "pp")
            for style, words in {
                "one_steps": "training_step ended, and 1 optimizers have not stepped",
                "in_turns": "",
                "toggled_between": "another section began, and 1 optimizers have not stepped",
                "rate_between": "settings of an optimizer changed",
                "dropped_of_one": "zero_grad() of some optimizers",
                "twice": "",
            }.items()
        ),
        (lambda: ByHand(steps=False), "stage 1", "Plan(merge=sw.Merge(microbatches=...))"),
        (lambda: ByHand(clip=0.5), "stage 1", "Plan(clip_grad_norm=0.5)"),
    ],
)
def test_what_would_train_nothing_is_refused(build: Any, plan: str, message: str) -> None:
    def run(strategy: Strategy) -> str:
        with pytest.raises(ShardwiseError) as raised:
            fitted(strategy, build)
        return str(raised.value)

    for words in under(PLANS[plan], run):
        assert all(each in words for each in message.split(".*"))
