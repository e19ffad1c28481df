"""Training under stages 2 and 3, and the program that they must equal to the bit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.engine.zero.unit_calls import Residence
from shardwise.engine.zero.unshard import Unshard
from tests.engine.oracle import (
    Batch,
    Gradients,
    Loss,
    RankOrder,
    Trained,
    factors_of,
    microbatches_of,
)
from tests.engine.oracle import _sum as sum_of
from tests.engine.ranks import train_on_ranks


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

    def _gradients(self, batch: Batch) -> tuple[Gradients, float]:
        parts = microbatches_of(batch, self.num_ranks, self.num_microbatches)
        weights = [self.loss_weight(part) for of_rank in parts for part in of_rank]
        factors = factors_of(weights)
        losses = [0.0] * len(weights)
        group = self.ranks_per_sum or self.num_ranks
        sums: list[Gradients] = []
        for first in range(0, self.num_ranks, group):
            held: Gradients = {}
            for number in range(self.num_microbatches):
                terms = []
                for rank in range(first, first + group):
                    at = rank * self.num_microbatches + number
                    if not weights[at]:
                        continue
                    loss = self.loss_of(self.model, parts[rank][number])
                    (loss if factors[at] == 1.0 else loss * factors[at]).backward()
                    losses[at] = loss.item()
                    terms.append({name: self._travel(each) for name, each in self._taken().items()})
                for name, value in (sum_of(terms) if terms else {}).items():
                    if name in held:
                        held[name] += value
                    else:
                        dtype = torch.promote_types(self.working(name), self.accumulate)
                        held[name] = value.to(dtype if self.num_microbatches > 1 else value.dtype)
            sums.append(
                {name: value.to(torch.promote_types(self.working(name), self.master)) for name, value in held.items()}
            )
        mean = math.fsum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight) / math.fsum(
            weights
        )
        return sum_of(sums), mean

    def _taken(self) -> Gradients:
        taken = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                taken[name], parameter.grad = parameter.grad, None
        return taken
