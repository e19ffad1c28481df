"""Buffers of the model: after every update all ranks hold what data rank 0's forward left in them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.covering import covering
from tests.engine.loops import begun, plan_of
from tests.oracle.batches import points, share_of, square_loss
from tests.oracle.program import adamw


class Normed(nn.Module):
    """A batch norm: running statistics and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.norm(self.first(x)))
        return y.float()


class Writing(nn.Module):
    """A model whose forward runs `write` on it; its buffers are of several dtypes, one under two names."""

    def __init__(self, write: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.write, self.linear = write, nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("any_negative", torch.tensor([False, False]))
        self.register_buffer("exact", torch.zeros(3, 0, dtype=torch.float64))
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("last", torch.zeros(4), persistent=False)
        self.register_buffer("unset", None)
        self.also_mean = nn.Module()
        self.also_mean.register_buffer("mean", self.get_buffer("mean"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self, x)
        y: torch.Tensor = self.linear(x)
        return y


def write_nothing(model: Any, x: torch.Tensor) -> None:
    """Leave all buffers alone."""


def write_in_place(model: Any, x: torch.Tensor) -> None:
    model.mean.mul_(0.9).add_(x.mean(0))
    model.seen.add_(len(x))
    model.any_negative[1] |= bool((x < 0).any())
    model.turn.add_(x.sum() * 1j)
    model.last.copy_(x[-1])


def replace(model: Any, x: torch.Tensor) -> None:
    model.mean = model.mean * 0.9 + x.mean(0)
    model.seen = model.seen + len(x)
    model.last = x[-1].clone()


def write_on_negative_sums(model: Any, x: torch.Tensor) -> None:
    if x.sum() < 0:
        model.last.copy_(x[0])


def come_and_go(model: Any, x: torch.Tensor) -> None:
    model.last = None if model.last is not None else x[0].clone()
    model.unset = x[:1].clone()


def engine_of(channel: sw.Channel, make: Any, plan: sw.Plan) -> Any:
    return begun(channel, make, plan, optimizer=adamw, loss=square_loss)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        each.dtype == other[name].dtype and torch.equal(each, other[name]) for name, each in one.items()
    )


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Without the one that comes later than the plan, which stays the rank's own."""
    return {name: each.clone() for name, each in model.named_buffers() if name != "unset"}


KINDS: dict[str, Any] = {
    "norm": Normed,
    "in place": lambda: Writing(write_in_place),
    "replaced": lambda: Writing(replace),
    "come and go": lambda: Writing(come_and_go),
    "of one rank": lambda: Writing(write_on_negative_sums),
}


@pytest.mark.parametrize(
    ("kind", "mesh", "k", "compute"),
    covering(
        list(KINDS), ["single", "dp_shard=3", "dp_replicate=2,dp_shard=2"], [1, 3], [None, "bfloat16"], strength=2
    ),
)
def test_buffers_written_or_replaced_follow_data_rank_zero(kind: str, mesh: str, k: int, compute: str | None) -> None:
    """They are those of a copy that saw data rank 0's microbatches alone; running statistics stay in float32."""
    compute = compute if kind == "norm" else None
    plan = plan_of(mesh, k=k, precision=sw.Precision(compute=compute, keep=("norm",) if compute else ()))
    num_ranks = plan.mesh.size

    def run(channel: sw.Channel) -> list[Any]:
        engine, found = engine_of(channel, KINDS[kind], plan), []
        for seed in range(3):
            alone, share = (
                copy.deepcopy(engine.model),
                share_of(points(seed, 4 * k * num_ranks), channel.rank, num_ranks),
            )
            for at in range(k):
                alone(share_of(share, at, k)["x"])
            engine.step(share)
            found.append((buffers_of(alone), buffers_of(engine.model)))
        return found

    results: Any = sw.simulate(num_ranks, run)
    for of_rank in results:
        assert all(same(got, expected) for (expected, _), (_, got) in zip(results[0], of_rank, strict=True))
    if num_ranks > 1 and kind in ("norm", "in place", "replaced"):  # or else there would be nothing to give
        assert any(not torch.equal(each, results[1][0][0][name]) for name, each in results[0][0][0].items())


@pytest.mark.parametrize(
    ("write", "num_bytes"),
    [(write_nothing, []), (write_in_place, [4 * 4 + 8 + 2 + 2 * 8 + 4 * 4] * 2), (replace, [4 * 4 + 8 + 4 * 4] * 2)],
)
def test_only_buffers_that_changed_are_sent_in_one_call_per_update(write: Any, num_bytes: list[int]) -> None:
    def run(channel: sw.Channel) -> list[int]:
        recorded = sw.Recorded(channel)
        engine = engine_of(recorded, lambda: Writing(write), plan_of("dp_shard=2"))
        for seed in range(2):
            engine.step(points(seed + channel.rank, 4))
        return [call.bytes_sent for call in recorded.calls if call.purpose == "buffers of the model"]

    assert sw.simulate(2, run)[0] == num_bytes
