"""Attributes of modules in the memory of parameters: they show what they show in a plain loop, or refuse reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.loops import begun, in_one_process, mean_square, on_ranks, plan_of, rows, sgd, share
from tests.engine.refusals import same_error_everywhere
from tests.oracle.program import seeded
from tests.refusals import Refusals

BATCHES = [rows(step, count=4) for step in range(3)]


def of_several(net: Any) -> torch.Tensor:
    memory = torch.zeros(20)
    net.first.weight.data, net.first.bias.data = memory[:16].view(4, 4), memory[16:]
    return memory


KEPT: dict[str, Callable[[Any], Any]] = {
    "whole": lambda net: net.first.weight.data,
    "part": lambda net: net.last.weight.detach()[1, 1:3],
    "turned": lambda net: {"a": [net.first.weight.data.t()[:, 2]]},
    "in a closure": lambda net: net.first.bias.data,
    "array": lambda net: net.first.weight.detach().numpy()[1:],
    "bits": lambda net: net.first.weight.data.view(torch.int32),
    "graph": lambda net: (net.first.weight[1],),
    "of several": of_several,
    "of other kinds": lambda _: [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), np.array("a")],
}


class Net(nn.Module):
    """Keeps something of its parameters, and adds it to what it gives."""

    def __init__(self, kind: str, is_frozen: bool = False, is_normed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.first.requires_grad_(not is_frozen)
        if is_normed:
            nn.utils.spectral_norm(self.last)  # keeps `weight_orig.data` as `weight` until the first forward
        kept = KEPT[kind](self)
        self.kept, self.reads = None if kind == "in a closure" else kept, True
        self.seen: Callable[[], Any] = (lambda: kept) if kind == "in a closure" else (lambda: self.kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(x))
        for each in tree_leaves(self.seen()) if self.reads else ():
            if isinstance(each, torch.Tensor) and each.layout == torch.strided and not each.is_meta:
                output = output + (each.view(torch.float32) if each.dtype == torch.int32 else each).sum()
        return output


PLANS = {"alone": sw.Plan(), "stage 2": plan_of("dp_shard=2", 2), "replicas": plan_of("dp_replicate=2")}
WITH_PARTS = {
    "stage 3": plan_of("dp_shard=2", 3),
    "tp": plan_of("tp=2", rules={"first": "colwise_gather_output"}),
    "pp": plan_of("pp=2", stages={"first": 0, "last": 1}),
}
ALL = PLANS | WITH_PARTS


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("whole", "alone"), ("part", "stage 2"), ("turned", "replicas")),
        *(("in a closure", "stage 2"), ("of other kinds", "replicas")),
    ],
)
def test_they_go_along(kind: str, name: str) -> None:
    """Also to another plan."""

    def run(channel: sw.Channel) -> list[float]:
        engine, losses = begun(channel, lambda: Net(kind), PLANS[name]), []
        for step, batch in enumerate(BATCHES):
            if step == 1:
                engine = sw.relayout(engine, sw.Plan(mesh=PLANS[name].mesh))
            losses.append(engine.step(share(engine, batch)).loss)
        return losses

    expected = in_one_process(lambda: Net(kind), BATCHES).losses
    for losses in sw.simulate(PLANS[name].mesh.size, run):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_they_go_along_when_the_parameter_is_unfrozen() -> None:
    net: Any = seeded(lambda: Net("whole", is_frozen=True))()
    engine = sw.parallelize(net, sw.Plan(), optimizer=sgd(net.parameters()), loss=mean_square)
    for on in (False, True):
        net.first.requires_grad_(on)
        engine.step(BATCHES[0])
    assert torch.equal(net.seen(), net.first.weight)


def read(kind: str, name: str) -> None:
    """A program that reads none goes on until it does."""

    def run(channel: sw.Channel) -> None:
        engine = begun(channel, lambda: Net(kind), ALL[name])
        for reads in (False, True):
            engine.model.reads = reads
            engine.step(share(engine, BATCHES[0]))

    sw.simulate(ALL[name].mesh.size, run)


def unfrozen(kind: str, name: str) -> None:
    """Of a frozen parameter they keep its values until then."""

    def run(channel: sw.Channel) -> None:
        net: Any = seeded(lambda: Net(kind, is_frozen=True))()
        optimizer = sgd(net.parameters())
        engine = sw.parallelize(net, ALL[name], optimizer=optimizer, loss=mean_square, channel=channel)
        before = [each.clone() for each in tree_leaves(net.seen())]
        engine.step(share(engine, BATCHES[0]))
        assert all(map(torch.equal, tree_leaves(net.seen()), before))
        net.first.requires_grad_(True)
        engine.step(share(engine, BATCHES[1]))

    sw.simulate(2, run)


def laid_out(name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = begun(channel, lambda: Net("whole"), plan_of("dp_shard=2"))
        engine.step(share(engine, BATCHES[0]))
        engine = sw.relayout(engine, ALL[name])
        engine.step(share(engine, BATCHES[1]))

    sw.simulate(2, run)


def with_array(name: str) -> None:
    raise same_error_everywhere(ALL[name].mesh.size, lambda channel: begun(channel, lambda: Net("array"), ALL[name]))


REFUSED = Refusals(
    "engine.kept_objects",
    {
        **{
            f"{kind} is read, {name}": lambda kind=kind, name=name: read(kind, name)
            for kind, name in [
                *(("bits", "alone"), ("bits", "replicas"), ("of several", "alone"), ("graph", "stage 3")),
                *(("whole", "stage 3"), ("turned", "tp"), ("in a closure", "tp"), ("in a closure", "pp")),
            ]
        },
        **{
            f"{kind} of a frozen parameter, {name}": lambda kind=kind, name=name: unfrozen(kind, name)
            for kind, name in (("whole", "tp"), ("turned", "stage 3"), ("in a closure", "pp"))
        },
        **{f"after a relayout, {name}": lambda name=name: laid_out(name) for name in WITH_PARTS},
        **{f"an array, {name}": lambda name=name: with_array(name) for name in ("alone", "stage 3", "tp")},
    },
    kind=ModelError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_others_are_refused_by_name_where_they_are_read(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("name", WITH_PARTS)
def test_what_is_frozen_or_set_before_each_forward_stays(name: str) -> None:
    on_ranks(
        lambda: Net("whole", is_frozen=True, is_normed=name != "pp"),
        ALL[name],
        BATCHES[:1],
        optimizer=lambda given: sgd([each for each in given if each.requires_grad]),
    )
