"""What a pipeline must equal: one process, plain PyTorch, the same microbatches, gradients added up in their order."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from shardwise.plan import split_rows
from tests.engine.expected import adamw as adamw
from tests.engine.oracle import Batch, Loss, Optimizers, factors_of

State = dict[str, torch.Tensor]
"""Parameters and persistent buffers under the model's names, moments as `optimizer/<parameter>/<key>`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A model, the batches it trains on, and where it is cut."""

    make: Callable[[], nn.Module]
    batches: Sequence[Batch]
    """One update each; the first is evaluated at the end."""
    stages: Mapping[str, int] | None = None
    """The cut into `num_stages`; fewer stages take neighbours together. None: balanced."""
    num_stages: int = 4
    loss: Loss | None = None
    """None: the model is called with the whole microbatch and gives its own."""
    make_oracle: Callable[[], nn.Module] | None = None
    """The same model, written so that one process adds gradients in the order of stages; None: it does anyway."""

    def stages_for(self, num_stages: int) -> Mapping[str, int] | None:
        """The cut into `num_stages`."""
        if self.stages is None:
            return None
        return {name: stage * num_stages // self.num_stages for name, stage in self.stages.items()}


@dataclass(kw_only=True)
class Trajectory:
    """Everything that a training shows."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    """After every update. AdamW's first moment is a multiple of the gradient after one update."""
    held_out: float = math.nan
    """The evaluated loss at the end."""


@cache
def expected(case: Case, k: int, *, clip: float | None = None, optimizer_of: Optimizers = adamw) -> Trajectory:
    """One process on `case`, k microbatches per update."""
    model = (case.make_oracle or case.make)()
    optimizer = optimizer_of(list(model.parameters()))
    trained = Trajectory()
    for batch in case.batches:
        optimizer.zero_grad()
        trained.losses.append(_accumulate(case, model, batch, k, backward=True))
        trained.grad_norms.append(_average_and_clip(model, k, clip))
        optimizer.step()
        trained.states.append(state_of(model, optimizer))
    model.eval()
    with torch.no_grad():
        trained.held_out = _accumulate(case, model, case.batches[0], k, backward=False)
    return trained


def microbatches_of(batch: Batch, k: int) -> list[dict[str, Any]]:
    """Rows of every tensor with rows; all else goes to every microbatch."""
    num_rows = next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim)
    return [
        {
            name: value[rows.start : rows.stop] if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in batch.items()
        }
        for rows in split_rows(num_rows, k)
    ]


def loss_of(case: Case, model: nn.Module, part: Batch) -> torch.Tensor:
    """The loss of one microbatch."""
    if case.loss is not None:
        names = inspect.signature(model.forward).parameters
        return case.loss(model(**{name: value for name, value in part.items() if name in names}), part)
    output = model(**part)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output["loss"]
    return loss


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies of all that training changes."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        for key in ("exp_avg", "exp_avg_sq"):
            if key in optimizer.state[parameter]:
                state[f"optimizer/{name}/{key}"] = optimizer.state[parameter][key].clone()
    return {name: value for name, value in state.items() if name not in aliases - parameters.keys()}


def _accumulate(case: Case, model: nn.Module, batch: Batch, k: int, *, backward: bool) -> float:
    parts = microbatches_of(batch, k)
    weights = [float(next(len(v) for v in part.values() if isinstance(v, torch.Tensor) and v.ndim)) for part in parts]
    losses = []
    for part, factor in zip(parts, factors_of(weights), strict=True):
        loss = loss_of(case, model, part)
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
