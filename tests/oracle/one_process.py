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

LossOfModel = Callable[[nn.Module, Batch], torch.Tensor]
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
    model, weight = program.oracle(), program.loss_weight or count_rows
    optimizer = (optimizer_of or program.optimizer)(list(model.parameters()))
    whole = Trained()
    for batch in program.batches:
        update = train_in_one_process(
            model, optimizer, [batch], loss_of=program.loss_of, num_microbatches=k, clip=clip, loss_weight=weight
        )
        whole.losses += update.losses
        whole.grad_norms += update.grad_norms
        whole.states.append(state_of(model, optimizer))
    model.eval()
    with torch.no_grad():
        parts = parts_of(program.batches[0], k)
        whole.held_out = _mean_loss(model, parts, program.loss_of, weight, backward=False)
    whole.parameters = values_of(model)
    return whole


def train_in_one_process(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    loss: Loss | None = None,
    loss_of: LossOfModel | None = None,
    num_microbatches: int = 1,
    clip: float | None = None,
    loss_weight: Callable[[Batch], float] = count_rows,
    average: bool = True,
) -> Trained:
    """The plain loop on a model that is there. With `loss` it is given the first value of a microbatch."""

    def of_output(model: nn.Module, part: Batch) -> torch.Tensor:
        assert loss is not None
        return loss(model(next(iter(part.values()))), part)

    trained = Trained()
    for batch in batches:
        optimizer.zero_grad()
        parts = parts_of(batch, num_microbatches)
        trained.losses.append(_mean_loss(model, parts, loss_of or of_output, loss_weight, backward=True))
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        for gradient in gradients:
            gradient /= num_microbatches if average else 1
        norm = nn.utils.get_total_norm(gradients)
        if clip is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
        trained.grad_norms.append(norm.item())
        optimizer.step()
    trained.parameters = values_of(model)
    return trained


def _mean_loss(
    model: nn.Module,
    parts: Sequence[Batch],
    loss_of: LossOfModel,
    loss_weight: Callable[[Batch], float],
    *,
    backward: bool,
) -> float:
    """Of the microbatches, whose gradients are added up in `.grad`."""
    weights = [loss_weight(part) for part in parts]
    losses = [0.0] * len(parts)
    for at, factor in enumerate(factors_of(weights)):
        if weights[at]:
            loss = loss_of(model, parts[at])
            if backward:
                (loss if factor == 1.0 else loss * factor).backward()
            losses[at] = loss.item()
    return math.fsum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / math.fsum(weights)
