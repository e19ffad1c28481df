"""Hooks around the forwards of placed modules: the bits of one process, whatever they set, change and draw."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.modules.module as every
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from tests.engine.formed import formed, several
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.program import Program, plan_of, seeded, sgd

WIDTH = 4

pytestmark = pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")


class Inner(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * scale


def noting(net: Any, x: torch.Tensor) -> Any:
    net.seen.clear()
    for block in net.blocks:
        x = block(x, scale=0.5)
    return x + sum(net.seen)


def free(linear: Any) -> None:
    """Its weight becomes an attribute that somebody makes of another parameter."""
    weight = linear._parameters.pop("weight").detach()
    linear.register_parameter("weight_orig", nn.Parameter(weight))
    linear.weight = weight.clone()


def half(linear: Any, *_: Any) -> None:
    linear.weight = linear.weight_orig * 0.5


def set_by_hook(linear: Any) -> None:
    free(linear)
    linear.register_forward_pre_hook(half)


def set_by_keyword_hook(linear: Any) -> None:
    free(linear)
    linear.register_forward_pre_hook(lambda each, args, kwargs: half(each), with_kwargs=True)


def set_by_the_block(net: Any) -> None:
    for block in net.blocks:
        free(block.linear)
        block.register_forward_pre_hook(lambda each, args: half(each.linear))


def set_with_noise(linear: Any) -> None:
    def noisy(each: Any, args: Any) -> None:
        each.weight = each.weight_orig + 0.1 * torch.randn_like(each.weight_orig)

    free(linear)
    linear.register_forward_pre_hook(noisy)


def gated(net: Any) -> None:
    """One of an early stage sets what one of a late stage reads."""
    net.blocks[0].register_forward_hook(lambda each, args, out: setattr(net, "gate", torch.sigmoid(out.mean())))
    net.blocks[3].register_forward_pre_hook(lambda each, args: (args[0] * net.gate,))


def noted(net: Any) -> None:
    for block in net.blocks:
        block.register_forward_pre_hook(lambda each, args: net.seen.append(args[0].square().mean()))
        block.register_forward_hook(lambda each, args, out: net.seen.append(out.square().mean()), always_call=True)


def buffers_in_place(net: Any) -> None:
    for block in net.blocks:
        block.register_forward_pre_hook(lambda each, args: each.mean.mul_(0.9).add_(args[0].detach().mean(0) * 0.1))


def prune_twice(linear: nn.Module) -> None:
    prune.l1_unstructured(prune.random_unstructured(linear, "weight", amount=0.5), "bias", amount=0.5)


def on_linears(do: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda net: [do(block.linear) for block in net.blocks]


HOOKS: dict[str, Callable[[Any], object]] = {
    "prune": on_linears(prune_twice),
    "weight norm, old": on_linears(weight_norm),
    "weight norm": on_linears(parametrizations.weight_norm),
    "spectral norm, old": on_linears(spectral_norm),
    "spectral norm": on_linears(parametrizations.spectral_norm),
    "orthogonal": on_linears(parametrizations.orthogonal),
    "own weights": on_linears(set_by_hook),
    "own weights by keyword": on_linears(set_by_keyword_hook),
    "own weights of inner modules": set_by_the_block,
    "own weights with noise": on_linears(set_with_noise),
    "inputs": lambda net: net.blocks[3].register_forward_pre_hook(lambda each, args: (args[0] + 1,)),
    "keywords": lambda net: net.blocks[1].register_forward_pre_hook(
        lambda each, args, kw: (args, {"scale": 0.25}), with_kwargs=True
    ),
    "outputs": lambda net: net.blocks[2].register_forward_hook(
        lambda each, args, kw, output: output * kw["scale"] * 3, with_kwargs=True
    ),
    "values of other stages": gated,
    "values that are kept": noted,
    "buffers": buffers_in_place,
    "of all modules": lambda net: None,
}
WITHIN = ("weight norm", "spectral norm", "orthogonal", "buffers")
"""Not by parts: of a parametrised module the parametrisation is placed, and a buffer needs the stage of its module."""
PLANS: dict[str, dict[str, Any]] = {
    "blocks": {"mesh": "pp=2", "k": 2},
    "parts": {"mesh": "pp=2", "k": 2},
    "stage 3": {"mesh": "pp=2,dp_shard=2", "stage": 3},
}


def program_of(name: str, layout: str) -> Program:
    part = "" if layout == "blocks" else ".linear"
    return Program(
        make=seeded(formed(noting, HOOKS[name], blocks=several(Inner, 4), seen=list)),
        batches=[{"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))} for seed in range(3)],
        loss=lambda output, batch: output.square().mean(),
        optimizer=sgd,
        stages={f"blocks.{at}{part}": at // 2 for at in range(4)},
        num_stages=2,
        draws="noise" in name,
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in HOOKS for layout in PLANS if layout == "blocks" or name not in WITHIN],
)
def test_hooks_of_placed_modules_give_the_bits_of_one_process(name: str, layout: str) -> None:
    program, handles = program_of(name, layout), []
    if name == "of all modules":
        before: Any = lambda each, args: (args[0] * 0.9,) if isinstance(each, nn.Linear) else None  # noqa: E731
        after: Any = lambda each, args, output: output * 0.9 if isinstance(each, Inner) else None  # noqa: E731
        handles = [
            every.register_module_forward_pre_hook(before),
            every.register_module_forward_hook(after),
        ]
    try:
        assert_trains_like_one_process(program, plan_of(program, **PLANS[layout]))
    finally:
        for each in handles:
            each.remove()
