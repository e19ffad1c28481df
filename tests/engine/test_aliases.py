"""Attributes of modules in the memory of parameters: they show what they show in a plain loop, or refuse reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import ModelError, PeerError
from tests.engine.refusals import same_error_everywhere

STEPS = 3


class Net(nn.Module):
    def __init__(self, keep: Callable[["Net"], Callable[[], torch.Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.seen = keep(self)
        self.reads = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(x))
        return output + self.seen().sum() if self.reads else output


def whole(net: Any) -> Callable[[], torch.Tensor]:
    net.kept = net.first.weight.data
    return lambda: net.kept


def part(net: Any) -> Callable[[], torch.Tensor]:
    net.kept = net.last.weight.detach()[1, 1:3]
    return lambda: net.kept


def turned(net: Any) -> Callable[[], torch.Tensor]:
    net.kept = {"a": [net.first.weight.data.t()[:, 2]]}
    return lambda: net.kept["a"][0]


def in_closure(net: Any) -> Callable[[], torch.Tensor]:
    kept = net.first.bias.data
    return lambda: kept


def array(net: Any) -> Callable[[], torch.Tensor]:
    net.kept = net.first.weight.detach().numpy()[1:]
    return lambda: torch.from_numpy(net.kept)


def bits(net: Any) -> Callable[[], torch.Tensor]:
    net.kept = net.first.weight.data.view(torch.int32)
    return lambda: net.kept.view(torch.float32)


def graph(net: Any) -> Callable[[], torch.Tensor]:
    net.kept = (net.first.weight[1],)
    return lambda: net.kept[0]


GO_ALONG = [whole, part, turned, in_closure]

ONE = sw.Plan()
PLANS = {
    "alone": ONE,
    "stage 2": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=2)),
    "replicas": sw.Plan(mesh=sw.Mesh(dp_replicate=2)),
}
WITH_PARTS = {
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"first": "colwise_gather_output"})),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"first": 0, "last": 1})),
}


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def in_a_plain_loop(keep: Any) -> list[float]:
    net, losses = Net(keep), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = net(rows(step)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def put(keep: Any, plan: sw.Plan, channel: sw.Channel) -> sw.Engine:
    return sw.parallelize(
        Net(keep),
        plan,
        optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
        channel=channel,
    )


def step_of(engine: sw.Engine, step: int, channel: sw.Channel) -> float:
    data_ranks = engine.plan.mesh.num_data_ranks
    return engine.step({"x": rows(step).chunk(data_ranks)[engine.plan.mesh.data_rank(channel.rank)]}).loss


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("keep", GO_ALONG, ids=lambda keep: keep.__name__)
def test_they_go_along(keep: Any, name: str) -> None:
    """Also to another plan, and when a parameter is unfrozen between steps."""
    expected = in_a_plain_loop(keep)
    plan = PLANS[name]

    def train(channel: sw.Channel) -> list[float]:
        engine = put(keep, plan, channel)
        losses = [step_of(engine, 0, channel)]
        engine = sw.relayout(engine, sw.Plan(mesh=plan.mesh, sharding=sw.Sharding(stage=1)))
        return [*losses, *(step_of(engine, step, channel) for step in range(1, STEPS))]

    for losses in sw.simulate(plan.mesh.size, train):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_they_go_along_when_the_parameter_is_unfrozen() -> None:
    net = Net(whole)
    net.first.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = sw.parallelize(net, ONE, optimizer=optimizer, loss=lambda output, batch: output.square().mean())
    engine.step({"x": rows(0)})
    net.first.requires_grad_(True)
    engine.step({"x": rows(1)})
    assert torch.equal(net.seen(), net.first.weight)


def refused_on_all(size: int, run: Callable[[sw.Channel], object]) -> str:
    """What every rank says; a rank that met it later, what stopped the other."""
    said: list[str] = []

    def caught(channel: sw.Channel) -> None:
        with pytest.raises((ModelError, PeerError)) as error:
            run(channel)
        said.append(str(error.value))

    sw.simulate(size, caught)
    assert len(said) == size
    (found,) = {text[text.index("(of ") :] for text in said}
    return found


READ = [
    *((bits, name, plan) for name, plan in PLANS.items()),
    *((keep, name, plan) for keep in (whole, turned, in_closure, bits, graph) for name, plan in WITH_PARTS.items()),
]


@pytest.mark.parametrize(
    ("keep", "name", "plan"), READ, ids=lambda each: getattr(each, "__name__", each if isinstance(each, str) else "")
)
def test_others_are_refused_by_name_where_they_are_read(keep: Any, name: str, plan: sw.Plan) -> None:
    """On all ranks; a program that reads none goes on."""

    def train(channel: sw.Channel) -> None:
        engine = put(keep, plan, channel)
        net: Any = engine.model
        net.reads = False
        step_of(engine, 0, channel)
        net.reads = True
        step_of(engine, 1, channel)

    said = refused_on_all(plan.mesh.size, train)
    assert "(of first.weight)" in said or "(of first.bias)" in said
    assert "in forward" in said


@pytest.mark.parametrize("name", PLANS | WITH_PARTS)
def test_arrays_are_refused_at_once(name: str) -> None:
    plan = (PLANS | WITH_PARTS)[name]
    error = same_error_everywhere(plan.mesh.size, lambda channel: put(array, plan, channel))
    assert type(error) is ModelError
    assert "(of first.weight)" in str(error)


@pytest.mark.parametrize("name", WITH_PARTS)
@pytest.mark.parametrize("keep", [whole, turned, in_closure], ids=lambda keep: keep.__name__)
def test_of_a_frozen_parameter_they_keep_its_values_until_it_is_unfrozen(keep: Any, name: str) -> None:
    plan = WITH_PARTS[name]

    def train(channel: sw.Channel) -> None:
        net: Any = Net(keep)
        net.first.requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = sw.parallelize(
            net, plan, optimizer=optimizer, loss=lambda output, batch: output.square().mean(), channel=channel
        )
        before = net.seen().clone()
        step_of(engine, 0, channel)
        assert torch.equal(net.seen(), before)
        net.first.requires_grad_(True)
        step_of(engine, 1, channel)

    assert "`self.weight`" in refused_on_all(2, train)


@pytest.mark.parametrize("name", WITH_PARTS)
def test_after_a_relayout_to_a_plan_with_parts_reads_are_refused(name: str) -> None:
    plan = WITH_PARTS[name]

    def train(channel: sw.Channel) -> None:
        engine = put(whole, sw.Plan(mesh=sw.Mesh(dp_shard=2)), channel)
        step_of(engine, 0, channel)
        step_of(sw.relayout(engine, plan), 1, channel)

    assert "`self.weight`" in refused_on_all(2, train)


def test_a_view_of_several_parameters_goes_along_with_none() -> None:
    def keep(net: Any) -> Callable[[], torch.Tensor]:
        memory = torch.zeros(20)
        net.first.weight.data, net.first.bias.data = memory[:16].view(4, 4), memory[16:]
        net.kept = memory
        return lambda: net.kept

    assert "`self.weight`" in refused_on_all(1, lambda channel: step_of(put(keep, ONE, channel), 0, channel))


@pytest.mark.parametrize("name", [*PLANS, *WITH_PARTS])
def test_what_is_frozen_or_set_before_each_forward_stays(name: str) -> None:
    plan = (PLANS | WITH_PARTS)[name]

    def build(channel: sw.Channel) -> None:
        net = Net(whole)
        net.first.requires_grad_(False)
        if name != "pp":
            nn.utils.spectral_norm(net.last)  # keeps `weight_orig.data` as `weight` until the first forward
        engine = sw.parallelize(
            net,
            plan,
            optimizer=lambda given: torch.optim.SGD([each for each in given if each.requires_grad], lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
        )
        step_of(engine, 0, channel)

    sw.simulate(plan.mesh.size, build)


def test_tensors_of_other_kinds_are_left_alone() -> None:
    def keep(net: Any) -> Callable[[], torch.Tensor]:
        net.kept = {
            "sparse": torch.eye(2).to_sparse(),
            "meta": torch.empty(2, device="meta"),
            "empty": torch.empty(0),
            "texts": np.array(["a"]),
        }
        return lambda: torch.zeros(())

    assert step_of(put(keep, ONE, alone()), 0, alone()) > 0
