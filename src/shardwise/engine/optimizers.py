"""Any torch optimizer, unchanged, on the masters that this rank owns."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.buffers import Owned
from shardwise.engine.inventory import Inventory
from shardwise.errors import OptimizerError

OptimizerSource = (
    torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[list[nn.Parameter]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
)


def build(source: OptimizerSource, parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that `source` is, or makes from the parameters in their own shapes and dtypes."""
    if callable(source) and not isinstance(source, torch.optim.Optimizer):
        try:
            source = source(parameters)
        except Exception as error:
            raise OptimizerError(f"the optimizer function raised {type(error).__name__}: {error}") from error
    optimizers = (source,) if isinstance(source, torch.optim.Optimizer) else source
    if not isinstance(optimizers, Sequence) or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise OptimizerError(
            f"optimizer: {type(source).__name__} is not a torch.optim.Optimizer, a sequence of them, or a function "
            f"that returns one"
        )
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise OptimizerError(
                f"{type(optimizer).__name__}.step needs a closure that computes the loss again; shardwise computes "
                f"each loss once per update"
            )
    return tuple(optimizers)


def check_coverage(optimizers: Sequence[torch.optim.Optimizer], inventory: Inventory) -> None:
    """Every trainable parameter is in one group of one optimizer, and nothing else is. Raises OptimizerError."""
    times: dict[str, set[tuple[int, int]]] = defaultdict(set)
    num_foreign = 0
    for at, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if (name := inventory.name_of.get(parameter)) is None:
                    num_foreign += 1
                else:
                    times[name].add((at, number))
    problems = []
    if lost := [spec.name for spec in inventory.specs if spec.trainable and spec.name not in times]:
        problems.append(
            f"{len(lost)} of the model's trainable parameters are in no group: {_listed(lost)}; give them to the "
            f"optimizer, or freeze them "
            "(requires_grad_(False)) before parallelize"
        )
    if num_foreign:
        problems.append(
            f"{num_foreign} of its parameters are not the model's; build it over the parameters of the model that is "
            f"parallelized"
        )
    if twice := [name for name, places in times.items() if len(places) > 1]:
        problems.append(
            f"these are in several groups: {_listed(twice)}; a parameter (or a tie) has one set of settings"
        )
    if problems:
        kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise OptimizerError(f"the optimizer ({kinds}) does not fit the model: " + "; ".join(problems))


def describe_settings(optimizers: Sequence[torch.optim.Optimizer], inventory: Inventory) -> list[str]:
    """One line per group: what must be equal on all ranks."""
    lines = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            names = [inventory.name_of[parameter] for parameter in group["params"]]
            lines.append(f"optimizer {type(optimizer).__name__} {settings} over {names}")
    return lines


@torch.no_grad()
def swap(
    optimizers: Sequence[torch.optim.Optimizer],
    inventory: Inventory,
    shapes: Mapping[str, torch.Size],
    owned: Sequence[Owned],
) -> None:
    """Put the owned masters in the place of the model's parameters: same groups, same settings, state cut along.

    The groups stay the same objects, so that schedulers which hold them go on working.
    """
    owned_of = {each.segment.name: each for each in owned}
    for optimizer in optimizers:
        state = dict(optimizer.state)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            names = list(dict.fromkeys(inventory.name_of[parameter] for parameter in group["params"]))
            old = {inventory.name_of[parameter]: state.get(parameter, {}) for parameter in reversed(group["params"])}
            mine = [name for name in names if name in owned_of]
            group["params"] = [owned_of[name].parameter for name in mine]
            if "param_names" in group:
                group["param_names"] = mine
            for name in mine:
                if old[name]:
                    optimizer.state[owned_of[name].parameter] = _cut(old[name], owned_of[name], shapes[name])


def _cut(state: Mapping[str, Any], owned: Owned, shape: torch.Size) -> dict[str, Any]:
    """State of a whole parameter -> of the owned stretch: what has the parameter's shape is cut."""
    run, master = owned.segment.run, owned.parameter

    def cut(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != shape or key == "step":
            return value
        part = value.to(master.device).reshape(-1)[run.start : run.stop].clone().view(master.shape)
        return part.to(master.dtype) if part.is_floating_point() else part

    return {key: cut(key, value) for key, value in state.items()}


def check_elementwise(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Raise OptimizerError for an optimizer that needs whole matrices: it cannot update slices.

    Found by trial on a small matrix: updating its two halves as vectors must give what updating it whole gives.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            reason = _why_not_elementwise(optimizer, group, device)
            if reason:
                raise OptimizerError(
                    f"{type(optimizer).__name__} cannot update slices of parameters: {reason}. "
                    'Use sw.Sharding(partition="whole"), which gives whole parameters to owners'
                )


def _why_not_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> str:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(4, 6, generator=generator)
        gradients = torch.randn(3, 4, 6, generator=generator)
        try:
            whole = _trial(optimizer, group, [values], [[each] for each in gradients], device)
            halves = _trial(
                optimizer,
                group,
                list(values.reshape(-1).split(12)),
                [list(each.reshape(-1).split(12)) for each in gradients],
                device,
            )
        except Exception as error:  # whatever an unknown optimizer raises is its reason
            return f"tried on a 4 x 6 matrix and on its halves, it raised {type(error).__name__}: {error}"
    if torch.allclose(whole, halves, rtol=1e-5, atol=1e-7):
        return ""
    return "a 4 x 6 matrix updated whole and updated as two halves gave different values"


def _trial(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
) -> torch.Tensor:
    """Run a double of `optimizer` with the settings of `group` on `values`, and give the updated values, flat."""
    double = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    double.__dict__.pop("step", None)  # a scheduler's wrapper is bound to the original
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):
            setattr(double, name, OrderedDict())  # hooks of the user are not for trials
    parameters = [nn.Parameter(each.clone().to(device)) for each in values]
    double.state = defaultdict(dict)
    double.param_groups = [{**group, "params": parameters}]
    if "lr" in group:  # a warm-up may start at 0, where every optimizer looks the same
        double.param_groups[0]["lr"] = torch.full_like(group["lr"], 0.1) if torch.is_tensor(group["lr"]) else 0.1
    if optimizer.state:
        # An optimizer that makes its state when it is built (Adagrad) shows here what a fresh one looks like.
        old = next(iter(optimizer.state.items()))
        for parameter in parameters:
            double.state[parameter] = _fresh_state(old, parameter)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone().to(device)
        double.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _fresh_state(old: tuple[torch.Tensor, Mapping[str, Any]], parameter: nn.Parameter) -> dict[str, Any]:
    like, state = old
    return {
        key: torch.ones_like(parameter)
        if isinstance(value, torch.Tensor) and value.shape == like.shape and key != "step"
        else (value.clone() if isinstance(value, torch.Tensor) else value)
        for key, value in state.items()
    }


def _listed(names: Sequence[str]) -> str:
    """The first few of many names."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
