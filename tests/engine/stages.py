"""Training under stages 2 and 3, and the program that they must equal to the bit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.engine.oracle import (
    Batch,
    Gradients,
    Loss,
    RankOrder,
    Trained,
    factors_of,
    microbatches_of,
    share_of,
)
from tests.engine.oracle import _sum as sum_of
from tests.engine.ranks import assert_same_bits


def values_of_all(model: nn.Module, engine: sw.Engine, channel: sw.Channel) -> dict[str, torch.Tensor]:
    """Copies of the whole parameters, wherever they are; all ranks call it."""
    names = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in sw.full(engine, channel=channel) if name in names}


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

    def run(channel: sw.Channel) -> Trained:
        model = make_model()
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss, loss_weight=loss_weight, channel=channel)
        trained = Trained()
        for batch in batches:
            report = engine.step(share_of(batch, channel.rank, channel.size))
            assert not report.skipped
            trained.losses.append(report.loss)
            trained.grad_norms.append(report.grad_norm)
            after(engine, model, channel)
        trained.parameters = values_of_all(model, engine, channel)
        return trained

    first, *others = sw.simulate(plan.mesh.size, run)
    for other in others:
        assert_same_bits(other, first)
        assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms)
    return first


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
