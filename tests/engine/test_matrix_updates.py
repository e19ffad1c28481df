"""Optimizers that must see whole matrices, where ranks have parts of them: brought together, updated once, given back.

The oracle is torch's optimizer in one process, stepped on the gradients that the ranks report: masters, averages and
states equal it to the bit, under every layout. That these gradients are right is a matter of the layouts' own tests;
losses are compared with those of one process here.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import _muon

import shardwise as sw
from shardwise.errors import OptimizerError
from tests.checkpoint.layouts import assembled
from tests.covering import pairwise

RULES = {"mix": "packed_colwise", "down": "row"}
"""`mix` is cut into two boxes on a rank, unevenly; `first` and `unused` are whole on all ranks along tp."""


class Gated(nn.Module):
    """Matrices of several forms, one without a gradient and one that is frozen; vectors and an odd one for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, bias=False)
        self.mix = nn.Linear(10, 18)
        self.down = nn.Linear(9, 10, bias=False)
        self.unused = nn.Linear(3, 4, bias=False)
        self.fixed = nn.Linear(10, 10, bias=False)
        self.head = nn.Linear(10, 5)
        self.fixed.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        gate, up = self.mix(hidden).chunk(2, -1)
        hidden = hidden + self.down(torch.tanh(gate) * up)
        out: torch.Tensor = self.head(torch.tanh(self.fixed(hidden)))
        return out


def gated() -> Gated:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gated()


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """What is no matrix of a hidden layer goes to AdamW."""
    matrices = [each for name, each in model.named_parameters() if each.ndim == 2 and "head" not in name]
    others = [each for name, each in model.named_parameters() if each.ndim != 2 or "head" in name]
    return [torch.optim.Muon(matrices, lr=0.02, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


class Mixed(torch.optim.Optimizer):
    """One optimizer with groups of two kinds, as the first Muon had: matrices by their norm, the others by the sign."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    state["step"] = state.get("step", 0) + 1
                    momentum.lerp_(parameter.grad, 0.5)
                    way = momentum / momentum.norm() if group["whole"] else momentum.sign()
                    parameter.sub_(way, alpha=group["lr"])


def mixed(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    whole = [each for each in named.values() if each.ndim == 2]
    others = [each for each in named.values() if each.ndim != 2]
    return [Mixed([{"params": others, "whole": False}, {"params": whole, "whole": True}])]


def batch_of(seed: int, rows: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, size, generator=generator) for name, size in (("x", 6), ("y", 5))}


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (output.float() - batch["y"]).square().mean()


def plan_of(mesh: str, *, sharding: Mapping[str, Any] | None = None, **settings: Any) -> sw.Plan:
    axes = sw.Mesh.parse(mesh)
    return sw.Plan(
        mesh=axes,
        sharding=sw.Sharding(**{"bucket_bytes": 400, **(sharding or {})}),
        tensor=sw.Tensor(rules=RULES if axes.tp > 1 else None),
        pipeline=sw.Pipeline(stages={"first": 0, "mix": 0, "down": 0, "unused": 1, "fixed": 1, "head": 1})
        if axes.pp > 1
        else sw.Pipeline(),
        **settings,
    )


Pieces = dict[sw.Piece, torch.Tensor]
Rank = tuple[list[float], list[Pieces], list[Pieces]]
"""Losses, and for each step gradients and the state after it."""

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def cloned(pieces: Mapping[sw.Piece, torch.Tensor]) -> Pieces:
    return {piece: each.detach().cpu().clone() for piece, each in pieces.items()}


def train(
    plans: Sequence[sw.Plan], *, optimizers: Optimizers = muon_and_adamw, device: str = "cpu", spoiled: int = -1
) -> list[Rank]:
    """A step under each of the plans, one after the other. spoiled: the step whose gradient is not finite."""

    def run(channel: sw.Channel) -> Rank:
        model = gated()
        engine = sw.parallelize(model, plans[0], optimizer=optimizers(model), loss=loss_of, channel=channel)
        losses, gradients, states = [], [], []
        for step, plan in enumerate(plans):
            if plan is not engine.plan:
                engine = sw.relayout(engine, plan)
            share = {name: each.chunk(plan.mesh.num_data_ranks) for name, each in batch_of(step).items()}
            mine = {name: each[plan.mesh.data_rank(channel.rank)] for name, each in share.items()}
            if step == spoiled:
                mine["y"] = mine["y"] * math.inf
            losses.append(engine.step(mine).loss)
            gradients.append(cloned(engine.gradients()))
            states.append(cloned(engine.state()))
        return losses, gradients, states

    return sw.simulate(plans[0].mesh.size, run, device=device)


def in_one_process(num_steps: int, optimizers: Optimizers = muon_and_adamw) -> list[float]:
    model, losses = gated(), []
    steppers = optimizers(model)
    for step in range(num_steps):
        model.zero_grad()
        loss = loss_of(model(batch_of(step)["x"]), batch_of(step))
        loss.backward()
        for each in steppers:
            each.step()
        losses.append(loss.item())
    return losses


def assert_updates_are_those_of_torch(
    ranks: Sequence[Rank], *, optimizers: Optimizers = muon_and_adamw, spoiled: int = -1
) -> None:
    """Masters and states after each step, against torch's optimizers on the gradients of all ranks."""
    model = gated()
    named = dict(model.named_parameters())
    steppers = optimizers(model)
    for step in range(len(ranks[0][0])):
        gradients = assembled(rank[1][step] for rank in ranks)
        state = assembled(rank[2][step] for rank in ranks)
        for name, parameter in named.items():
            found = gradients.get(name)
            parameter.grad = None if found is None or not parameter.requires_grad else found.view(parameter.shape)
        named["unused.weight"].grad = None
        for each in steppers if step != spoiled else ():
            each.step()
        for name, parameter in named.items():
            master = state.get(f"optimizer/{name}/master", state[name])
            assert torch.equal(master, parameter.detach().reshape(-1)), (step, name)
        for each in steppers:
            for name, parameter in named.items():
                for key, value in each.state.get(parameter, {}).items():
                    held = state[f"optimizer/{name}/{key}"]
                    assert torch.equal(held, torch.as_tensor(value).reshape(-1).to(held.dtype)), (step, name, key)


MESHES = {
    "tp": "tp=2",
    "dp x tp": "dp_shard=2,tp=2",
    "pp x tp": "pp=2,tp=2",
    "uneven": "dp_replicate=2,tp=3",
    "replicas": "dp_replicate=2,dp_shard=2",
    "dp": "dp_shard=3",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cast": {"precision": sw.Precision(compute="bfloat16")},
    "merged": {"merge": sw.Merge(microbatches=2), "clip_grad_norm": 0.3, "sharding": {"owners": "dp_shard"}},
    "whole": {"sharding": {"partition": "whole"}, "average": sw.Average(decay=0.5)},
}


@pytest.mark.parametrize(("mesh", "stage", "setting"), pairwise(list(MESHES), [0, 1, 2, 3], list(SETTINGS)))
def test_matrices_are_updated_as_in_one_process(mesh: str, stage: int, setting: str) -> None:
    settings = dict(SETTINGS[setting])
    sharding = {"stage": stage, **settings.pop("sharding", {})}
    ranks = train([plan_of(MESHES[mesh], sharding=sharding, **settings)] * 3)
    assert_updates_are_those_of_torch(ranks)
    if setting in ("plain", "whole"):
        assert ranks[0][0] == pytest.approx(in_one_process(3), rel=1e-4)
