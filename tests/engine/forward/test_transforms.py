"""Gradients that a forward or a loss takes itself: the numbers of one process under every plan, or words.

Ways to take one x where it is taken x plans.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import shardwise as sw
from shardwise.errors import MismatchError, ModelError
from tests.covering import pairwise
from tests.oracle.comparison import assert_close, in_one_process
from tests.oracle.places import train
from tests.oracle.program import Program, plan_of, seeded

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by jvp itself

Call = Callable[[torch.Tensor], torch.Tensor]
Way = Callable[[nn.Module, Call, torch.Tensor], Any]


def total(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call(x).square().sum()


def slope(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    (found,) = torch.autograd.grad(total(call, x), x, create_graph=True)
    return (found.norm(dim=-1) - 1).square().mean()


def ratio(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    """An adaptive weight: nothing is differentiated twice, and the graph is used again."""
    weights = list(module.parameters())
    ones, others = call(x).square().mean(), (call(x + 1) - 1).square().mean()
    norms = [
        torch.stack(
            [
                g.square().sum()
                for g in torch.autograd.grad(term, weights, retain_graph=True, allow_unused=True)
                if g is not None
            ]
        ).sum()
        for term in (ones, others)
    ]
    return ones + (norms[0] / (norms[1] + 1e-4)).sqrt().detach() * others


def norm_of_gradients(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    found = torch.autograd.grad(total(call, x), list(module.parameters()), create_graph=True, allow_unused=True)
    return torch.stack([each.square().sum() for each in found if each is not None]).sum().sqrt()


def of_function(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    return grad(lambda x: total(call, x))(x).square().mean()


def pushed(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    return jvp(call, (x,), (torch.ones_like(x),))[1].square().mean()


def per_row(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    return vmap(grad(lambda row: total(call, row)))(x).square().mean()


def inner_step(module: nn.Module, call: Call, x: torch.Tensor) -> Any:
    """One step of the weights, as in MAML."""
    now = dict(module.named_parameters())
    found = grad(lambda given: functional_call(module, given, (x,)).square().mean())(now)
    after = {name: now[name] - 0.1 * found[name] for name in now}
    return functional_call(module, after, (x,)).square().mean()


WAYS: dict[str, Way] = {
    each.__name__: each for each in (slope, ratio, norm_of_gradients, of_function, pushed, per_row, inner_step)
}


class Block(nn.Module):
    def __init__(self, way: Way | None) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(4, 8), nn.Linear(8, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way is not None and torch.is_grad_enabled():
            x = x if x.requires_grad else x.clone().requires_grad_()
            x = x + self.way(self.up, lambda each: torch.tanh(self.up(each)), x)
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Energy(nn.Module):
    """Takes a gradient in a block ("child"), in its forward ("root"), or nowhere."""

    def __init__(self, place: str, way: Way) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(way if place == "child" and at == 1 else None) for at in range(3))
        self.head = nn.Linear(4, 1)
        self.way = way if place == "root" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.through(x)
        if self.way is not None and torch.is_grad_enabled():
            x = x.clone().requires_grad_()
            out = out + self.way(self.blocks[1], lambda each: self.head(self.blocks[1](each)), x)
        return out

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


PLACES = ("child", "root", "loss of output", "loss that calls")
BATCHES = [{"x": torch.linspace(-1, 1, 32).view(8, 4).roll(at, 0) * (1 + at)} for at in range(2)]


def loss_of(place: str, way: Way, model: nn.Module) -> Callable[..., torch.Tensor]:
    def of_output(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = (output - 1).square().mean()
        if place == "loss of output" and torch.is_grad_enabled():
            (found,) = torch.autograd.grad(output.square().sum(), batch["x"], create_graph=True)
            loss = loss + found.square().mean()
        return loss

    def calling(batch: Mapping[str, torch.Tensor]) -> Any:
        x = batch["x"].clone().requires_grad_()
        loss = (model(x) - 1).square().mean()
        return loss + way(model, model, x) if torch.is_grad_enabled() else loss

    return calling if place == "loss that calls" else of_output


def sgd(given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(given, lr=0.05)


def program_of(place: str, way: Way) -> Program:
    """In float64, where another order of sums hardly differs."""
    wants, calls = place == "loss of output", place == "loss that calls"
    return Program(
        make=seeded(lambda: Energy(place, way).double()),
        batches=[{"x": each["x"].double().requires_grad_(wants)} for each in BATCHES],
        loss=None if calls else loss_of(place, way, nn.Identity()),
        loss_with=(lambda model: loss_of(place, way, model)) if calls else None,
        optimizer=sgd,
        rules={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    )


CHECKPOINT = sw.Activations(checkpoint="blocks")
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 2": ("dp_shard=2", {"stage": 2}),
    "stage 3, one unit": ("dp_shard=2", {"stage": 3, "units": (".",)}),
    "stage 3, nested": ("dp_shard=2", {"stage": 3, "units": (".", "blocks.*.up")}),
    "stage 3, checkpoint": ("dp_shard=2", {"stage": 3, "activations": CHECKPOINT}),
    "tp, stage 3": ("dp_shard=2,tp=2", {"stage": 3}),
    "pp": ("pp=2", {"stage": 1, "k": 2}),
    "pp, stage 3": ("pp=2,dp_shard=2", {"stage": 3}),
}
OF_FUNCTIONS = ("pushed", "of_function", "per_row", "inner_step")
OF_PARAMETERS = ("ratio", "norm_of_gradients")


def words_of(way: str, place: str, plan: str) -> str:
    """What may be said where the numbers are not given: the rest has to be right."""
    said = []
    if way == "pushed" and ("stage 3" in plan or "tp" in plan):
        said.append("one forward-mode derivative at a time in a process")
    if way in OF_FUNCTIONS and "checkpoint" in plan and place == "child":
        said.append("Leave the module out of activations.checkpoint")
    if "tp" in plan and way in OF_FUNCTIONS:
        said.append("leave the module out of tensor.rules|gives other numbers when it is cut")
    if "tp" in plan and way in (*OF_PARAMETERS, "pushed"):
        said.append("their losses are .* itself takes gradients of cut parameters")
    if "pp" in plan and place != "child":
        said += [
            "asks for the graph of a value",
            "its stage is not known",
            "Transform functions in the forward of a placed",
        ]
    return "|".join(said)


@pytest.mark.parametrize(("place", "way", "plan"), pairwise(PLACES, list(WAYS), list(PLANS)))
def test_gradients_inside_are_those_of_one_process(place: str, way: str, plan: str) -> None:
    program, (mesh, settings) = program_of(place, WAYS[way]), PLANS[plan]
    cut = plan_of(program, mesh, **settings)
    refusal = ""
    try:
        got = train(program, cut)
    except (ModelError, MismatchError) as error:
        refusal = str(error)
    words = words_of(way, place, plan)
    assert not refusal or (words and re.search(words, refusal)), refusal
    if not refusal:
        assert_close(got, in_one_process(program, cut), relative=1e-8)


def test_ranks_that_skip_a_microbatch_follow_those_that_take_gradients_in_it() -> None:
    def run(channel: sw.Channel, stage: int) -> list[float]:
        engine = sw.parallelize(
            seeded(lambda: Energy("root", slope))(),
            sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=stage)),
            optimizer=sgd,
            loss=lambda output, batch: (output - batch["y"]).square().mean(),
            loss_weight=lambda batch: float(batch["counts"]),
            channel=channel,
        )
        x = BATCHES[0]["x"].chunk(2)[channel.rank]
        parts = [{"x": x, "y": x.sum(), "counts": counts} for counts in ((1.0, 2.0), (0.0, 1.0))[channel.rank]]
        return [engine.step(parts).loss for _ in range(3)]

    assert sw.simulate(2, lambda channel: run(channel, 3)) == sw.simulate(2, lambda channel: run(channel, 2))
