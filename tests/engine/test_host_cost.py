"""What an engine costs the host in every update, in calls per parameter over a plain loop; and what building it costs.

Times are in `benchmarks.host_cost`; calls are the same on every machine.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.host_cost import Stage
from benchmarks.silence import Silence
from tests.costs import calls_in

WIDTH = 4
FEW, MANY = 8, 24
"""Blocks, of two parameters each."""


def calls_of(step: Callable[[], object]) -> int:
    """Calls in a step; not in the first ones, which lay out buffers, and make views of buckets in each of them."""
    for _ in range(6):
        step()
    # The least of several: some steps also do what is due once per second, such as reading the peak of memory.
    return min(calls_in(step) for _ in range(5))


def tower(num_blocks: int) -> nn.Sequential:
    return nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(num_blocks)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    return output.square().mean()


def calls_of_engine(num_blocks: int, stage: Stage, num_ranks: int) -> int:
    channel = Silence(rank=0, size=num_ranks)
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=num_ranks), sharding=sw.Sharding(stage=stage))
    engine = sw.parallelize(tower(num_blocks), plan, optimizer=sgd, loss=loss, channel=channel)
    batch = {"input": torch.ones(2, WIDTH)}
    return calls_of(lambda: engine.step(batch))


def calls_of_plain_loop(num_blocks: int) -> int:
    model = tower(num_blocks)
    optimizer = sgd(model.parameters())

    def step() -> None:
        loss(model(torch.ones(2, WIDTH)), {}).backward()
        optimizer.step()
        optimizer.zero_grad()

    return calls_of(step)


def per_parameter(calls: Callable[[int], int]) -> float:
    return (calls(MANY) - calls(FEW)) / (2 * (MANY - FEW))


@pytest.mark.parametrize(("stage", "most"), [(0, 33), (1, 23), (2, 23), (3, 110)])
def test_an_update_adds_few_calls_per_parameter_for_any_number_of_ranks(stage: Stage, most: int) -> None:
    plain = per_parameter(calls_of_plain_loop)
    added = [per_parameter(partial(calls_of_engine, stage=stage, num_ranks=ranks)) - plain for ranks in (2, 32)]
    # In stage 3 each block of this model is a unit, with all that goes around one for two parameters. It takes some 95
    # calls, which vary from process to process.
    assert max(added) < most
    assert added[1] < 1.1 * added[0]


def test_building_an_engine_takes_four_times_as_many_calls_for_four_times_as_many_units() -> None:
    def build(num_units: int) -> None:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3))
        sw.parallelize(tower(num_units), plan, optimizer=sgd, loss=loss, channel=Silence(rank=0, size=2))

    build(2)  # imports, and what is tried once
    few, many = (calls_in(partial(build, count)) for count in (25, 100))
    assert many < 4.1 * few
