"""Gradients that a plain program reaches by hooks of parameters: whole ones, or a refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import OptimizerError
from tests.covering import covering
from tests.engine.tower import PLANS, engine_on, on_ranks, plain, tower, trained


class Scaled(nn.Module):
    """Whole along tp, between two cut modules: each rank has a term of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.scale


def scaled() -> nn.Module:
    model = tower()
    model[1] = Scaled()
    return model


HOOKS: dict[str, Callable[[torch.Tensor, list[float]], object]] = {
    "masks rows": lambda gradient, _: torch.cat([gradient[:3] * 0, gradient[3:]]),
    "of one length": lambda gradient, _: gradient / gradient.norm(),
    "centralises": lambda gradient, _: gradient - gradient.mean(0),
    "clamps": lambda gradient, _: gradient.clamp(-0.01, 0.01),
    "looks": lambda gradient, log: log.append(float(gradient.norm())),
    "nothing": lambda gradient, _: None,
}


def put_on_parameters(hook: str, is_accumulated: bool, model: nn.Module, log: list[float]) -> None:
    def seen(gradient: torch.Tensor) -> Any:
        found = HOOKS[hook](gradient, log)
        return found if isinstance(found, torch.Tensor) else None

    def accumulated(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if (found := seen(parameter.grad)) is not None:
            parameter.grad.copy_(found)

    for each in model.parameters():
        if each.dim() or hook in ("of one length", "clamps", "looks"):
            if is_accumulated:
                each.register_post_accumulate_grad_hook(accumulated)
            else:
                each.register_hook(seen)


@pytest.mark.parametrize(("hook", "is_accumulated", "late"), covering(list(HOOKS), [False, True], [False, True]))
def test_a_hook_of_a_parameter_gets_the_whole_gradient_under_tp(hook: str, is_accumulated: bool, late: bool) -> None:
    """`late`: it was put there after parallelize."""
    expected, noted = scaled(), list[float]()
    put_on_parameters(hook, is_accumulated, expected, noted)
    plain(model=expected)

    def run(channel: sw.Channel) -> tuple[list[torch.Tensor], list[float]]:
        model, log = scaled(), list[float]()
        if not late:
            put_on_parameters(hook, is_accumulated, model, log)
        engine = engine_on(channel, "tp", model=model)
        if late:
            put_on_parameters(hook, is_accumulated, model, log)
        return trained(engine), log

    try:
        results = sw.simulate(2, run)
    except OptimizerError:
        assert is_accumulated
        assert hook not in ("clamps", "nothing")
        return
    for _, log in results:
        assert sorted(log) == pytest.approx(sorted(noted), rel=1e-4)
    for one, other in zip(results[0][0], expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name", [each for each in PLANS if "bf16" not in each and "tp" not in each])
def test_a_hook_that_was_put_behind_the_accumulation_later_sees_the_gradient(name: str) -> None:
    def zeroed(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.zero_()

    def run(channel: sw.Channel) -> list[torch.Tensor]:
        engine = engine_on(channel, name)
        for each in engine.model.parameters():
            each.register_post_accumulate_grad_hook(zeroed)
        return trained(engine)

    values = on_ranks(name, run)[0]
    assert all(torch.equal(one, other) for one, other in zip(values, tower().parameters(), strict=True))
