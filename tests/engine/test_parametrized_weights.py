"""Parametrizations that come and go in a forward, and memory that a forward reads: alike when it runs again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.engine.loops import mean_square, on_ranks, plan_of


class Added(nn.Module):
    """What an adapter adds to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((4, 1), 0.1)), nn.Parameter(torch.full((1, 4), 0.1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


class Around(nn.Module):
    """Registers on the layer that it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.added = nn.Linear(4, 4), Added()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.base, "weight", self.added)
        output: torch.Tensor = self.base(x)
        parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return output


class Cached(nn.Module):
    """Computes a weight once for two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.base = parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            output: torch.Tensor = self.base(self.base(x))
        return output


class CachedAround(Cached):
    """The same around two calls of a placed module."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            output: torch.Tensor = self.base(torch.tanh(self.base(self.other(x))))
        return output


class ReadsDataAgain(nn.Module):
    """Runs again what reads memory, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def mapped(x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.data + x * self.weight.diagonal()

        output: torch.Tensor = self.map(checkpoint(mapped, x, use_reentrant=False))
        return output


KINDS: tuple[Callable[[], nn.Module], ...] = (Around, Cached, CachedAround, ReadsDataAgain)
BATCHES = [{"input": torch.linspace(-1, 1, 16).view(4, 4)}] * 3


def losses(kind: Callable[[], nn.Module], plan: sw.Plan) -> list[float]:
    settings: Any = {"loss": mean_square, "optimizer": torch.optim.AdamW}
    return on_ranks(lambda: nn.Sequential(kind(), kind()), plan, BATCHES, **settings).losses


@pytest.mark.parametrize("compute", [None, "bfloat16"])
@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_they_train_alike_under_every_plan(
    kind: Callable[[], nn.Module], *, runs_again: bool, compute: str | None
) -> None:
    expected = losses(kind, plan_of(k=2, compute=compute))
    # In bfloat16 gradients of microbatches are added in another order.
    near = pytest.approx(expected, rel=1e-6 if compute is None else 1e-2)
    for plan in (
        plan_of("dp_shard=2", 2, compute=compute),
        plan_of("dp_shard=2", 3, compute=compute),
        plan_of("dp_shard=2", 3, sharding={"units": (".",)}, compute=compute),
        plan_of("pp=2", k=2, compute=compute),
    ):
        again = sw.Activations(checkpoint=("*",)) if runs_again else sw.Activations()
        assert losses(kind, replace(plan, activations=again)) == near


@pytest.mark.parametrize("k", [1, 2])
def test_cached_around_calls_of_placed_modules_keeps_real_weights_alone(k: int) -> None:
    stages = {"0.base": 0, "0.other": 0, "1.base": 1, "1.other": 0}
    expected = pytest.approx(losses(CachedAround, plan_of(k=k)), rel=1e-6)
    assert losses(CachedAround, plan_of("pp=2", k=k, stages=stages)) == expected


def test_a_rank_that_waits_inside_of_cached_leaves_the_cache_of_others_alone() -> None:
    def run(channel: sw.Channel) -> list[float]:
        model, found = Cached(), []
        for step in range(2):
            with torch.no_grad():
                model.base.parametrizations.weight.original0.fill_(1.0 + step)
            with parametrize.cached():
                before = model.base.weight.sum().item()
                channel.exchange(b"", purpose="inside")
                if channel.rank:
                    channel.exchange(b"", purpose="inside, again")
                found.append(before)
            if not channel.rank:
                channel.exchange(b"", purpose="inside, again")
        return found

    for first, second in sw.simulate(2, run):
        assert second == pytest.approx(2 * first)
