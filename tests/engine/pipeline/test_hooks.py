"""Hooks around the forwards of placed modules: the bits of one process, whatever they set, change and draw."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
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


def half(linear: Any) -> None:
    linear.weight = linear.weight_orig * 0.5


def set_by_hook(linear: Any, **settings: Any) -> None:
    free(linear)
    linear.register_forward_pre_hook(lambda each, *_: half(each), **settings)


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


def on_linears(do: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda net: [do(block.linear) for block in net.blocks]


def inputs_and_outputs(net: Any) -> None:
    """Of blocks: one's input, another's keyword, and the output of a third by its keywords."""
    net.blocks[3].register_forward_pre_hook(lambda each, args: (args[0] + 1,))
    net.blocks[1].register_forward_pre_hook(lambda each, args, kw: (args, {"scale": 0.25}), with_kwargs=True)
    net.blocks[2].register_forward_hook(lambda each, args, kw, out: out * kw["scale"] * 3, with_kwargs=True)


HOOKS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "prune": (on_linears(lambda each: prune.random_unstructured(each, "weight", amount=0.5)), ("parts",)),
    "weight norm, old": (on_linears(weight_norm), ("parts", "stage 3")),
    "spectral norm, old": (on_linears(spectral_norm), ("parts",)),
    "orthogonal": (on_linears(parametrizations.orthogonal), ("blocks",)),
    "own weights": (on_linears(set_by_hook), ("blocks", "parts", "stage 3")),
    "own weights by keyword": (on_linears(partial(set_by_hook, with_kwargs=True)), ("parts",)),
    "own weights of inner modules": (set_by_the_block, ("blocks", "parts")),
    "own weights with noise": (on_linears(set_with_noise), ("parts",)),
    "inputs and outputs": (inputs_and_outputs, ("blocks", "parts")),
    "values of other stages": (gated, ("blocks", "parts")),
    "values that are kept": (noted, ("blocks", "parts")),
    "buffers": (buffers_in_place, ("blocks",)),
    "of all modules": (lambda net: None, ("blocks", "parts")),
}
"""Each under the plans that it is for. Of a parametrised module the parametrisation is placed."""
PLANS: dict[str, dict[str, Any]] = {
    "blocks": {"mesh": "pp=2", "k": 2},
    "parts": {"mesh": "pp=2", "k": 2},
    "stage 3": {"mesh": "pp=2,dp_shard=2", "stage": 3},
}


def program_of(name: str, layout: str) -> Program:
    part = "" if layout == "blocks" else ".linear"
    return Program(
        make=seeded(formed(noting, HOOKS[name][0], blocks=several(Inner, 4), seen=list)),
        batches=[{"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))} for seed in range(2)],
        loss=lambda output, batch: output.square().mean(),
        optimizer=sgd,
        stages={f"blocks.{at}{part}": at // 2 for at in range(4)},
        num_stages=2,
        draws="noise" in name,
    )


@contextmanager
def hooks_of_all_modules() -> Iterator[None]:
    before: Any = lambda each, args: (args[0] * 0.9,) if isinstance(each, nn.Linear) else None  # noqa: E731
    after: Any = lambda each, args, output: output * 0.9 if isinstance(each, Inner) else None  # noqa: E731
    with every.register_module_forward_pre_hook(before), every.register_module_forward_hook(after):
        yield


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in HOOKS for layout in HOOKS[name][1]])
def test_hooks_of_placed_modules_give_the_bits_of_one_process(name: str, layout: str) -> None:
    program = program_of(name, layout)
    with hooks_of_all_modules() if name == "of all modules" else nullcontext():
        assert_trains_like_one_process(program, plan_of(program, **PLANS[layout]))
