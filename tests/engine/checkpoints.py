"""A model with everything in it that checkpoints stumble over, and the plainest checkpoint there is: in memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.engine.model.state import EngineRestoration
from shardwise.space import check_cover
from tests.oracle.batches import points, share_of, square_loss
from tests.oracle.program import Optimizers, adamw, sgd

State = dict[sw.Piece, torch.Tensor]


SLICES = sw.Sharding(bucket_bytes=200)
WHOLE = sw.Sharding(bucket_bytes=200, partition="whole")
STAGE0 = sw.Sharding(stage=0, bucket_bytes=200)
SHARDINGS = {"slice": SLICES, "whole": WHOLE, "stage0": STAGE0}


class Mixed(nn.Module):
    """A tie, a frozen part, statistics, a scalar, one element, nothing at all, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 9)
        self.norm = nn.BatchNorm1d(9)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.gate = nn.Parameter(torch.tensor([0.5]))
        self.long = nn.Parameter(torch.randn(17))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.unused = nn.Parameter(torch.randn(5))
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.again = nn.Linear(4, 9)
        self.again.weight = self.first.weight
        self.out = nn.Linear(9, 1)
        self.order = nn.Parameter(torch.arange(9), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.scalar.dtype)
        hidden = self.norm(self.frozen(self.first(x))[:, self.order].float()).to(x.dtype) * self.gate
        y: torch.Tensor = self.out(torch.tanh(hidden) * self.scalar + self.again(x) + self.long.sum())
        return y.float()


class Counting(torch.optim.Optimizer):
    """Momentum written by hand: Python values of every kind, a tensor for each parameter, and None at first."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, [0.5, 0.25]), "schedule": lambda step: step})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "decay": 1.0, "even": True, "late": None, "one": torch.zeros(1)}
                state["step"] += 1
                state["decay"] *= 0.99
                state["even"] = not state["even"]
                state["one"] += 0.125
                if state["step"] == 3:
                    state["late"] = torch.zeros_like(parameter)
                momentum = parameter.grad if state["late"] is None else state["late"].lerp_(parameter.grad, 0.5)
                parameter.data.add_(momentum, alpha=-group["lr"] * state["decay"] * (1 + state["one"].item()))


OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": adamw,
    "sgd": sgd,
    "counting": Counting,
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint in memory: every tensor whole, and the settings."""

    tensors: dict[str, torch.Tensor]
    settings: dict[str, Any]

    def stored(self) -> dict[str, sw.Piece]:
        return {
            name: sw.Piece(name=name, dtype=str(each.dtype).removeprefix("torch."), global_shape=tuple(each.shape))
            for name, each in self.tensors.items()
        }


def saved(by_rank: Sequence[tuple[State, dict[str, Any]]]) -> Saved:
    """Put together what ranks hold, element by element, with a check that it fits together."""
    tensors: dict[str, torch.Tensor] = {}
    known: dict[sw.Piece, torch.Tensor] = {}
    for state, _ in by_rank:
        for piece, value in state.items():
            if piece in known:
                assert torch.equal(known[piece], value)
            known[piece] = value
            assert piece.box.offset == (0,) * len(piece.global_shape)
            tensor = tensors.setdefault(piece.name, torch.zeros(piece.global_shape, dtype=value.dtype))
            tensor.view(-1)[piece.elements.start : piece.elements.stop] = value.reshape(-1)
    assert check_cover(known) == []
    settings = json.loads(json.dumps(by_rank[0][1], allow_nan=False))
    for _, other in by_rank:
        for mine, yours in zip(settings["optimizers"], other["optimizers"], strict=True):
            for key in ("plain", "none"):
                mine[key] |= yours[key]
            assert {**mine, "plain": {}, "none": {}} == {**yours, "plain": {}, "none": {}}
        assert {**settings, "optimizers": []} == {**other, "optimizers": []}
    return Saved(tensors=tensors, settings=settings)


def snapshot(engine: sw.Engine) -> tuple[State, dict[str, Any]]:
    return {piece: value.clone() for piece, value in engine.state().items()}, engine.settings()


def load(engine: sw.Engine, checkpoint: Saved, *, strict: bool = True) -> EngineRestoration:
    """The plain loader: whole tensors by name; a working copy and its master stand in for each other."""
    restoration = engine.restore(checkpoint.stored(), checkpoint.settings)
    assert not strict or list(restoration.findings) == []
    for piece, target in restoration.wanted.items():
        names = [piece.name, f"optimizer/{piece.name}/master", piece.name.removesuffix("/master")[len("optimizer/") :]]
        found = [
            name for name in names if name in checkpoint.tensors and checkpoint.tensors[name].dtype == target.dtype
        ]
        if not found:
            assert not strict, piece
            continue
        source = checkpoint.tensors[found[0]].reshape(-1)[piece.elements.start : piece.elements.stop]
        target.copy_(source.view(target.shape))
    restoration.finish()
    return restoration


def plan_of(ranks: int, sharding: sw.Sharding, *, compute: str | None = None, k: int = 1) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(dp_shard=ranks),
        sharding=sharding,
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute=compute),
        clip_grad_norm=1.0,
    )


def engine_of(channel: sw.Channel, plan: sw.Plan, optimizer: Any, *, seed: int = 0) -> sw.Engine:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Mixed()
    return sw.parallelize(model, plan, optimizer=optimizer, loss=square_loss, channel=channel)


def train(engine: sw.Engine, channel: sw.Channel, steps: range) -> list[tuple[float, float]]:
    reports = [engine.step(share_of(points(at, 24), channel.rank, channel.size)) for at in steps]
    assert not any(report.skipped for report in reports)
    return [(report.loss, report.grad_norm) for report in reports]


def after(plan: sw.Plan, optimizer: Any, num_steps: int) -> Saved:
    def run(channel: sw.Channel) -> tuple[State, dict[str, Any]]:
        engine = engine_of(channel, plan, optimizer)
        train(engine, channel, range(num_steps))
        return snapshot(engine)

    return saved(sw.simulate(plan.mesh.size, run))


def assert_same_bits(one: Mapping[Any, torch.Tensor], other: Mapping[Any, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype == other[key].dtype, key
        same = torch.equal(value.reshape(-1).view(torch.uint8), other[key].reshape(-1).view(torch.uint8))
        assert same, f"{key}: {value} and {other[key]}"


def everything(engine: sw.Engine) -> dict[str, torch.Tensor]:
    """Also what a rank does not own: the working copies of all parameters, and buffers that are not saved."""
    return {
        name: value.detach().clone()
        for name, value in [*engine.model.named_parameters(), *engine.model.named_buffers()]
    }
