"""What an optimizer can be trusted with, found by trying it: doubles of it update small matrices whole and in parts.

No optimizer is known by its name; one that somebody wrote yesterday is judged like those of torch.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import nn

from shardwise.engine.optimizers import keys_not_along
from shardwise.errors import OptimizerError, in_words


def check_elementwise(
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    *,
    instead: str = 'Use sw.Sharding(partition="whole") (sharding.partition), which gives whole parameters to owners',
) -> None:
    """Raise OptimizerError for an optimizer that cannot update slices; `instead`: what to do then.

    Found by trial on a small matrix: two optimizers that update a half each, as ranks do, must do what one does.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if reason := _why_not_elementwise(optimizer, group, device, instead):
                raise OptimizerError(f"{type(optimizer).__name__} cannot update slices of parameters: {reason}")


def _why_not_elementwise(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, instead: str
) -> str:
    generator = torch.Generator().manual_seed(0)
    # The parameter and its gradients. In float64, so that updates of any size are told from rounding.
    matrix = list(torch.randn(5, 4, 6, dtype=torch.float64, generator=generator))
    first, second = ([each.reshape(-1)[at : at + 12] for each in matrix] for at in (0, 12))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            whole = _trial(optimizer, group, [matrix], device)
            together = _trial(optimizer, group, [first, second], device)
            apart = torch.cat([_trial(optimizer, group, [half], device) for half in (first, second)])
        except Exception as error:  # whatever an unknown optimizer raises is its reason
            return f"tried on a 4 x 6 matrix and on its halves, it raised {in_words(error)}. {instead}"
    if not _same(whole, together):
        return f"a 4 x 6 matrix updated whole and updated as two halves gave different values. {instead}"
    if not _same(together, apart):
        return (
            "what it does to one half depends on the other, and ranks hold only their own. Use sw.Sharding(stage=0) "
            "(sharding.stage), where each rank updates everything"
        )
    return ""


def check_apart(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Raise OptimizerError for an optimizer whose update of one parameter depends on the others."""
    generator = torch.Generator().manual_seed(0)
    matrices = [list(torch.randn(5, 4, 6, dtype=torch.float64, generator=generator)) for _ in range(2)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                try:
                    together = _trial(optimizer, group, matrices, device)
                    apart = torch.cat([_trial(optimizer, group, [each], device) for each in matrices])
                except Exception:  # it wants other shapes than these: nothing can be told
                    continue
            if not _same(together, apart):
                raise OptimizerError(
                    f"{type(optimizer).__name__} cannot update parameters apart: what it does to one depends on the "
                    "others. Use sw.Sharding(stage=0) (sharding.stage), where each rank updates everything"
                )


def find_whole_keys(optimizer: torch.optim.Optimizer, device: torch.device) -> frozenset[str]:
    """Keys of the state that an elementwise optimizer holds once per parameter, not once per element.

    Of a slice of one element alone it could not be told.
    """
    generator = torch.Generator().manual_seed(0)
    stretch = list(torch.randn(3, 12, dtype=torch.float64, generator=generator))
    keys: frozenset[str] = frozenset()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for group in optimizer.param_groups:
            keys |= keys_not_along(_run_double(optimizer, group, [stretch], device).state)
    return keys


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-6, atol=1e-12)


def _trial(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    stretches: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> torch.Tensor:
    """Run a double of `optimizer` with the settings of `group`; by how much it moved the values, flat."""
    double = _run_double(optimizer, group, stretches, device)
    parameters = double.param_groups[0]["params"]
    moves = [each.detach().cpu() - values for each, (values, *_) in zip(parameters, stretches, strict=True)]
    return torch.cat([move.reshape(-1) for move in moves])


def _run_double(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    stretches: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> torch.optim.Optimizer:
    """A double of `optimizer` with the settings of `group`, after it updated parameters of its own.

    `stretches`: for each parameter its values, and then its gradient at each step.
    """
    double = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):
            setattr(double, name, OrderedDict())  # hooks of the user are not for trials
        elif name != "step":  # a scheduler's wrapper is bound to the original
            setattr(double, name, copy(value) if isinstance(value, dict | list | set) else value)
    parameters = [nn.Parameter(values.clone().to(device)) for values, *_ in stretches]
    double.state = defaultdict(dict)
    double.param_groups = [{**group, "params": parameters}]
    if "lr" in group:  # a warm-up may start at 0, where every optimizer looks the same
        double.param_groups[0]["lr"] = torch.full_like(group["lr"], 0.1) if torch.is_tensor(group["lr"]) else 0.1
    if optimizer.state:
        # An optimizer that makes its state when it is built (Adagrad) shows here what a fresh one looks like.
        not_along = keys_not_along(optimizer.state)
        example = next(iter(optimizer.state.values()))
        for parameter in parameters:
            double.state[parameter] = {
                key: torch.ones_like(parameter)
                if isinstance(value, torch.Tensor) and key not in not_along
                else deepcopy(value)
                for key, value in example.items()
            }
    for gradients in zip(*(rest for _, *rest in stretches), strict=True):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone().to(device)
        double.step()
    return double
