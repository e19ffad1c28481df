"""Any torch optimizer, unchanged, on the masters that this rank owns."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.inventory import Inventory
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.zero.flat_params import Owned
from shardwise.errors import OptimizerError, few_of, in_words
from shardwise.plan import Parameter

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
            raise OptimizerError(f"the optimizer function raised {in_words(error)}") from error
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
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise OptimizerError(
                "SparseAdam updates from sparse gradients only, and shardwise gives it dense ones; use torch.optim.Adam"
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
            f"{len(lost)} of the model's trainable parameters are in no group: {few_of(lost)}; give them to the "
            "optimizer, or freeze them (requires_grad_(False)) before parallelize"
        )
    if num_foreign:
        problems.append(
            f"{num_foreign} of its parameters are not the model's; build it over the parameters of the model that is "
            "parallelized"
        )
    if twice := [name for name, places in times.items() if len(places) > 1]:
        problems.append(f"these are in several groups: {few_of(twice)}; a parameter (or a tie) has one set of settings")
    if problems:
        kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise OptimizerError(f"the optimizer ({kinds}) does not fit the model: " + "; ".join(problems))


def describe_settings(optimizers: Sequence[torch.optim.Optimizer], inventory: Inventory) -> list[str]:
    """One line per group: what must be equal on all ranks."""
    lines = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
            names = [inventory.name_of[parameter] for parameter in group["params"]]
            lines.append(f"optimizer {type(optimizer).__name__} {settings} over {names}")
    return lines


def _plain(value: Any) -> Any:
    """A setting as every process writes it: what is no value (a function, say) is written as its type."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if isinstance(value, bool | int | float | complex | str | None) else type(value).__name__


@torch.no_grad()
def swap(optimizers: Sequence[torch.optim.Optimizer], inventory: Inventory, owned: Sequence[Owned]) -> None:
    """Put the owned masters in the place of the model's parameters: same groups, same settings, state cut along.

    The groups stay the same objects, so that schedulers which hold them go on working.
    """
    owned_of = {each.segment.name: each for each in owned}
    spec_of = {spec.name: spec for spec in inventory.specs}
    for optimizer in optimizers:
        state = dict(optimizer.state)
        # Parameters may have been cut since the state was made for the whole ones.
        whole_shapes = {
            parameter: spec_of[inventory.name_of[parameter]].global_shape
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        not_along = keys_not_along(state, whole_shapes)
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
                    optimizer.state[owned_of[name].parameter] = _cut(
                        old[name], not_along, owned_of[name], spec_of[name]
                    )


def keys_not_along(
    state: Mapping[torch.Tensor, Mapping[str, Any]], shapes: Mapping[torch.Tensor, Sequence[int]] | None = None
) -> frozenset[str]:
    """Keys whose tensors do not have a number for each element: of a scalar parameter alone that could not be told.

    shapes: of parameters, where they are not those that they have now.
    """
    differ = {
        key
        for parameter, entries in state.items()
        for key, value in entries.items()
        if isinstance(value, torch.Tensor) and value.shape != (shapes or {}).get(parameter, parameter.shape)
    }
    return frozenset(differ | {"step"})


def _cut(state: Mapping[str, Any], not_along: frozenset[str], owned: Owned, spec: Parameter) -> dict[str, Any]:
    """State of a whole parameter -> of the owned stretch: what has a number for each element is cut."""
    run, master = owned.segment.run, owned.parameter

    def cut(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or key == "step":  # torch leaves `step` where it is
            return value
        value = value.to(master.device)
        if key in not_along or value.shape != spec.global_shape:
            return value
        local = value if spec.portion is None else portion_of(value, spec.portion)
        part = local.reshape(-1)[run.start : run.stop].clone().view(master.shape)
        return part.to(master.dtype) if part.is_floating_point() else part

    return {key: cut(key, value) for key, value in state.items()}
