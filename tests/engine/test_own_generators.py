"""A `torch.Generator` that a model keeps goes on from call to call, as in a plain loop, whatever runs modules aside."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw

STEPS = 3


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Noise(nn.Module):
    """Adds numbers of a generator that is kept in some way."""

    def __init__(self, keep: Callable[["Noise"], Callable[[], torch.Generator]]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.draws_from = keep(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Twice, and of no fixed number: a run more or less shows in every later call.
        given = self.draws_from()
        mask = torch.rand(4, generator=given) < 0.5 + 0.1 * torch.rand((), generator=given)
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x * mask)))
        return out


class Net(nn.Module):
    def __init__(self, keep: Callable[[Noise], Callable[[], torch.Generator]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.noise, self.last = nn.Linear(4, 4), Noise(keep), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.noise(self.first(x)))
        return output


class Sampler:
    def __init__(self) -> None:
        self.source = {"of masks": [generator()]}

    def given(self) -> torch.Generator:
        return self.source["of masks"][0]


def attribute(module: Noise) -> Callable[[], torch.Generator]:
    module.generator = generator()  # type: ignore[assignment]
    return lambda: module.generator  # type: ignore[return-value]


def in_containers(module: Any) -> Callable[[], torch.Generator]:
    module.generators = {"masks": (generator(),)}
    return lambda: module.generators["masks"][0]


def in_object(module: Noise) -> Callable[[], torch.Generator]:
    return Sampler().given


def in_closure(module: Noise) -> Callable[[], torch.Generator]:
    kept = generator()
    return lambda: kept


def in_partial(module: Noise) -> Callable[[], torch.Generator]:
    return partial(lambda kept: kept, generator())


KEPT = [attribute, in_containers, in_object, in_closure, in_partial]

RULES = {"noise.up": "column", "noise.down": "row"}
STAGES = sw.Pipeline(stages={"first": 0, "noise": 1, "last": 1})
PLANS = {
    "plain": sw.Plan(),
    "again": sw.Plan(activations=sw.Activations(checkpoint=("noise",)), merge=sw.Merge(microbatches=2)),
    "tp, proof": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=RULES)),
    "tp, auto": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
    "pp, k=2": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=STAGES, merge=sw.Merge(microbatches=2)),
    "pp, measured": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(balance="flops")),
    "pp, again": sw.Plan(
        mesh=sw.Mesh(pp=2),
        pipeline=STAGES,
        activations=sw.Activations(checkpoint=("noise",)),
        merge=sw.Merge(microbatches=2),
    ),
    "tp, stage 3, again": sw.Plan(
        mesh=sw.Mesh(tp=2),
        tensor=sw.Tensor(rules=RULES),
        sharding=sw.Sharding(stage=3),
        activations=sw.Activations(checkpoint=("noise",)),
    ),
}


def batches() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=drawn) for _ in range(STEPS)]


def in_a_plain_loop(keep: Any, k: int) -> list[float]:
    model, losses = Net(keep), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        of_parts = [model(part).square().mean() / k for part in batch.chunk(k)]
        for each in of_parts:
            each.backward()
        losses.append(sum(each.item() for each in of_parts))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("keep", KEPT, ids=lambda keep: keep.__name__)
def test_it_goes_on_as_in_a_plain_loop(keep: Any, name: str) -> None:
    plan = PLANS[name]
    expected = in_a_plain_loop(keep, plan.merge.microbatches)

    def train(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(
            Net(keep),
            plan,
            optimizer=lambda given: torch.optim.SGD(given, lr=0.1),
            loss=lambda output, batch: output.square().mean(),
            channel=channel,
            sample={"x": torch.ones(4, 4)},
        )
        return [engine.step({"x": batch}).loss for batch in batches()]

    for losses in sw.simulate(plan.mesh.size, train):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_one_that_is_an_argument_of_a_module_that_runs_again() -> None:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.map = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, drawn: torch.Generator) -> torch.Tensor:
            out: torch.Tensor = torch.tanh(self.map(x * torch.rand(4, generator=drawn)))
            return out

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drawn = Given(), generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(self.inner(x, self.drawn), self.drawn)
            return out

    def train(activations: sw.Activations) -> list[float]:
        engine = sw.parallelize(
            Outer(),
            sw.Plan(activations=activations),
            optimizer=lambda given: torch.optim.SGD(given, lr=0.5),
            loss=lambda output, batch: output.square().mean(),
        )
        return [engine.step({"x": batch}).loss for batch in batches()]

    assert train(sw.Activations(checkpoint=("inner",))) == train(sw.Activations())
