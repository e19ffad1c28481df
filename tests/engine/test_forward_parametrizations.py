"""Parametrizations that come and go in a forward, and memory that a forward reads: alike when it runs again."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import shardwise as sw


class Added(nn.Module):
    """What an adapter adds to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((4, 1), 0.1)), nn.Parameter(torch.full((1, 4), 0.1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


class Inside(nn.Linear):
    """Registers on itself."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.added = Added()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self, "weight", self.added)
        output = super().forward(input)
        parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
        return output


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


class CachedAround(nn.Module):
    """The same around two calls of a placed module."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.other = parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            output: torch.Tensor = self.base(torch.tanh(self.base(self.other(x))))
        return output


class ReadsData(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + nn.functional.linear(input, self.weight.data * self.scale, self.bias)


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


KINDS: tuple[Callable[[], nn.Module], ...] = (Inside, Around, Cached, CachedAround, ReadsData, ReadsDataAgain)


def trained(kind: Callable[[], nn.Module], plan: sw.Plan) -> list[float]:
    def run(channel: sw.Channel) -> list[float]:
        torch.manual_seed(0)
        engine = sw.parallelize(
            nn.Sequential(kind(), kind()),
            plan,
            optimizer=torch.optim.AdamW,
            loss=lambda output, _: output.float().square().mean(),
            channel=channel,
        )
        row = plan.mesh.coordinates(channel.rank)["dp_shard"]
        ranks = plan.mesh.dp_shard
        rows = torch.linspace(-1, 1, 16).view(4, 4)[row * 4 // ranks : (row + 1) * 4 // ranks]
        return [engine.step({"input": rows}).loss for _ in range(3)]

    return sw.simulate(plan.mesh.size, run)[0]


@pytest.mark.parametrize("compute", [None, "bfloat16"])
@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_they_train_alike_under_every_plan(
    kind: Callable[[], nn.Module], *, runs_again: bool, compute: str | None
) -> None:
    def plan_of(stage: int, units: tuple[str, ...] | None = None, k: int = 1, **mesh: int) -> sw.Plan:
        return sw.Plan(
            mesh=sw.Mesh(**mesh),
            merge=sw.Merge(microbatches=k),
            sharding=sw.Sharding(stage=stage, units=units),
            activations=sw.Activations(checkpoint=("*",) if runs_again else None),
            precision=sw.Precision(compute=compute),
        )

    expected = trained(kind, sw.Plan(merge=sw.Merge(microbatches=2), precision=sw.Precision(compute=compute)))
    # In bfloat16 gradients of microbatches are added in another order.
    near = pytest.approx(expected, rel=1e-6 if compute is None else 1e-2)
    for plan in (
        plan_of(2, dp_shard=2),
        plan_of(3, dp_shard=2),
        plan_of(3, (".",), dp_shard=2),
        plan_of(1, k=2, pp=2),
    ):
        assert trained(kind, plan) == near


@pytest.mark.parametrize("k", [1, 2])
def test_cached_around_calls_of_placed_modules_keeps_real_weights_alone(k: int) -> None:
    stages = {"0.base": 0, "0.other": 0, "1.base": 1, "1.other": 0}
    staged = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages=stages), merge=sw.Merge(microbatches=k))
    plain = sw.Plan(merge=sw.Merge(microbatches=k))
    assert trained(CachedAround, staged) == pytest.approx(trained(CachedAround, plain), rel=1e-6)


def test_a_rank_that_waits_inside_of_cached_leaves_the_cache_of_others_alone() -> None:
    def run(channel: sw.Channel) -> list[float]:
        model = Cached()
        found = []
        for step in range(2):
            with torch.no_grad():
                model.base.bias.fill_(step)
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

    torch.manual_seed(0)
    first, second = sw.simulate(2, run)[0]
    assert second == pytest.approx(2 * first)
