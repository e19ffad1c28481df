"""Parameters that are not gathered: what they tell, what they refuse, and who is told what to do about it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.loops import begun
from tests.engine.loops import plan_of as short_plan_of
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import share_of, word_loss
from tests.oracle.program import adamw
from tests.oracle.units import BATCHES, WIDTH, Net
from tests.refusals import Refusals


def plan_of(stage: int, **settings: Any) -> sw.Plan:
    return short_plan_of("dp_shard=2", stage, sharding={"bucket_bytes": 600, **settings}, clip_grad_norm=0.3)


SETTINGS: Any = {"optimizer": adamw, "loss": word_loss}


def net_of(channel: sw.Channel, **settings: Any) -> Any:
    return begun(channel, Net, plan_of(3, **settings), **SETTINGS)


def met(act: Callable[[sw.Channel], object]) -> Callable[[], None]:
    def refused() -> None:
        raise same_error_everywhere(2, act)

    return refused


def read(act: Callable[[Any, Any], object]) -> Callable[[], None]:
    """`act` on a model that is at rest, and on a weight of it; the engine goes on."""

    def run(channel: sw.Channel) -> None:
        engine = net_of(channel)
        try:
            act(engine.model, engine.model.blocks[0].up.weight)
        finally:
            engine.step(share_of(BATCHES[0], channel.rank, channel.size))

    return met(run)


class Writes(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.bias.mul_(0.5)
        return super().forward(input)


def under_another_plan(channel: sw.Channel) -> None:
    sw.parallelize(net_of(channel).model, plan_of(1), channel=channel, **SETTINGS)


def write_in_forward(channel: sw.Channel) -> None:
    begun(channel, lambda: Writes(3, 3), plan_of(3)).step({"input": torch.ones(2, 3)})


def compiled(channel: sw.Channel, compile: Any) -> None:
    model = Net()
    made = compile(model)
    sw.parallelize(model if made is None else made, plan_of(3), channel=channel, **SETTINGS)


REFUSED = Refusals(
    "engine.sharded_params",
    {
        "an operation": read(lambda model, weight: weight + 1),
        "data": read(lambda model, weight: weight.data),
        "a list": read(lambda model, weight: weight.tolist()),
        "several in one operation": read(lambda model, weight: torch.stack([weight, weight])),
        "a call of the model": read(lambda model, weight: model(BATCHES[0]["words"])),
        "a call past its unit": read(lambda model, weight: model.blocks[0].up(torch.ones(WIDTH))),
        "a move": read(lambda model, weight: model.to(torch.float64)),
        "a state dict": read(lambda model, weight: model.state_dict()),
        "a second plan": met(under_another_plan),
        "compiled in place": met(partial(compiled, compile=lambda model: model.compile(backend="eager"))),
        "compiled": met(partial(compiled, compile=partial(torch.compile, backend="eager"))),
        "a write in forward": lambda: sw.simulate(2, write_in_forward),
        "units that match nothing": met(lambda channel: net_of(channel, units=("block.*",))),
    },
)  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_values_is_refused_with_a_way_out(case: str) -> None:
    REFUSED.check(case)


def test_what_is_not_gathered_tells_what_it_is() -> None:
    def run(channel: sw.Channel) -> None:
        weight = net_of(channel).model.blocks[0].up.weight
        assert (weight.shape, weight.dtype, weight.numel()) == ((17, WIDTH), torch.float32, 102)
        assert weight.requires_grad
        assert weight.grad is None
        weight.grad = None
        assert isinstance(weight, nn.Parameter)
        assert "not gathered (unit 'blocks.0')" in repr(weight)

    sw.simulate(2, run)
