"""Weights that are computed once for several calls."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import shardwise as sw
from tests.engine.loops import on_ranks, plan_of


class Cached(nn.Module):
    """Computes a weight once for two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.base: Any = parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            output: torch.Tensor = self.base(torch.tanh(self.base(x)))
        return output


class CachedAround(Cached):
    """Around two calls of a placed module."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            output: torch.Tensor = self.base(torch.tanh(self.base(self.other(x))))
        return output


STAGES = {"0.base": 0, "0.other": 0, "1.base": 1, "1.other": 0}


@pytest.mark.parametrize(
    ("plan", "k"),
    [
        *[(plan_of("pp=2", stages=STAGES), 1), (plan_of("pp=2", k=2, stages=STAGES), 2)],
        *[
            (plan_of("dp_shard=2", stage, checkpoint=again), 2)
            for stage, again in ((2, None), (3, None), (3, ("0", "1")))
        ],
    ],
)
def test_cached_around_calls_of_placed_modules_keeps_real_weights_alone(plan: sw.Plan, k: int) -> None:
    batches = [{"input": torch.linspace(-1, 1, 16).view(4, 4)}] * 3

    def losses(plan: sw.Plan) -> list[float]:
        make = lambda: nn.Sequential(CachedAround(), CachedAround())  # noqa: E731
        return on_ranks(make, plan, batches, optimizer=torch.optim.AdamW).losses

    assert losses(plan) == pytest.approx(losses(plan_of(k=k)), rel=1e-6)


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
