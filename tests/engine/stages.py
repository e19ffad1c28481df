"""Training under stages 2 and 3, and the program that they must equal to the bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.engine.zero.unit_calls import Residence
from shardwise.engine.zero.unshard import Unshard
from tests.engine.ranks import train_on_ranks
from tests.oracle.batches import Batch
from tests.oracle.one_process import Trained
from tests.oracle.program import Loss
from tests.oracle.rank_order import RankOrder


def values_of_all(model: nn.Module, engine: sw.Engine, channel: sw.Channel) -> dict[str, torch.Tensor]:
    """Copies of the whole parameters, wherever they are; all ranks call it."""
    names = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in sw.full(engine, channel=channel) if name in names}


def gathering_of(engine: sw.Engine) -> Unshard:
    sharded = engine._computation._passes
    assert isinstance(sharded, Unshard)
    return sharded


def assert_at_rest(engine: sw.Engine) -> None:
    for unit in gathering_of(engine).units:
        assert (unit.num_uses, unit.residence, unit.works) == (0, Residence.SHARDED, [])
        for bucket in unit.buckets:
            assert bucket.working.untyped_storage().nbytes() == 0


def train_sharded(
    make_model: Callable[[], nn.Module],
    plan: sw.Plan,
    batches: Sequence[Batch],
    *,
    optimizer: Any,
    loss: Loss | None,
    loss_weight: Any = None,
    after: Callable[[sw.Engine, nn.Module, sw.Channel], None] = lambda *_: None,
) -> Trained:
    """As `train_on_ranks`, for parameters that no rank has whole; `after` is called after each update."""

    return train_on_ranks(
        make_model,
        plan,
        batches,
        optimizer=optimizer,
        loss=loss,
        loss_weight=loss_weight,
        after=after,
        values=values_of_all,
    )


@dataclass(kw_only=True)
class RoundOrder(RankOrder):
    """`RankOrder` that sums every microbatch over the ranks of a group, then the microbatches, then the groups."""

    rounds: bool = True
