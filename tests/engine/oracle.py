"""What the engine must equal: one process, plain PyTorch, none of the engine's ideas.

Two programs. `train_in_one_process` is what anybody would write. `RankOrder` adds up in the order in which ranks do and
rounds where ranks round; it is what the engine must equal to the bit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import nn

from shardwise.plan import split_rows

Batch = Mapping[str, Any]
Loss = Callable[[Any, Batch], torch.Tensor]
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Gradients = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Trained:
    """What training left behind."""

    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)


def rows_of(batch: Batch, rows: range) -> dict[str, Any]:
    """The rows of a batch."""
    return {name: value[rows.start : rows.stop] for name, value in batch.items()}


def share_of(batch: Batch, rank: int, num_ranks: int) -> dict[str, Any]:
    """The share of one data rank: consecutive rows, as equal as can be."""
    return rows_of(batch, split_rows(len(next(iter(batch.values()))), num_ranks)[rank])


def microbatches_of(batch: Batch, num_ranks: int, k: int) -> list[list[dict[str, Any]]]:
    """For each rank its k microbatches."""
    shares = [share_of(batch, rank, num_ranks) for rank in range(num_ranks)]
    return [[rows_of(share, rows) for rows in split_rows(len(next(iter(share.values()))), k)] for share in shares]


def factors_of(weights: Sequence[float]) -> list[float]:
    """What makes the plain mean of losses their weighted mean; exactly 1 where all weigh the same."""
    mean = math.fsum(weights) / len(weights)
    return [1.0 if len(set(weights)) == 1 else weight / mean for weight in weights]


def count_rows(batch: Batch) -> float:
    """The weight of a microbatch without `loss_weight`."""
    return float(len(next(iter(batch.values()))))


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def train_in_one_process(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    loss: Loss,
    num_microbatches: int = 1,
    clip: float | None = None,
    loss_weight: Callable[[Batch], float] = count_rows,
    average: bool = True,
) -> Trained:
    """Gradients of consecutive microbatches added up in `.grad`, divided, clipped by torch, and one optimizer step."""
    trained = Trained()
    for batch in batches:
        [parts] = microbatches_of(batch, 1, num_microbatches)
        weights = [loss_weight(part) for part in parts]
        optimizer.zero_grad()
        total = 0.0
        for part, weight, factor in zip(parts, weights, factors_of(weights), strict=True):
            if weight:
                value = loss(model(next(iter(part.values()))), part)
                (value if factor == 1.0 else value * factor).backward()
                total += value.item() * weight / math.fsum(weights)
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        for gradient in (parameter.grad for parameter in parameters if average):
            assert gradient is not None
            gradient /= num_microbatches
        norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)
        trained.losses.append(total)
        trained.grad_norms.append(float(norm))
        optimizer.step()
    trained.parameters = values_of(model)
    return trained


@dataclass(kw_only=True)
class RankOrder:
    """Masters, working copies and sums in one process, with the order and the roundings that ranks have.

    `model` is built in its own dtype and converted: each parameter computes in `working(name)`.
    """

    model: nn.Module
    make_optimizer: Optimizers
    loss_of: Callable[[nn.Module, Batch], torch.Tensor]
    """The loss of the model on one microbatch."""
    num_ranks: int = 1
    ranks_per_sum: int | None = None
    """So many ranks are summed first, then their sums are (replicas of owners); None: all in one sum."""
    num_microbatches: int = 1
    clip: float | None = None
    loss_weight: Callable[[Batch], float] = count_rows
    working: Callable[[str], torch.dtype] = lambda _: torch.float32
    master: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    def train(self, batches: Sequence[Batch], *, counts: Sequence[int] | None = None) -> Trained:
        """One update per batch; `counts`: the number of microbatches of each, where it changes."""
        trained = Trained()
        masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            dtype = torch.promote_types(self.master, self.working(name))
            masters[name] = nn.Parameter(parameter.detach().to(dtype, copy=True))
            parameter.data = parameter.data.to(self.working(name))
        optimizer = self.make_optimizer(list(masters.values()))
        for at, batch in enumerate(batches):
            if counts is not None:
                self.num_microbatches = counts[at]
            total, loss = self._gradients(batch)
            for name, master in masters.items():
                master.grad = None
                if name in total:
                    master.grad = total[name].to(master.dtype) / (self.num_ranks * self.num_microbatches)
            trained.losses.append(loss)
            trained.grad_norms.append(self._clip([each for each in masters.values() if each.grad is not None]))
            optimizer.step()
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(masters[name].data)
        trained.parameters = values_of(self.model)
        return trained

    def _gradients(self, batch: Batch) -> tuple[Gradients, float]:
        """The sum over all microbatches, and the mean loss."""
        parts = microbatches_of(batch, self.num_ranks, self.num_microbatches)
        weights = [self.loss_weight(part) for of_rank in parts for part in of_rank]
        factors = factors_of(weights)
        losses: list[float] = []
        sums: list[Gradients] = []
        for of_rank in parts:
            held: Gradients = {}
            for part in of_rank:
                loss, factor = self.loss_of(self.model, part), factors[len(losses)]
                (loss if factor == 1.0 else loss * factor).backward()
                losses.append(loss.item())
                self._take_gradients(held)
            sums.append(held)
        if self.num_ranks > 1:
            sums = [{name: self._travel(each) for name, each in held.items()} for held in sums]
        group = self.ranks_per_sum or self.num_ranks
        sums = [_sum(sums[at : at + group]) for at in range(0, self.num_ranks, group)]
        mean = math.fsum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / math.fsum(weights)
        return _sum(sums), mean

    def _take_gradients(self, held: Gradients) -> None:
        for name, parameter in self.model.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if name in held:
                held[name] += gradient
            elif self.num_microbatches == 1:
                held[name] = gradient
            else:
                held[name] = gradient.to(torch.promote_types(gradient.dtype, self.accumulate))

    def _travel(self, gradient: torch.Tensor) -> torch.Tensor:
        """Rounded to `reduce` where that is narrower, and back to add."""
        if torch.promote_types(gradient.dtype, self.reduce) == gradient.dtype != torch.float64:
            gradient = gradient.to(self.reduce)
        return gradient.to(torch.promote_types(gradient.dtype, self.master))

    def _clip(self, masters: Sequence[nn.Parameter]) -> float:
        """Clip by the norm that torch takes in one process; over ranks it is summed in float64 and rounded once."""
        gradients = [each.grad for each in masters if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.num_ranks > 1:
            squares = math.fsum(float(each.double().square().sum()) for each in gradients)
            widest = reduce(torch.promote_types, [each.dtype for each in gradients], torch.float32)
            norm = torch.tensor(math.sqrt(squares), dtype=widest)
        if self.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(masters, self.clip, norm)
        return float(norm)


def _sum(terms: Sequence[Gradients]) -> Gradients:
    """Added in order."""
    total = dict(terms[0])
    for term in terms[1:]:
        for name, value in term.items():
            total[name] = total[name] + value if name in total else value
    return total
