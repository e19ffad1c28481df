"""Lists, dicts and the like that placed modules are given and give: the numbers of one process, whatever is shared."""

import zlib
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.engine.formed import formed, linear
from tests.oracle.pipeline_programs import Block, square, vectors
from tests.oracle.program import adamw, seeded

STAGES = {"first": 0, "one": 0, "two": 1, "last": 1}
Way = Callable[[Any, torch.Tensor], Any]


def losses(pp: int, make: Callable[[], nn.Module], **settings: Any) -> list[list[float]]:
    """What each rank has of training; blocks one and two are on stages of their own."""
    pipeline = sw.Pipeline(stages=STAGES) if pp > 1 else sw.Pipeline()
    plan = sw.Plan(mesh=sw.Mesh(pp=pp), pipeline=pipeline, **settings)

    def run(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(seeded(make)(), plan, optimizer=adamw, loss=square, channel=channel)
        return [engine.step(vectors(seed)).loss for seed in range(3)]

    return sw.simulate(pp, run)


def net_of(way: Way, block: Callable[..., Any]) -> Callable[[], nn.Module]:
    made = formed(block, block=Block)
    return formed(way, first=linear(5, 7), one=made, two=made, last=linear(7, 3))


def appending(net: Any, x: torch.Tensor, to: Any, read: Any) -> Any:
    """Appends to the one, and reads the other."""
    to.append(x * 2)
    return net.block(x) + sum(read)


def given_twice(net: Any, x: torch.Tensor) -> Any:
    h = net.first(x)
    for each in (net.one, net.two):
        xs = [h]
        h = each(h, xs, xs) + xs[-1]
    return net.last(h)


def given_twice_in_turns(net: Any, x: torch.Tensor) -> Any:
    h = net.first(x)
    for each in (net.one, net.two, net.one, net.two):
        xs = [h]
        h = each(h, xs, xs if each is net.one else [h, h])
    return net.last(h)


def in_containers(net: Any, x: torch.Tensor, d: Any) -> Any:
    d["xs"].append(x * 2)
    return net.block(x) * len(d["more"]["xs"]) + sum(d["ys"])


def given_inside(net: Any, x: torch.Tensor) -> Any:
    h = net.first(x)
    xs: list[Any] = []
    d = {"xs": xs, "ys": xs, "more": UserDict(xs=xs)}
    for each in (net.one, net.two):
        h = each(h, d)
    return net.last(h + sum(xs))


def giving_its_list(net: Any, x: torch.Tensor, xs: Any, d: Any) -> Any:
    xs.append(x)
    d["kept"] = xs
    return net.block(x), xs


def gives_what_was_given(net: Any, x: torch.Tensor) -> Any:
    h = net.first(x)
    for each in (net.one, net.two):
        xs: list[Any] = []
        d: dict[str, Any] = {}
        h, ys = each(h, xs, d)
        ys.append(h * 3)
        d["kept"].append(h)
        h = sum(xs) * (1 + (ys is xs) + 2 * (d["kept"] is xs))
    return net.last(h)


def giving_one_twice(net: Any, x: torch.Tensor) -> Any:
    outputs: list[Any] = [net.block(x)]
    none: list[Any] = []
    return outputs, {"outputs": outputs, "none": none}, none


def gives_one_twice(net: Any, x: torch.Tensor) -> Any:
    h = net.first(x)
    for each in (net.one, net.two):
        outputs, d, none = each(h)
        assert not none
        outputs.append(h)
        none.append(h * 2)
        h = sum(d["outputs"]) + sum(d["none"])
    return net.last(h)


SHARED: dict[str, tuple[Way, Callable[..., Any]]] = {
    "given twice": (given_twice, appending),
    "given twice in some calls": (given_twice_in_turns, appending),
    "inside of others": (given_inside, in_containers),
    "given back": (gives_what_was_given, giving_its_list),
    "made once and given twice": (gives_one_twice, giving_one_twice),
}


def read_first(block: Callable[..., Any]) -> Callable[..., Any]:
    """No rank can try it: it has to be announced."""

    def reading(net: Any, x: torch.Tensor, *args: Any) -> Any:
        assert x.isfinite().all().item()
        return block(net, x, *args)

    return reading


@pytest.mark.parametrize("how", ["tried", "announced", "run again"])
@pytest.mark.parametrize("name", SHARED)
def test_a_container_in_several_places_stays_one(name: str, how: str) -> None:
    way, block = SHARED[name]
    make = net_of(way, read_first(block) if how == "announced" else block)
    settings = {"activations": sw.Activations(checkpoint=("one", "two"))} if how == "run again" else {}
    assert losses(2, make, **settings) == losses(1, make) * 2


def test_a_container_in_several_places_of_an_output_stays_one() -> None:
    def way(net: Any, x: torch.Tensor) -> Any:
        outputs = [net.two(net.one(net.first(x)))]
        return {"all": outputs, "last": (outputs, outputs[-1])}

    def run(channel: sw.Channel) -> bool:
        net = seeded(net_of(way, lambda net, x: net.block(x)))()
        plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages=STAGES))
        output = sw.parallelize(net, plan, optimizer=adamw, loss=square, channel=channel).predict(vectors(0))
        same: bool = output["all"] is output["last"][0]
        return same

    assert sw.simulate(2, run) == [True, True]


@dataclass
class Two:
    a: Any
    b: Any


KEYS: list[tuple[Any, Any]] = [
    (UserDict(a=1), UserDict(b=1)),
    (UserDict(a=1, b=2), UserDict(b=1, a=2)),
    (MappingProxyType({"a": 1}), MappingProxyType({"b": 1})),
    (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
    (Two([1, 2], [3]), Two([1], [2, 3])),
    (Two({"a": 1}, 2), Two({"b": 1}, 2)),
    (range(2), range(3)),
    ({1, 2}, {1, 3}),
]


def width_of(given: Any) -> int:
    """Another one for each of a pair."""
    return zlib.crc32(repr(given).encode()) % 97


@pytest.mark.parametrize("pair", KEYS, ids=str)
def test_keys_and_values_of_containers_decide_what_a_module_gives(pair: tuple[Any, Any]) -> None:
    assert width_of(pair[0]) != width_of(pair[1])

    def wide(net: Any, x: torch.Tensor, given: Any) -> Any:
        return net.block(x)[:, :1].expand(-1, 7 + width_of(given))

    def way(net: Any, x: torch.Tensor) -> Any:
        h = net.first(x)
        for given in (*pair, *pair):
            h = net.two(net.one(h, given)[:, :7], given)[:, -7:]
        return net.last(h)

    make = net_of(way, wide)
    assert losses(2, make) == losses(1, make) * 2


def put_back_at_the_end(given: Any) -> None:
    given["a"] = given.pop("a")


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "takes items out of a dict": (lambda: {"a": 1, "b": 2}, put_back_at_the_end),
    "changes a deque": (lambda: deque([1.0]), lambda given: given.append(2.0)),
    "changes a set": (lambda: {1, 2}, lambda given: given.remove(2)),
}


@pytest.mark.parametrize("words", CHANGED)
def test_changes_that_other_ranks_would_not_see_are_refused(words: str) -> None:
    make_given, change = CHANGED[words]

    def changing(net: Any, x: torch.Tensor, given: Any) -> Any:
        change(given)
        return net.block(x)

    def way(net: Any, x: torch.Tensor) -> Any:
        return net.last(net.two(net.one(net.first(x), make_given()), make_given()))

    with pytest.raises(ModelError, match=words):
        losses(2, net_of(way, changing))
