"""Placed modules that compute with other modules: given as arguments, or known by themselves (an attribute that hides
them). All ranks agree on who runs what, and hooks see what they see in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.formed import formed, linear, several
from tests.oracle.pipeline_programs import Block, square, vectors
from tests.oracle.program import adamw, seeded

OWN, OTHER = {"a": 0, "b": 1}, {"a": 1, "b": 0}
"""Blocks one and two, on stages 0 and 1, use a and b."""


def borrowing(net: Any, x: torch.Tensor, other: Any = None) -> Any:
    others = net.kept if other is None else other if isinstance(other, nn.ModuleList) else [other]
    return net.block(x) + sum(each(x) for each in others)


BORROWER = formed(borrowing, block=Block)
Way = Callable[[Any, torch.Tensor], Any]


def given_whole(net: Any, x: torch.Tensor) -> Any:
    return net.last(net.two(net.one(net.first(x), net.a), net.b))


def given_parts(net: Any, x: torch.Tensor) -> Any:
    return net.last(net.two(net.one(net.first(x), net.a.block), net.b.block))


def given_in_a_list(net: Any, x: torch.Tensor) -> Any:
    both = nn.ModuleList([net.a, net.b])
    return net.last(net.two(net.one(net.first(x), both), both))


def given_a_method(net: Any, x: torch.Tensor) -> Any:
    return net.last(net.two(net.one(net.first(x), net.a.block.forward), net.b.block.forward))


def known(net: Any, x: torch.Tensor) -> Any:
    return net.last(net.two(net.one(net.first(x))))


def keep_whole(net: Any) -> None:
    net.one.kept, net.two.kept = [net.a], [net.b]


def keep_parts(net: Any) -> None:
    net.one.kept, net.two.kept = [net.a.block], [net.b.block]


def net_of(way: Way, *prepare: Callable[[Any], object]) -> Callable[[], nn.Module]:
    lender = formed(lambda net, x: net.block(x), block=Block)
    parts: dict[str, Any] = {"first": linear(5, 7), "a": lender, "one": BORROWER, "b": lender, "two": BORROWER}
    return seeded(formed(way, *prepare, **parts, last=linear(7, 3)))


def plan_of(pp: int, stages: dict[str, int], chunks: int) -> sw.Plan:
    placed = {name: stage * chunks for name, stage in {"first": 0, "one": 0, **stages, "two": 1, "last": 1}.items()}
    if chunks > 1:
        placed = {**placed, "first": 1, "last": 3}
    schedule: Any = "1f1b" if chunks == 1 else "interleaved"
    pipeline = sw.Pipeline(schedule=schedule, stages=placed) if pp > 1 else sw.Pipeline()
    return sw.Plan(mesh=sw.Mesh(pp=pp), pipeline=pipeline, merge=sw.Merge(microbatches=2))


def trained(
    pp: int,
    make: Callable[[], nn.Module],
    stages: dict[str, int] = OWN,
    *,
    chunks: int = 1,
    prepare: Callable[[Any, int], object] = lambda net, step: None,
    seen: Callable[[Any], object] = lambda net: None,
) -> list[Any]:
    """Of each rank, losses, outputs, and what is seen after each step; an error in their place."""

    def run(channel: sw.Channel) -> list[Any]:
        net = make()
        engine = sw.parallelize(net, plan_of(pp, stages, chunks), optimizer=adamw, loss=square, channel=channel)
        found: list[Any] = []
        try:
            for step in range(4):
                prepare(net, step)
                found += [engine.step(vectors(step)).loss, seen(net)]
            found.append(engine.predict(vectors(0)).tolist())
        except sw.ShardwiseError as error:
            found.append(str(error))
        return found

    return sw.simulate(pp, run)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages", [OWN, OTHER], ids=["own stage", "other stage"])
@pytest.mark.parametrize("way", [given_whole, given_parts, given_in_a_list, given_a_method])
def test_a_module_that_is_given_runs_in_the_one_that_gets_it(way: Way, stages: dict[str, int], chunks: int) -> None:
    make = net_of(way)
    assert trained(2, make, stages, chunks=chunks) == trained(1, make) * 2


def test_layers_that_get_the_same_module_are_tried_once() -> None:
    def layered(net: Any, x: torch.Tensor) -> Any:
        h = net.first(x)
        for layer in net.layers:
            h = layer(h, net.a)
        return net.last(h)

    def run(channel: sw.Channel) -> int:
        calls: list[int] = []

        def counted(net: Any, x: torch.Tensor, other: Any) -> Any:
            calls.append(1)
            return borrowing(net, x, other)

        layers = several(formed(counted, block=Block), 6)
        net = seeded(formed(layered, first=linear(5, 7), a=linear(7, 7), layers=layers, last=linear(7, 3)))()
        stages = {"first": 0, "a": 0, **{f"layers.{at}": 1 for at in range(6)}, "last": 1}
        plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages=stages))
        sw.parallelize(net, plan, optimizer=adamw, loss=square, channel=channel).step(vectors(0))
        return len(calls)

    assert sw.simulate(2, run) == [1, 1 + 6]


@pytest.mark.parametrize("keep", [keep_whole, keep_parts])
def test_a_module_that_is_known_runs_on_its_own_stage(keep: Callable[[Any], object]) -> None:
    make = net_of(known, keep)
    assert trained(2, make) == trained(1, make) * 2


@pytest.mark.parametrize("keep", [keep_whole, keep_parts])
@pytest.mark.parametrize("stages", [OTHER, {"a": 0, "b": 0}], ids=["all", "the last"])
def test_a_module_of_another_stage_that_is_known_is_refused_on_all_ranks(
    keep: Callable[[Any], object], stages: dict[str, int]
) -> None:
    for found in trained(2, net_of(known, keep), stages):
        assert "lace both" in found[-1]


def test_a_parameter_of_a_module_without_a_stage_comes_along_with_it() -> None:
    scaled = formed(lambda net, x: net.block(x) * net.scale, block=Block, scale=lambda: nn.Parameter(torch.ones(7)))
    make = net_of(given_whole, lambda net: net.__setattr__("a", scaled()))
    stages = {"a.block": 0, "a.scale": 1, "b": 0}
    assert trained(2, make, stages) == trained(1, make) * 2


def keep_first(net: Any) -> None:
    net.one.kept = [net.a]


@pytest.mark.parametrize("is_given", [True, False])
def test_buffers_that_a_module_of_its_stage_has_written_to_cross_anew(is_given: bool) -> None:
    def normed(net: Any, x: torch.Tensor) -> Any:
        h = net.first(x)
        for _ in range(3):
            h = net.one(h, *([net.a] if is_given else []))
            h = net.two(h) + net.a.running_mean
        return net.last(h)

    parts: dict[str, Any] = {"first": linear(5, 7), "one": BORROWER, "a": lambda: nn.BatchNorm1d(7), "b": nn.ReLU}
    make = seeded(formed(normed, keep_first, **parts, two=linear(7, 7), last=linear(7, 3)))
    assert trained(2, make) == trained(1, make) * 2


def counting(net: Any) -> None:
    net.seen = []
    for each in (net.a, net.a.block, net.b.block.inner):
        each.register_forward_hook(lambda module, args, output: net.seen.append(float(output.detach().sum())))


@pytest.mark.filterwarnings("ignore::shardwise.errors.StageReadsWarning")
@pytest.mark.parametrize("stages", [OWN, OTHER], ids=["own stage", "other stage"])
@pytest.mark.parametrize("way", [given_whole, given_parts])
def test_hooks_of_a_module_that_is_given_see_what_they_see_in_one_process(way: Way, stages: dict[str, int]) -> None:
    """Some come with the third step, and go with the fourth."""

    def later(net: Any, step: int) -> None:
        if step == 2:
            net.handle = net.b.block.register_forward_hook(lambda module, args, output: net.seen.append(1.0))
        if step == 3:
            net.handle.remove()

    settings: Any = {"prepare": later, "seen": lambda net: list(net.seen)}
    make = net_of(way, counting)
    assert trained(2, make, stages, **settings) == trained(1, make, **settings) * 2


def test_the_mode_of_a_module_that_is_given_decides_what_comes_of_it() -> None:
    def wide(net: Any, x: torch.Tensor, other: Any) -> Any:
        return torch.cat([net.block(x), other(x)], 1) if other.training else net.block(x)

    def way(net: Any, x: torch.Tensor) -> Any:
        return net.last(net.two(net.one(net.first(x), net.a)[:, -7:], net.b)[:, -7:])

    def prepare(net: Any) -> None:
        net.one, net.two = (formed(wide, block=Block)() for _ in range(2))

    def turn(net: Any, step: int) -> None:
        net.a.training, net.b.training = step % 2 == 0, step % 3 == 0

    make = net_of(way, prepare)
    assert trained(2, make, OTHER, prepare=turn) == trained(1, make, prepare=turn) * 2
