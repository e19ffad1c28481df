"""Any torch optimizer, unchanged, on the masters that this rank owns; and what an unknown one can be trusted with.

No optimizer is known by its name: doubles of it update small matrices, whole and in parts, and are compared.

    group["params"] of the user    swap, 2 owners of slices             state of w, 2 x 3
    [w 6 elements, b 2]            rank 0  [w[0:4]]                     exp_avg 6 elements -> 4 and 2
                                   rank 1  [w[4:6], b]                  step, 0-d          -> a copy on each rank

Group dicts stay the same objects, so that schedulers which hold them go on working.
"""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.inventory import Inventory
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.zero.flat_params import Owned
from shardwise.errors import OptimizerError, few_of, in_words
from shardwise.plan import Parameter
from shardwise.plan.optimizer_entries import NEVER_ALONG, python_type, python_types, values_of
from shardwise.plan.saved_settings import PYTHON_DTYPES, NamedOptimizer, OptimizerGroup

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
        # Of the class: a scheduler has put a wrapper in the place of the instance's `step`.
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise OptimizerError(
                f"{type(optimizer).__name__}.step needs a closure that computes the loss again; shardwise computes "
                f"each loss once per update"
            )
        # By its class for once: it raises at the first dense gradient, in the middle of a step.
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
    # Often the parameters of another build of the model: it would train tensors that no forward reads.
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
    # The parameter and its gradients. In float64, so that updates of any size differ from rounding.
    matrix = list(torch.randn(5, 4, 6, dtype=torch.float64, generator=generator))
    # Halves are 1-D, as slices in a bucket are: an optimizer that goes by rows or shapes gives itself away. Four
    # steps, because momentum shows from the second one on.
    first, second = ([each.reshape(-1)[at : at + 12] for each in matrix] for at in (0, 12))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            # Three runs tell two reasons apart: what goes by the shape (whole against halves), and what couples
            # parameters in one step (halves together against each alone), as a norm over a group does.
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
    # Owners of whole parameters update them one by one, so matrices are tried together and each alone.
    matrices = [list(torch.randn(5, 4, 6, dtype=torch.float64, generator=generator)) for _ in range(2)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                try:
                    together = _trial(optimizer, group, matrices, device)
                    apart = torch.cat([_trial(optimizer, group, [each], device) for each in matrices])
                except Exception:  # it wants other shapes than these: nothing can be concluded
                    continue
            if not _same(together, apart):
                raise OptimizerError(
                    f"{type(optimizer).__name__} cannot update parameters apart: what it does to one depends on the "
                    "others. Use sw.Sharding(stage=0) (sharding.stage), where each rank updates everything"
                )


def find_whole_keys(optimizer: torch.optim.Optimizer, device: torch.device) -> frozenset[str]:
    """Keys of the state that an elementwise optimizer holds once per parameter, not once per element.

    A slice of one element does not show the difference, so a trial on twelve does.
    """
    generator = torch.Generator().manual_seed(0)
    stretch = list(torch.randn(3, 12, dtype=torch.float64, generator=generator))
    keys: frozenset[str] = frozenset()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for group in optimizer.param_groups:
            keys |= keys_not_along(_run_double(optimizer, group, [stretch], device).state)
    return keys


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Not to the bit: kernels may round 24 elements and 12 differently. A real difference is of the size of the
    # update.
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
    # Not built anew, because constructors differ; not `deepcopy`, which would copy the user's parameters and moments.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownOptimizer:
    """An optimizer and what was known of it before it got this rank's masters."""

    optimizer: torch.optim.Optimizer
    parameters: tuple[tuple[str, ...], ...]
    """For each group the names of all that it trains, on whichever rank their owner is; frozen parameters are not."""
    whole_keys: frozenset[str]
    """Keys of state that is not cut along with a parameter, whatever its shape."""

    def named(self) -> NamedOptimizer:
        """The optimizer's class, its groups and their settings."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.parameters):
            raise OptimizerError(
                f"{type(self.optimizer).__name__} has {len(groups)} groups, and had {len(self.parameters)} in "
                "parallelize; add groups before parallelize, which decides who owns what"
            )
        return NamedOptimizer(
            kind=type(self.optimizer).__name__,
            groups=tuple(
                OptimizerGroup(parameters=names, settings=group)
                for names, group in zip(self.parameters, groups, strict=True)
            ),
        )

    def named_with_state(self, name_of: Mapping[torch.Tensor, str]) -> NamedOptimizer:
        """As `named`, with the state on this rank that is no tensor."""
        # Numbers and None are no tensors: a checkpoint keeps which they were, so that a load gives back a float where
        # a float was.
        python = [each for each in self._values(name_of) if not isinstance(each[2], torch.Tensor)]
        return replace(
            self.named(),
            plain=python_types(each for each in python if each[2] is not None),
            none=frozenset(key for _, key, value in python if value is None),
        )

    def entries(self, name_of: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Its state here as (name of the parameter, key, tensor); Python values as 0-d tensors, without None.

        Raises OptimizerError for other values.
        """
        for name, key, value in self._values(name_of):
            if isinstance(value, torch.Tensor):
                yield name, key, value.detach()
            elif value is not None:
                yield name, key, torch.tensor(value, dtype=torch_dtype(PYTHON_DTYPES[python_type(name, key, value)]))

    def _values(self, name_of: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, str, Any]]:
        return values_of(type(self.optimizer).__name__, self.optimizer.state, name_of)


def know(
    optimizers: Sequence[torch.optim.Optimizer], inventory: Inventory, whole_keys: Sequence[frozenset[str]]
) -> tuple[KnownOptimizer, ...]:
    """Note the names of all parameters, before `swap` leaves each rank with its own."""
    trainable = {spec.name for spec in inventory.specs if spec.trainable}
    return tuple(
        KnownOptimizer(
            optimizer=optimizer,
            parameters=tuple(
                tuple(
                    name
                    for name in dict.fromkeys(map(inventory.name_of.__getitem__, group["params"]))
                    if name in trainable
                )
                for group in optimizer.param_groups
            ),
            whole_keys=keys | NEVER_ALONG,
        )
        for optimizer, keys in zip(optimizers, whole_keys, strict=True)
    )


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
            # By name: objects of one tie that are both in the group are one master.
            names = list(dict.fromkeys(inventory.name_of[parameter] for parameter in group["params"]))
            # Reversed: of the objects of a tie the first one's state is written last, and stays.
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
    """Keys whose tensors do not have a number for each element; a scalar parameter does not show the difference.

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
        # A clone, not a view: it would keep the state of the whole parameter in memory.
        part = local.reshape(-1)[run.start : run.stop].clone().view(master.shape)
        return part.to(master.dtype) if part.is_floating_point() else part

    return {key: cut(key, value) for key, value in state.items()}
