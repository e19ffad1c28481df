"""Trainable parameters that are not the model's, under an optimizer that is not the engine's: those of one process."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import MismatchError, ModelError, OptimizerError
from tests.costs import calls_in
from tests.engine.loops import begun, plan_of, rows, sgd, share
from tests.oracle.program import seeded

Way = Callable[[Any, nn.Module], Any]
BATCHES = [rows(2 + step) for step in range(3)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 8)
        self.aside: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc2(self.fc1(x).relu())
        for each in self.aside:
            x = x + each(x)
        return x


class Head(nn.Module):
    """A linear map, learned weights, and a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.unused = nn.Linear(8, 8), nn.Parameter(torch.ones(2))

    def forward(self, output: torch.Tensor, batch: Any = None) -> torch.Tensor:
        mapped: torch.Tensor = self.map(output)
        return mapped if batch is None else mapped.square().mean()


def by_output(model: Any, head: nn.Module) -> Any:
    return lambda output, batch: head(output).square().mean()


def as_module(model: Any, head: nn.Module) -> Any:
    return head


def by_microbatch(model: Any, head: nn.Module) -> Any:
    return lambda batch: head(model(batch["x"])).square().mean()


def reported(model: Any, head: nn.Module) -> Any:
    return lambda output, batch: {"loss": head(output).square().mean(), "size": output.detach().abs().mean()}


def unregistered(model: Any, head: nn.Module) -> Any:
    model.aside.append(head)
    return lambda output, batch: output.square().mean()


STRESS = pytest.mark.stress
WAYS: list[Way] = [by_output, as_module, by_microbatch, reported, unregistered]
RULES = {"fc1": "column", "fc2": "row"}
STAGES = {"fc1": 0, "fc2": 1}
PLANS = {
    "alone": sw.Plan(),
    "alone, k=2": plan_of(k=2),
    "dp": plan_of("dp_shard=2"),
    "replicas": plan_of("dp_replicate=2,dp_shard=2", 2),
    "stage 3, k=2": plan_of("dp_shard=2", 3, 2, sharding={"units": ("fc1",)}),
    "scaled": plan_of("dp_shard=2", precision=sw.Precision(loss_scale=1024.0)),
    "tp": plan_of("tp=2", rules=RULES),
    "tp, dp, k=2": plan_of("tp=2,dp_shard=2", k=2, rules=RULES),
}


def own_optimizer(head: nn.Module) -> torch.optim.Optimizer:
    # With momentum and decay: a gradient of zeros where one process has none would show.
    return torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def engine_of(channel: sw.Channel, plan: sw.Plan, way: Way) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model, head = seeded(Net)(), seeded(Head)()
    engine = sw.parallelize(model, plan, optimizer=sgd, loss=way(model, head), channel=channel)
    return engine, head, own_optimizer(head)


def values(head: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in head.parameters()]


def in_one_process(way: Way, thaws_at: int = 0) -> list[torch.Tensor]:
    model, head = seeded(Net)(), seeded(Head)()
    loss, optimizers = way(model, head), (sgd(model.parameters()), own_optimizer(head))
    for at, batch in enumerate(BATCHES):
        head.requires_grad_(at >= thaws_at)
        found = loss(batch) if way is by_microbatch else loss(model(batch["x"]), batch)
        (found["loss"] if isinstance(found, dict) else found).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return values(head)


CASES = [(way, name, (at + each) % 2 * 2) for at, way in enumerate(WAYS) for each, name in enumerate(PLANS)]
TRIED = [each for at, each in enumerate(CASES) if at % 3 == 0 or each[0] is by_output]


@pytest.mark.parametrize(
    ("way", "name", "thaws_at"), [*TRIED, *(pytest.param(*each, marks=STRESS) for each in CASES if each not in TRIED)]
)
def test_they_are_trained_as_in_one_process(way: Way, name: str, thaws_at: int) -> None:
    if thaws_at and way in (by_microbatch, unregistered):
        thaws_at = 1  # behind the model graphs are walked in steps 1, 2, 4

    def run(channel: sw.Channel) -> list[torch.Tensor]:
        engine, head, own = engine_of(channel, PLANS[name], way)
        for at, batch in enumerate(BATCHES):
            head.requires_grad_(at >= thaws_at)
            engine.step(share(engine, batch))
            own.step()
            own.zero_grad()
        return values(head)

    expected = in_one_process(way, thaws_at)
    for found in sw.simulate(PLANS[name].mesh.size, run):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_weights_gradients_before_and_plain_tensors() -> None:
    """Rows weigh, gradients of earlier steps stay, and a tensor need not be a parameter."""

    def loss(scale: torch.Tensor, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output.square().mean() * torch.exp(-scale) + scale).sum()

    def run(channel: sw.Channel) -> torch.Tensor | None:
        scale, still = torch.zeros(1, requires_grad=True), lambda given: torch.optim.SGD(given, lr=0.0)
        plan = plan_of(f"dp_shard={channel.size}")
        engine = begun(channel, Net, plan, optimizer=still, loss=partial(loss, scale))
        for batch in BATCHES:
            engine.step({"x": batch["x"].split([6, 2])[channel.rank] if channel.size == 2 else batch["x"]})
        return scale.grad

    [expected] = sw.simulate(1, run)
    for found in sw.simulate(2, run):
        torch.testing.assert_close(found, expected)


def test_tensors_of_a_rank_alone_stay_its_own() -> None:
    """A gradient for an input, kept on the loss, is no parameter; nothing holds the batches of earlier steps."""

    def run(channel: sw.Channel) -> torch.Tensor:
        model, kept, inputs = seeded(Net)(), list[Any](), list[Any]()

        def loss(batch: Any) -> torch.Tensor:
            given = batch["x"].clone().requires_grad_()
            given.grad = torch.full_like(given, 7.0)
            kept[:] = [given]
            inputs.append(weakref.ref(given))
            output = model(given)
            (slope,) = torch.autograd.grad(output.sum(), given, create_graph=True)
            found: torch.Tensor = output.square().mean() + slope.square().mean()
            return found

        engine = begun(channel, lambda: model, plan_of("dp_shard=2"), loss=loss)
        for batch in BATCHES:
            engine.step(share(engine, batch))
        gc.collect()
        assert [each() is None for each in inputs] == [True, True, False]
        found: torch.Tensor = kept[-1].grad
        return found

    first, second = sw.simulate(2, run)
    assert not torch.equal(first, second)
    assert max(float((each - 7).abs().max()) for each in (first, second)) < 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_those_of_another_engine_are_its_own_however_small(stage: int) -> None:
    """At some stages an engine has no hooks on small parameters, and takes their gradients nevertheless."""

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        plan = plan_of("dp_shard=2", stage)
        teacher = begun(recorded, Net, plan)
        engine = begun(recorded, Net, plan, loss=lambda output, batch: (output - teacher.model(batch["x"])).sum())
        for batch in BATCHES:
            engine.step(share(engine, batch))
            teacher.step(share(teacher, batch))
        assert not [call for call in recorded.calls if "parameters of the loss" in call.purpose]

    sw.simulate(2, run)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reads", [True, False])
def test_where_gradients_are_in_parts_they_refuse_to_be_read(way: Way, reads: bool) -> None:
    """A loss network that nobody trains stays as it is, and the model is trained."""

    def run(channel: sw.Channel) -> torch.Tensor:
        engine, _, own = engine_of(channel, plan_of(f"pp={channel.size}", stages=STAGES), way)
        for batch in BATCHES:
            engine.step(batch)
            if reads and channel.size == 2:
                with pytest.raises(OptimizerError, match="one module"):  # on each rank
                    own.step()
                own.zero_grad()
        with engine.whole():
            found: torch.Tensor = engine.model.fc1.weight.detach().clone()
            return found

    [expected] = sw.simulate(1, run)
    for found in sw.simulate(2, run):
        torch.testing.assert_close(found, expected)


def weighted(model: Any, head: Any) -> Any:
    """Operations on parameters themselves, which stages meet before the loss is there."""
    return lambda output, batch: output.square().mean() * torch.exp(-head.unused.sum())


def other_values(head: Any, own: Any, rank: int) -> None:
    nn.init.constant_(head.map.weight, rank)


def step_in_backward(head: Any, own: Any, rank: int) -> None:
    def step(_: torch.Tensor) -> None:
        own.step()
        own.zero_grad()

    for each in head.parameters():
        each.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize(
    ("way", "plan", "change", "words"),
    [
        (weighted, plan_of("pp=2", stages=STAGES), None, "not the model's, put model and loss into one module"),
        (by_output, plan_of("dp_shard=2"), other_values, "same seed on every rank"),
        (as_module, plan_of("dp_shard=2"), step_in_backward, r"step their optimizer after engine\.step"),
    ],
    ids=["learned weights", "other values", "a step in backward"],
)
def test_what_cannot_be_summed_is_refused_with_a_way_out(way: Way, plan: sw.Plan, change: Any, words: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine, head, own = engine_of(channel, plan, way)
        if change is not None:
            change(head, own, channel.rank)
        engine.step(share(engine, BATCHES[0]))

    with pytest.raises((ModelError, MismatchError), match=words):
        sw.simulate(2, run)


def test_most_steps_look_at_a_small_part_of_a_graph() -> None:
    """By calls, of a loss with a long graph behind the model: in steps 1, 2, 4 it is walked, in others a part of it."""

    def loss(model: nn.Module, batch: Any) -> Any:
        output = model(batch["x"]).square().mean()
        for _ in range(2000):
            output = output * 1
        return output

    model = seeded(Net)()
    engine = begun(alone(), lambda: model, loss=partial(loss, model))
    calls = [calls_in(lambda: engine.step(BATCHES[0])) for _ in range(7)]
    assert max(calls[2], *calls[4:]) + 1000 < calls[3] < calls[1] + 1000
