"""Optimizers that keep gradients, or give parameters other memory: the numbers of a plain loop, everywhere."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.plan import matrix_homes
from tests.engine.channels import SharesMemory


class InPlace(torch.optim.Optimizer):
    """Updates in place, and keeps nothing. `whole`: by the norm of what it updates."""

    def __init__(self, parameters: Iterable[nn.Parameter], whole: bool) -> None:
        super().__init__(parameters, {"lr": 0.05, "whole": whole})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group, self.state[parameter])

    def way(self, gradient: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        way = gradient / (gradient.norm() + 1e-7) if group["whole"] else gradient.sign()
        return way * float(group["lr"])

    def update(self, parameter: nn.Parameter, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        parameter.sub_(self.way(parameter.grad, group))  # type: ignore[arg-type]


class GradientIsKept(InPlace):
    """The last gradient is the tensor that backward made, and the first one is the momentum."""

    def update(self, parameter: nn.Parameter, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        change = gradient - state.get("last", 0)
        state["momentum"] = state["momentum"].mul(0.9).add(change) if "momentum" in state else gradient.view_as(change)
        state["last"] = gradient
        parameter.sub_(self.way(state["momentum"], group))


class ValuesAreReplaced(InPlace):
    """New values are a new tensor, and the old one is kept; now and then it goes back half of the way."""

    def update(self, parameter: nn.Parameter, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        change = parameter.data - state["before"] if "before" in state else 0.0
        state["before"] = parameter.data
        state["number"] = state.get("number", 0) + 1
        parameter.data = parameter.data - self.way(parameter.grad, group) + 0.3 * change
        if state["number"] % 3 == 0:
            parameter.data = parameter.data.lerp(state["before"], 0.5)


def build() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = [6, 8, 10, 8, 6]
        return nn.Sequential(*(nn.Linear(one, other, bias=False) for one, other in pairwise(sizes)))


def rows_of(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", [GradientIsKept, ValuesAreReplaced])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("layout", ["single", "tp=2", "dp_shard=2"])
def test_an_optimizer_may_keep_gradients_and_replace_values(
    monkeypatch: pytest.MonkeyPatch, kind: type[InPlace], whole: bool, layout: str
) -> None:
    monkeypatch.setattr(matrix_homes, "LEAST_BYTES", 1)  # a round for each matrix
    mesh = sw.Mesh.parse(layout)

    def run(channel: sw.Channel) -> list[float]:
        model = build()
        rules = {"0": "column", "1": "row", "2": "column", "3": "row"} if mesh.tp > 1 else None
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=mesh, tensor=sw.Tensor(rules=rules)),
            optimizer=kind(model.parameters(), whole),
            loss=lambda output, batch: (output - 1).square().mean(),
            channel=SharesMemory(channel) if mesh.tp > 1 else channel,
        )
        return [
            engine.step({"input": rows_of(step).chunk(mesh.num_data_ranks)[mesh.data_rank(channel.rank)]}).loss
            for step in range(5)
        ]

    model, expected = build(), []
    optimizer = kind(model.parameters(), whole)
    for step in range(5):
        optimizer.zero_grad()
        loss = (model(rows_of(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = sw.simulate(mesh.size, run)[0]
    assert found == (expected if mesh.size == 1 else pytest.approx(expected, rel=1e-5))


def test_a_hook_of_the_user_may_replace_values() -> None:
    """Torch's own optimizers write in place; code around their steps need not."""

    def shrinking(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data = parameter.data * 0.9

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(shrinking)
        return optimizer

    model, other = build(), build()
    engine = sw.parallelize(
        model, sw.Plan(), optimizer=sgd(model), loss=lambda output, batch: (output - 1).square().mean()
    )
    plain = sgd(other)
    for step in range(2):
        plain.zero_grad()
        (other(rows_of(step)) - 1).square().mean().backward()
        plain.step()
        engine.step({"input": rows_of(step)})
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
