"""Attributes of modules in the memory of parameters: they show what they show in a plain loop, or refuse reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, PeerError
from tests.engine.loops import begun, in_one_process, mean_square, on_ranks, plan_of, rows, sgd, share
from tests.engine.refusals import same_error_everywhere
from tests.oracle.one_process import Trained
from tests.oracle.program import seeded

Keep = Callable[[Any], Callable[[], torch.Tensor]]
BATCHES = [rows(step, count=4) for step in range(3)]


class Net(nn.Module):
    def __init__(self, keep: Keep, is_frozen: bool = False, is_normed: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.first.requires_grad_(not is_frozen)
        if is_normed:
            nn.utils.spectral_norm(self.last)  # keeps `weight_orig.data` as `weight` until the first forward
        self.seen, self.reads = keep(self), True

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


def of_several(net: Any) -> Callable[[], torch.Tensor]:
    net.kept = memory = torch.zeros(20)
    net.first.weight.data, net.first.bias.data = memory[:16].view(4, 4), memory[16:]
    return lambda: net.kept


def of_other_kinds(net: Any) -> Callable[[], torch.Tensor]:
    net.kept = {"sparse": torch.eye(2).to_sparse(), "meta": torch.empty(2, device="meta")}
    net.kept |= {"empty": torch.empty(0), "texts": np.array(["a"])}
    return lambda: torch.zeros(())


PLANS = {"alone": sw.Plan(), "stage 2": plan_of("dp_shard=2", 2), "replicas": plan_of("dp_replicate=2")}
WITH_PARTS = {
    "stage 3": plan_of("dp_shard=2", 3),
    "tp": plan_of("tp=2", rules={"first": "colwise_gather_output"}),
    "pp": plan_of("pp=2", stages={"first": 0, "last": 1}),
}
ALL = PLANS | WITH_PARTS


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("keep", [whole, part, turned, in_closure, of_other_kinds])
def test_they_go_along(keep: Keep, name: str) -> None:
    """Also to another plan."""

    def run(channel: sw.Channel) -> Trained:
        engine, trained = begun(channel, lambda: Net(keep), PLANS[name]), Trained()
        for step, batch in enumerate(BATCHES):
            if step == 1:
                engine = sw.relayout(engine, sw.Plan(mesh=PLANS[name].mesh))
            trained.losses.append(engine.step(share(engine, batch)).loss)
        return trained

    expected = in_one_process(lambda: Net(keep), BATCHES).losses
    for trained in sw.simulate(PLANS[name].mesh.size, run):
        assert trained.losses == pytest.approx(expected, rel=1e-5)


def test_they_go_along_when_the_parameter_is_unfrozen() -> None:
    net: Any = seeded(lambda: Net(whole, is_frozen=True))()
    engine = sw.parallelize(net, sw.Plan(), optimizer=sgd(net.parameters()), loss=mean_square)
    for on in (False, True):
        net.first.requires_grad_(on)
        engine.step(BATCHES[0])
    assert torch.equal(net.seen(), net.first.weight)


def refusal_of(plan: sw.Plan, run: Callable[[sw.Channel], object]) -> str:
    """What every rank says; a rank that met it later, what stopped the other."""

    def caught(channel: sw.Channel) -> str:
        with pytest.raises((ModelError, PeerError)) as error:
            run(channel)
        return str(error.value)

    (found,) = {text[text.index("(of ") :] for text in sw.simulate(plan.mesh.size, caught)}
    return found


READ = [(bits, name) for name in PLANS] + [
    (keep, name) for keep in (whole, turned, in_closure, bits, graph) for name in WITH_PARTS
]


@pytest.mark.parametrize(("keep", "name"), [*READ, (of_several, "alone")])
def test_others_are_refused_by_name_where_they_are_read(keep: Keep, name: str) -> None:
    """On all ranks; a program that reads none goes on."""

    def run(channel: sw.Channel) -> None:
        engine = begun(channel, lambda: Net(keep), ALL[name])
        for reads in (False, True):
            engine.model.reads = reads
            engine.step(share(engine, BATCHES[0]))

    said = refusal_of(ALL[name], run)
    assert "(of first.weight)" in said or "(of first.bias)" in said or keep is of_several
    assert "in forward" in said


@pytest.mark.parametrize("name", ALL)
def test_arrays_are_refused_at_once(name: str) -> None:
    error = same_error_everywhere(ALL[name].mesh.size, lambda channel: begun(channel, lambda: Net(array), ALL[name]))
    assert type(error) is ModelError
    assert "(of first.weight)" in str(error)


@pytest.mark.parametrize("name", WITH_PARTS)
@pytest.mark.parametrize("keep", [whole, turned, in_closure])
def test_of_a_frozen_parameter_they_keep_its_values_until_it_is_unfrozen(keep: Keep, name: str) -> None:
    def run(channel: sw.Channel) -> None:
        net: Any = seeded(lambda: Net(keep, is_frozen=True))()
        optimizer = sgd(net.parameters())
        engine = sw.parallelize(net, WITH_PARTS[name], optimizer=optimizer, loss=mean_square, channel=channel)
        before = net.seen().clone()
        engine.step(share(engine, BATCHES[0]))
        assert torch.equal(net.seen(), before)
        net.first.requires_grad_(True)
        engine.step(share(engine, BATCHES[1]))

    assert "`self.weight`" in refusal_of(WITH_PARTS[name], run)


@pytest.mark.parametrize("name", WITH_PARTS)
def test_after_a_relayout_to_a_plan_with_parts_reads_are_refused(name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = begun(channel, lambda: Net(whole), plan_of("dp_shard=2"))
        engine.step(share(engine, BATCHES[0]))
        engine = sw.relayout(engine, WITH_PARTS[name])
        engine.step(share(engine, BATCHES[1]))

    assert "`self.weight`" in refusal_of(WITH_PARTS[name], run)


@pytest.mark.parametrize("name", ALL)
def test_what_is_frozen_or_set_before_each_forward_stays(name: str) -> None:
    on_ranks(
        lambda: Net(whole, is_frozen=True, is_normed=name != "pp"),
        ALL[name],
        BATCHES[:1],
        optimizer=lambda given: sgd([each for each in given if each.requires_grad]),
    )
