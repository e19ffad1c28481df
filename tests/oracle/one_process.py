"""What anybody would write: one process, plain PyTorch, the same microbatches, gradients added up in their order.

    expected(program, 3, clip=0.3)      # losses, norms, states after every update, the evaluated loss at the end

`rank_order.py` has the same with the sums of ranks, and `comparison.py` says which of them a plan has to equal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from tests.oracle.batches import Batch, count_rows, factors_of, parts_of
from tests.oracle.program import Loss, Optimizers, Program

State = dict[str, torch.Tensor]
"""Parameters and persistent buffers under the model's names, moments as `optimizer/<parameter>/<key>`."""


@dataclass(kw_only=True)
class Trained:
    """Everything that a training shows."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    """After every update. AdamW's first moment is a multiple of the gradient after one update."""
    held_out: float = math.nan
    """The evaluated loss at the end."""
    parameters: State = field(default_factory=dict)
    """At the end."""


def values_of(model: nn.Module) -> State:
    """Copies of the parameters, on the CPU."""
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies of all that training changes."""
    return state_under_names(model, dict(model.named_parameters()), optimizer)


def state_under_names(
    model: nn.Module, trained: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> State:
    """Copies of all that training changes; `trained` are the parameters of the optimizer, by the model's names."""
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    aliases -= {name for name, _ in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items() if name not in aliases}
    for name, parameter in trained.items():
        for key, value in (optimizer.state[parameter] if optimizer and parameter in optimizer.state else {}).items():
            if isinstance(value, torch.Tensor) and key != "step" and value.numel():
                state[f"optimizer/{name}/{key}"] = value.clone()
    return state


@cache
def expected(program: Program, k: int, *, clip: float | None = None, optimizer_of: Optimizers | None = None) -> Trained:
    """One process on `program`, k microbatches per update."""
    model = program.oracle()
    optimizer = (optimizer_of or program.optimizer)(list(model.parameters()))
    trained = Trained()
    for batch in program.batches:
        optimizer.zero_grad()
        trained.losses.append(_accumulate(program, model, batch, k, backward=True))
        trained.grad_norms.append(_average_and_clip(model, k, clip))
        optimizer.step()
        trained.states.append(state_of(model, optimizer))
    model.eval()
    with torch.no_grad():
        trained.held_out = _accumulate(program, model, program.batches[0], k, backward=False)
    trained.parameters = values_of(model)
    return trained


def _accumulate(program: Program, model: nn.Module, batch: Batch, k: int, *, backward: bool) -> float:
    """The mean loss of k microbatches, whose gradients are added up in `.grad`."""
    parts = parts_of(batch, k)
    weights = [(program.loss_weight or count_rows)(part) for part in parts]
    losses = []
    for part, weight, factor in zip(parts, weights, factors_of(weights), strict=True):
        if not weight:
            losses.append(0.0)
            continue
        loss = program.loss_of(model, part)
        if backward:
            (loss if factor == 1.0 else loss * factor).backward()
        losses.append(loss.item())
    return math.fsum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / math.fsum(weights)


def _average_and_clip(model: nn.Module, k: int, clip: float | None) -> float:
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= k
    return torch.nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip).item()


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
    """`expected` for a model that is there: it is given the first value of the batch."""
    trained = Trained()
    for batch in batches:
        parts = parts_of(batch, num_microbatches)
        weights = [loss_weight(part) for part in parts]
        optimizer.zero_grad()
        total = 0.0
        for part, weight, factor in zip(parts, weights, factors_of(weights), strict=True):
            if weight:
                value = loss(model(next(iter(part.values()))), part)
                (value if factor == 1.0 else value * factor).backward()
                total += value.item() * weight / math.fsum(weights)
        trained.losses.append(total)
        trained.grad_norms.append(_average_and_clip(model, num_microbatches if average else 1, clip))
        optimizer.step()
    trained.parameters = values_of(model)
    return trained
