"""One claim that many odd models share: on simulated ranks they train to the bits that one process gives."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.oracle import Batch, Optimizers, RankOrder, Trained
from tests.engine.ranks import assert_same_bits, train_on_ranks

Module = TypeVar("Module", bound=nn.Module)

SLICES = sw.Sharding(bucket_bytes=256)
WHOLE = sw.Sharding(bucket_bytes=256, partition="whole")


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum, weight decay and a step count per parameter: what an update too many or too few would show in."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def seeded(make: Callable[[], Module]) -> Callable[[], Module]:
    """`make` with the same random numbers at every call."""

    def build() -> Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return build


def points(seed: int, rows: int, width: int = 4) -> dict[str, torch.Tensor]:
    """[rows, width] points and [rows, 1] values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, width, generator=generator),
        "y": torch.randn(rows, 1, generator=generator),
    }


def square_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean squared error."""
    loss: torch.Tensor = (output - batch["y"]).square().mean()
    return loss


def assert_ranks_train_as_one_process(
    make_model: Callable[[], nn.Module],
    *,
    num_ranks: int,
    sharding: sw.Sharding = SLICES,
    precision: sw.Precision | None = None,
    optimizer: Optimizers = adamw,
    num_microbatches: int = 1,
    batches: Sequence[Batch] = (points(0, 12), points(1, 12), points(2, 12)),
    make_oracle: Callable[[], nn.Module] | None = None,
    working: Callable[[str], torch.dtype] = lambda _: torch.float32,
) -> Trained:
    """Train on ranks and in one process, compare every bit of every parameter, and give what the ranks have."""
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=num_ranks),
        sharding=sharding,
        merge=sw.Merge(microbatches=num_microbatches),
        precision=precision or sw.Precision(),
    )
    got = train_on_ranks(make_model, plan, batches, optimizer=optimizer, loss=square_loss)
    oracle = RankOrder(
        model=(make_oracle or make_model)(),
        make_optimizer=optimizer,
        loss_of=lambda model, batch: square_loss(model(batch["x"]), batch),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        working=working,
    )
    expected = oracle.train(batches)
    assert_same_bits(got, expected)
    assert got.losses == pytest.approx(expected.losses, rel=1e-12)
    return got
