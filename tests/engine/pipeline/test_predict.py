"""What an engine says of inputs: the same on all ranks, without a trace in the model."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.formed import formed, linear, several
from tests.engine.loops import begun, plan_of
from tests.oracle.program import seeded
from tests.refusals import Refusals

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
TURN = {"x": X}
LAYERS = several(linear(6, 6), 4)


def engine_of(channel: sw.Channel, net: nn.Module) -> Any:
    return begun(channel, lambda: net, plan_of(f"pp={channel.size}"))


def modes(net: nn.Module) -> list[bool]:
    return [each.training for each in net.modules()]


class Told(NamedTuple):
    last: torch.Tensor
    rows: int


def telling(net: Any, x: torch.Tensor) -> Any:
    """Gives what it computed on the way, nested."""
    hidden = [net.drop(x)]
    for layer in net.layers:
        hidden.append(torch.relu(layer(hidden[-1])))
    return {"hidden": tuple(hidden), "told": Told(hidden[-1].exp(), len(x)), "weight": net.layers[0].weight}


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_any_nesting_of_tensors_comes_to_every_rank(pp: int) -> None:
    """In evaluation mode, which leaves no trace in the model."""
    make = seeded(formed(telling, lambda net: net.layers[1].eval(), layers=LAYERS, drop=nn.Dropout))
    wanted = make().eval()(X)

    def on_rank(channel: sw.Channel) -> None:
        net = make()
        engine = engine_of(channel, net)
        named = engine.predict({**TURN, "label": 3}, lambda inputs: [net(inputs["x"])["hidden"][2], inputs["label"]])
        output = engine.predict(TURN)
        assert output.keys() == wanted.keys()
        assert type(output["told"]) is Told
        assert output["told"].rows == 5
        given = [*output["hidden"], output["told"].last, output["weight"], named[0]]
        expected = [*wanted["hidden"], wanted["told"].last, wanted["weight"], wanted["hidden"][2]]
        assert all(map(torch.equal, given, expected))
        assert named[1] == 3
        assert not output["told"].last.requires_grad
        assert engine.predict(TURN, lambda inputs: torch.zeros(0)).shape == (0,)
        assert modes(net) == modes(make())

    sw.simulate(pp, on_rank)


class Kept:
    """An object that shardwise cannot look into."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


def keep(net: Any, x: torch.Tensor, kept: Any) -> Any:
    kept.seen.append(out := net.layer(x))
    return out


KEEPING = several(formed(keep, layer=linear(6, 6)), 4)


def keeping(net: Any, x: torch.Tensor, times: int = 1) -> Any:
    kept, other = Kept(), Kept()
    for _ in range(times):
        for layer in net.layers:
            x = layer(x, kept=kept)
        if times > 1 and x.mean() > 100:
            break
    return x, kept, other


def test_an_object_that_ranks_have_in_parts_is_none_in_a_prediction() -> None:
    make = seeded(formed(keeping, layers=KEEPING))
    [(alone, whole, _)] = sw.simulate(1, lambda channel: engine_of(channel, make()).predict(TURN))
    assert len(whole.seen) == 4
    for output, kept, other in sw.simulate(2, lambda channel: engine_of(channel, make()).predict(TURN)):
        assert output.shape == alone.shape
        assert kept is None
        assert type(other) is Kept


def with_a_cache(call: Any) -> None:
    def run(channel: sw.Channel) -> None:
        net = formed(keeping, layers=KEEPING)()
        call(net, engine_of(channel, net))

    sw.simulate(2, run)


REFUSED = Refusals(
    "engine.predictions",
    {
        "a loop with a cache": lambda: with_a_cache(
            lambda net, engine: engine.predict(TURN, lambda turn: net(turn["x"], times=2))
        ),
        "a call outside of the engine": lambda: with_a_cache(lambda net, engine: net(X)),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_predicted_is_refused_with_a_way_that_works(case: str) -> None:
    REFUSED.check(case)
