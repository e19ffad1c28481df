"""Weights that are computed once for several calls, and memory that a forward reads: alike when it runs again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.engine.loops import on_ranks
from tests.engine.loops import plan_of as short_plan_of
from tests.oracle.by_other_ways import in_a_row
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.program import plan_of
from tests.oracle.programs import on_points


class Cached(nn.Module):
    """Computes a weight once for two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.base: Any = parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            output: torch.Tensor = self.base(torch.tanh(self.base(x)))
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


LAYOUTS: list[dict[str, Any]] = [
    {"mesh": "dp_shard=2", "stage": 2, "k": 2},
    {"mesh": "dp_shard=2", "stage": 3},
    {"mesh": "dp_shard=2", "stage": 3, "units": (".",), "activations": sw.Activations(checkpoint="blocks")},
    {"mesh": "pp=2", "k": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", [Cached, ReadsDataAgain])
def test_they_train_like_one_process(kind: Callable[[], nn.Module], layout: dict[str, Any]) -> None:
    """The programs of `tests/oracle` have parametrizations and reads of memory by themselves."""
    program = on_points(lambda: in_a_row(kind))
    assert_trains_like_one_process(program, plan_of(program, **layout))


class CachedAround(Cached):
    """Around two calls of a placed module."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            output: torch.Tensor = self.base(torch.tanh(self.base(self.other(x))))
        return output


@pytest.mark.parametrize("k", [1, 2])
def test_cached_around_calls_of_placed_modules_keeps_real_weights_alone(k: int) -> None:
    stages = {"0.base": 0, "0.other": 0, "1.base": 1, "1.other": 0}
    batches = [{"input": torch.linspace(-1, 1, 16).view(4, 4)}] * 3

    def losses(plan: sw.Plan) -> list[float]:
        make = lambda: nn.Sequential(CachedAround(), CachedAround())  # noqa: E731
        return on_ranks(make, plan, batches, optimizer=torch.optim.AdamW).losses

    assert losses(short_plan_of("pp=2", k=k, stages=stages)) == pytest.approx(losses(short_plan_of(k=k)), rel=1e-6)


def test_a_rank_that_waits_inside_of_cached_leaves_the_cache_of_others_alone() -> None:
    def run(channel: sw.Channel) -> list[float]:
        model, found = Cached(), []
        for step in range(2):
            with torch.no_grad():
                model.base.parametrizations.weight.original0.fill_(1.0 + step)
            with parametrize.cached():
                found.append(model.base.weight.sum().item())
                channel.exchange(b"", purpose="inside")
                if channel.rank:
                    channel.exchange(b"", purpose="inside, again")
            if not channel.rank:
                channel.exchange(b"", purpose="inside, again")
        return found

    for first, second in sw.simulate(2, run):
        assert second == pytest.approx(2 * first)
