"""Calls of torch.distributed in forwards and losses: left out with a warning, run over data ranks, or refused."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    is_initialized,
)

import shardwise as sw
from shardwise.errors import CollectivesWarning, ModelError
from tests.engine.loops import begun, mean_square, plan_of, rows

Does = Callable[[torch.Tensor], torch.Tensor]
OWN: list[Any] = []


def guarded(value: torch.Tensor) -> torch.Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
    return value


def by_name(value: torch.Tensor) -> torch.Tensor:
    return guarded(value) if is_initialized() else value


def in_own_group(value: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(value.detach().clone(), group=OWN[0])
    return value


def by_mean(value: torch.Tensor) -> torch.Tensor:
    return value * guarded(value.detach().mean())


def by_torch(value: torch.Tensor) -> torch.Tensor:
    """Torch asks, and knows what to do."""
    return nn.functional.relu(nn.SyncBatchNorm(4)(value))


def same(value: torch.Tensor) -> torch.Tensor:
    return value


class Net(nn.Module):
    def __init__(self, does: Does) -> None:
        super().__init__()
        self.first, self.last, self.does = nn.Linear(4, 4), nn.Linear(4, 4), does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.does(self.first(x)))
        return output


PLANS = {
    "data": plan_of("dp_shard=2"),
    "tp": plan_of("tp=2", rules={"first": "colwise_gather_output"}),
    "pp": plan_of("pp=2"),
}


def train(channel: sw.Channel, plan: str, does: Does, *, in_loss: bool) -> None:
    in_forward, at_end = (same, does) if in_loss else (does, same)
    engine = begun(channel, lambda: Net(in_forward), PLANS[plan], loss=lambda output, _: mean_square(at_end(output)))
    for seed in range(2):
        engine.step(rows(seed, count=4))


@pytest.mark.parametrize("in_loss", [False, True], ids=["forward", "loss"])
@pytest.mark.parametrize(
    ("does", "plan", "says"),
    [
        *((guarded, "data", True), (by_name, "data", True), (by_torch, "data", False)),
        *((same, "data", False), (guarded, "tp", False)),
    ],
)
def test_what_is_left_out_is_said_once(does: Does, plan: str, says: bool, in_loss: bool) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sw.simulate(2, partial(train, plan=plan, does=does, in_loss=in_loss))
    texts = [str(each.message) for each in seen if each.category is CollectivesWarning]
    assert len(texts) == says
    assert all(f"{__file__}:" in text and "loss_weight" in text for text in texts)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("in_loss", [False, True], ids=["forward", "loss"])
@pytest.mark.parametrize("plan", ["tp", "pp"])
def test_a_group_with_other_ranks_is_refused(plan: str, in_loss: bool) -> None:
    with pytest.raises(ModelError, match=r"torch.distributed.all_reduce inside of a step.*group of the data ranks"):
        sw.simulate(2, partial(train, plan=plan, does=guarded, in_loss=in_loss))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("plan", "does"), [("tp", in_own_group), ("data", by_mean)])
def test_a_group_that_the_program_made_and_one_of_data_ranks_are_used(plan: str, does: Does) -> None:
    OWN[:] = [dist.new_group([0])]
    sw.simulate(2, partial(train, plan=plan, does=does, in_loss=True))
