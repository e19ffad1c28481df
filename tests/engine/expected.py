"""One claim that many odd models share: on simulated ranks they train to the bits that one process gives."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.ranks import assert_same_bits, train_on_ranks
from tests.oracle.batches import Batch, points, square_loss
from tests.oracle.one_process import Trained
from tests.oracle.program import Optimizers, adamw, seeded, sgd
from tests.oracle.rank_order import RankOrder

__all__ = [
    "SLICES",
    "WHOLE",
    "adamw",
    "assert_ranks_train_as_one_process",
    "points",
    "seeded",
    "sgd",
    "square_loss",
]

SLICES = sw.Sharding(bucket_bytes=256)
WHOLE = sw.Sharding(bucket_bytes=256, partition="whole")


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
