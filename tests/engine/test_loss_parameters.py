"""Trainable parameters that are not the model's, under an optimizer that is not the engine's: those of one process."""

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine import loss_parameters
from shardwise.errors import MismatchError, ModelError, OptimizerError
from tests.engine.oracle import share_of

ROWS = 8
STEPS = 3
Way = Callable[[nn.Module, nn.Module], dict[str, Any]]
Plain = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
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
        torch.manual_seed(1)
        self.map = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, output: torch.Tensor, batch: Plain | None = None) -> torch.Tensor:
        mapped: torch.Tensor = self.map(output)
        return mapped if batch is None else mapped.square().mean()


def by_output(model: nn.Module, head: nn.Module) -> dict[str, Any]:
    return {"loss": lambda output, batch: head(output).square().mean()}


def as_module(model: nn.Module, head: nn.Module) -> dict[str, Any]:
    return {"loss": head}


def by_microbatch(model: nn.Module, head: nn.Module) -> dict[str, Any]:
    return {"loss": lambda batch: head(model(batch["x"])).square().mean()}


def reported(model: nn.Module, head: nn.Module) -> dict[str, Any]:
    return {"loss": lambda output, batch: {"loss": head(output).square().mean(), "size": output.detach().abs().mean()}}


def unregistered(model: Any, head: nn.Module) -> dict[str, Any]:
    model.aside.append(head)
    return {"loss": lambda output, batch: output.square().mean()}


WAYS = [by_output, as_module, by_microbatch, reported, unregistered]

PLANS = {
    "alone": sw.Plan(),
    "alone, k=2": sw.Plan(merge=sw.Merge(microbatches=2)),
    "dp": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=1)),
    "replicas": sw.Plan(mesh=sw.Mesh(dp_replicate=2, dp_shard=2), sharding=sw.Sharding(stage=2)),
    "stage 3, k=2": sw.Plan(
        mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3, units=("fc1",)), merge=sw.Merge(microbatches=2)
    ),
    "scaled": sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(loss_scale=1024.0)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"fc1": "column", "fc2": "row"})),
    "tp, dp, k=2": sw.Plan(
        mesh=sw.Mesh(tp=2, dp_shard=2),
        tensor=sw.Tensor(rules={"fc1": "column", "fc2": "row"}),
        merge=sw.Merge(microbatches=2),
    ),
}


def own_optimizer(head: nn.Module) -> torch.optim.Optimizer:
    # With momentum and decay: a gradient of zeros where one process has none would show.
    return torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def batches() -> list[Plain]:
    generator = torch.Generator().manual_seed(2)
    return [{"x": torch.randn(ROWS, 4, generator=generator)} for _ in range(STEPS)]


def in_one_process(way: Way, *, thaws_at: int) -> list[torch.Tensor]:
    model, head = Net(), Head()
    loss = way(model, head)["loss"]
    optimizer, own = torch.optim.SGD(model.parameters(), lr=0.1), own_optimizer(head)
    for at, batch in enumerate(batches()):
        head.requires_grad_(at >= thaws_at)
        found = loss(batch) if way is by_microbatch else loss(model(batch["x"]), batch)
        (found["loss"] if isinstance(found, dict) else found).backward()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    return [each.detach().clone() for each in head.parameters()]


def on_ranks(plan: sw.Plan, way: Way, *, thaws_at: int, channel: sw.Channel) -> list[torch.Tensor]:
    model, head = Net(), Head()
    engine = sw.parallelize(
        model, plan, optimizer=lambda given: torch.optim.SGD(given, lr=0.1), channel=channel, **way(model, head)
    )
    own = own_optimizer(head)
    for at, batch in enumerate(batches()):
        head.requires_grad_(at >= thaws_at)
        engine.step(share_of(batch, plan.mesh.data_rank(channel.rank), plan.mesh.num_data_ranks))
        own.step()
        own.zero_grad()
    return [each.detach().clone() for each in head.parameters()]


@pytest.mark.parametrize("thaws_at", [0, 2], ids=["from the start", "later"])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_they_are_trained_as_in_one_process(way: Way, name: str, thaws_at: int) -> None:
    if thaws_at and way in (by_microbatch, unregistered):
        thaws_at = 1  # behind the model graphs are walked in steps 1, 2, 4
    expected = in_one_process(way, thaws_at=thaws_at)
    plan = PLANS[name]
    for values in sw.simulate(plan.mesh.size, lambda channel: on_ranks(plan, way, thaws_at=thaws_at, channel=channel)):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)


def test_weights_gradients_before_and_plain_tensors() -> None:
    """Rows weigh, gradients of earlier steps stay, and a tensor need not be a parameter."""

    def loss(scale: torch.Tensor, output: torch.Tensor, batch: Plain) -> torch.Tensor:
        return (output.square().mean() * torch.exp(-scale) + scale).sum()

    def train(channel: sw.Channel) -> torch.Tensor:
        scale = torch.zeros(1, requires_grad=True)
        engine = sw.parallelize(
            Net(),
            sw.Plan(mesh=sw.Mesh(dp_shard=channel.size)),
            optimizer=lambda given: torch.optim.SGD(given, lr=0.0),
            loss=partial(loss, scale),
            channel=channel,
        )
        for batch in batches():
            shares = [{"x": batch["x"][:6]}, {"x": batch["x"][6:]}] if channel.size == 2 else [batch]
            engine.step(shares[channel.rank])
        assert scale.grad is not None
        return scale.grad

    (expected,) = sw.simulate(1, train)
    for found in sw.simulate(2, train):
        torch.testing.assert_close(found, expected)


def test_tensors_of_a_rank_alone_stay_its_own() -> None:
    """A gradient for an input, kept on the loss, is no parameter."""
    kept: dict[int, torch.Tensor] = {}

    def train(channel: sw.Channel) -> None:
        model = Net()

        def loss(batch: Plain) -> torch.Tensor:
            kept[channel.rank] = given = batch["x"].clone().requires_grad_()
            given.grad = torch.full_like(given, 7.0)
            output = model(given)
            (slope,) = torch.autograd.grad(output.sum(), given, create_graph=True)
            found: torch.Tensor = output.square().mean() + slope.square().mean()
            return found

        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=1))
        engine = sw.parallelize(
            model, plan, optimizer=lambda given: torch.optim.SGD(given, lr=0.1), loss=loss, channel=channel
        )
        for batch in batches():
            engine.step(share_of(batch, channel.rank, 2))

    sw.simulate(2, train)
    first, second = (kept[rank].grad for rank in range(2))
    assert first is not None
    assert second is not None
    assert not torch.equal(first, second)
    assert (first - 7).abs().max() < 1 > (second - 7).abs().max()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("reads", [True, False])
def test_where_gradients_are_in_parts_they_refuse_to_be_read(way: Way, reads: bool) -> None:
    """A loss network that nobody trains stays as it is, and the model is trained."""
    plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"fc1": 0, "fc2": 1}))

    def train(channel: sw.Channel) -> torch.Tensor:
        model, head = Net(), Head()
        engine = sw.parallelize(
            model,
            plan if channel.size == 2 else sw.Plan(),
            optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
            channel=channel,
            **way(model, head),
        )
        own = own_optimizer(head)
        for batch in batches():
            engine.step(batch)
            if reads:
                with pytest.raises(OptimizerError, match="one module"):  # on each rank
                    own.step()
                own.zero_grad()
        with engine.whole():
            return model.fc1.weight.detach().clone()

    if reads:
        sw.simulate(2, train)
        return
    (expected,) = sw.simulate(1, train)
    for found in sw.simulate(2, train):
        torch.testing.assert_close(found, expected)


def test_a_pipeline_says_the_way_out_for_learned_weights() -> None:
    """Operations on parameters themselves, which stages meet before the loss is there."""
    plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"fc1": 0, "fc2": 1}))

    def weighted(model: nn.Module, head: Any) -> dict[str, Any]:
        return {"loss": lambda output, batch: output.square().mean() * torch.exp(-head.unused.sum())}

    with pytest.raises(ModelError, match=r"not the model's, put model and loss into one module"):
        sw.simulate(2, lambda channel: on_ranks(plan, weighted, thaws_at=0, channel=channel))


def test_ranks_with_other_values_are_refused() -> None:
    def train(channel: sw.Channel) -> None:
        head = nn.Linear(8, 3)  # from another seed on each rank
        with torch.no_grad():
            head.weight.fill_(channel.rank)
        engine = sw.parallelize(
            Net(),
            sw.Plan(mesh=sw.Mesh(dp_shard=2)),
            optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
            loss=lambda output, _: head(output).square().mean(),
            channel=channel,
        )
        with pytest.raises(MismatchError, match="same seed on every rank"):
            engine.step(share_of(batches()[0], channel.rank, 2))

    sw.simulate(2, train)


def test_an_optimizer_that_steps_in_backward_is_told_to_step_behind_it() -> None:
    def train(channel: sw.Channel) -> None:
        model, head = Net(), Head()
        own = own_optimizer(head)

        def step(_: torch.Tensor) -> None:
            own.step()
            own.zero_grad()

        for each in head.parameters():
            each.register_post_accumulate_grad_hook(step)
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(
            model,
            plan,
            optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
            channel=channel,
            **as_module(model, head),
        )
        with pytest.raises(MismatchError, match=r"step their optimizer after engine\.step"):
            engine.step(share_of(batches()[0], channel.rank, 2))

    sw.simulate(2, train)


def test_inputs_of_a_gradient_penalty_are_left_alone() -> None:
    """They are leaves too; nothing holds the batches of earlier steps."""
    seen = []

    def loss(model: nn.Module, batch: Plain) -> torch.Tensor:
        given = batch["x"]
        output: torch.Tensor = model(given)
        (slope,) = torch.autograd.grad(output.sum(), given, create_graph=True)
        return output.square().mean() + slope.square().mean()

    model = Net()
    engine = sw.parallelize(
        model, sw.Plan(), optimizer=lambda given: torch.optim.SGD(given, lr=0.1), loss=partial(loss, model)
    )
    for batch in batches():
        batch["x"].requires_grad_().grad = torch.ones_like(batch["x"])
        engine.step(batch)
        assert batch["x"].grad is not None
        assert not torch.equal(batch["x"].grad, torch.ones_like(batch["x"]))
        seen.append(weakref.ref(batch["x"]))
    del batch
    gc.collect()
    assert [each() for each in seen] == [None] * STEPS


class Node:
    """A node of a graph that counts looks."""

    looks = 0

    def __init__(self, behind: "Node | None") -> None:
        self._behind = behind

    @property
    def next_functions(self) -> list[tuple["Node | None", int]]:
        Node.looks += 1
        return [(self._behind, 0)]


def test_most_steps_look_at_a_small_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    node = None
    for _ in range(3000):
        node = Node(node)
    loss_parameters._leaves(node, (), 100)
    assert Node.looks == 100

    walked = []

    def leaves(root: Any, stops: Any, most: float) -> list[torch.Tensor]:
        walked.append(most)
        return found(root, stops, most)

    found = loss_parameters._leaves
    monkeypatch.setattr(loss_parameters, "_leaves", leaves)
    model, head = Net(), Head()
    engine = sw.parallelize(
        model, sw.Plan(), optimizer=lambda given: torch.optim.SGD(given, lr=0.1), **by_microbatch(model, head)
    )
    for _ in range(7):
        engine.step(batches()[0])
    assert walked == [math.inf, math.inf, 100, math.inf, 100, 100, 100]


class WithLoss(nn.Module):
    """The way out."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = Net(), Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.net(x)).square().mean()
        return loss


@pytest.mark.parametrize(
    "plan",
    [
        sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"net.fc1": 0, "net.fc2": 1, "head": 1})),
        sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"net.fc1": "column", "net.fc2": "row"})),
        sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    ],
    ids=["pp", "tp", "stage 3"],
)
def test_the_way_out_trains_them(plan: sw.Plan) -> None:
    expected = in_one_process(by_output, thaws_at=0)

    def train(channel: sw.Channel) -> list[torch.Tensor]:
        model = WithLoss()

        def optimizers(_: Any) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(model.net.parameters(), lr=0.1), own_optimizer(model.head)]

        engine = sw.parallelize(model, plan, optimizer=optimizers, channel=channel)
        for batch in batches():
            engine.step(share_of(batch, plan.mesh.data_rank(channel.rank), plan.mesh.num_data_ranks))
        with engine.whole():
            return [each.detach().clone() for each in model.head.parameters()]

    for values in sw.simulate(2, train):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-6)
