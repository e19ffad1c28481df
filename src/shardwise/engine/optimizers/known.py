"""Any torch optimizer, unchanged, on the masters that this rank owns.

    group["params"] of the user    swap, 2 owners of slices             state of w, 2 x 3
    [w 6 elements, b 2]            rank 0  [w[0:4]]                     exp_avg 6 elements -> 4 and 2
                                   rank 1  [w[4:6], b]                  step, 0-d          -> a copy on each rank

Group dicts stay the same objects, so that schedulers which hold them go on working. A plain program asks with the
model's parameter, `optimizer.state[model.weight]`: it gets what there is of the master (`StateOfMasters`).
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.optimizers.traits import OptimizerTraits, UpdateTraits, in_table, refusal_of_closure
from shardwise.engine.parameter_kinds import inner_by_path, is_shell
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.torch_private import TAKES_SCALE
from shardwise.engine.zero.flat_params import Owned
from shardwise.errors import OptimizerError, few_of, in_words
from shardwise.plan import Parameter
from shardwise.plan.optimizer_entries import flat_state, named_optimizer, nested_state, python_type, values_of
from shardwise.plan.saved_settings import PYTHON_DTYPES, NamedOptimizer

OptimizerFunction: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
"""f(the model's parameters, in their own shapes) -> an optimizer over them, or several; also an optimizer's class."""

OptimizerSource: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerFunction | None
"""Optimizers over the model's parameters, or the function that makes them; None for a model that is not trained."""


def build(source: OptimizerSource, parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that `source` is, or makes from the parameters in their own shapes and dtypes."""
    if source is None:  # then nothing may be trainable: see `check_coverage`
        return ()
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
            raise refusal_of_closure(optimizer)
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
            f"{len(lost)} of the model's trainable parameters are in no group: {few_of(lost)}. Give them to the "
            "optimizer, or freeze them (requires_grad_(False)) before parallelize"
        )
    # Often the parameters of another build of the model: it would train tensors that no forward reads.
    if num_foreign:
        problems.append(
            f"{num_foreign} of its parameters are not the model's; build it over the parameters of the model that is "
            "parallelized. For those of a loss, put model and loss into one module, whose forward gives the loss. Or "
            "build a second optimizer over them, and step it after engine.step"
        )
    if twice := [name for name, places in times.items() if len(places) > 1]:
        problems.append(f"these are in several groups: {few_of(twice)}; a parameter (or a tie) has one set of settings")
    if problems:
        kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        given = f"the optimizer ({kinds})" if kinds else "no optimizer (None)"
        raise OptimizerError(f"{given} does not fit the model: " + "; ".join(problems))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownOptimizer:
    """An optimizer and what was known of it before it got this rank's masters."""

    optimizer: torch.optim.Optimizer
    parameters: tuple[tuple[str, ...], ...]
    """For each group the names of all parameters that it trains, with owners on any rank; frozen ones are left out."""
    given: tuple[tuple[str, ...], ...]
    """For each group the names of all that it was given, ties as often as they were in it. Those that were frozen when
    the engine was made are among them: they are trained once they are unfrozen."""
    traits: UpdateTraits

    def taking_in(self, added: Mapping[int, Sequence[str]]) -> "KnownOptimizer":
        """With parameters that came into its groups, perhaps into new ones: {number of the group: names}."""
        num_groups = len(self.optimizer.param_groups)
        return replace(
            self,
            parameters=(*self.parameters, *((),) * (num_groups - len(self.parameters))),
            given=tuple(
                (*(self.given[at] if at < len(self.given) else ()), *added.get(at, ())) for at in range(num_groups)
            ),
        )

    def named(self, name_of: Mapping[torch.Tensor, str] | None = None) -> NamedOptimizer:
        """The optimizer's class, its groups and their settings. name_of: also the state here that is no tensor."""
        num_groups = len(self.optimizer.param_groups)
        if num_groups != len(self.parameters):
            raise OptimizerError(
                f"{type(self.optimizer).__name__} has {num_groups} groups, and had {len(self.parameters)} in the last "
                "step; the next engine.step(batch) takes the others in"
            )
        values = () if name_of is None else self._values(name_of)
        return named_optimizer(self.optimizer, self.parameters, made=self.traits.made, values=values)

    def entries(self, name_of: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Its state here as (name of the parameter, key, tensor); Python values as 0-d tensors, without None.

        Raises OptimizerError for other values.
        """
        for name, key, value in self._values(name_of):
            if isinstance(value, torch.Tensor) and is_shell(value):
                yield from ((name, f"{key}.{path}", each) for path, each in inner_by_path(value).items())
            elif isinstance(value, torch.Tensor):
                yield name, key, value.detach()
            elif value is not None:
                yield name, key, torch.tensor(value, dtype=torch_dtype(PYTHON_DTYPES[python_type(name, key, value)]))

    def _values(self, name_of: Mapping[torch.Tensor, str]) -> Iterator[tuple[str, str, Any]]:
        return values_of(type(self.optimizer).__name__, self.optimizer.state, name_of)


def know(every: Sequence[OptimizerTraits], inventory: Inventory) -> tuple[KnownOptimizer, ...]:
    """Note the names of all parameters, before `swap` leaves each rank with its own."""
    trainable = {spec.name for spec in inventory.specs if spec.trainable}
    known = []
    for traits in every:
        groups = traits.optimizer.param_groups
        given = tuple(tuple(map(inventory.name_of.__getitem__, group["params"])) for group in groups)
        known.append(
            KnownOptimizer(
                optimizer=traits.optimizer,
                parameters=tuple(tuple(name for name in dict.fromkeys(names) if name in trainable) for names in given),
                given=given,
                traits=traits.of_all,
            )
        )
    return tuple(known)


def can_skip_on_device(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether all of them leave out a step by a flag that is on the device: torch's `fused=True`, as a rule."""
    # The protocol of torch's GradScaler, without its older form, in which `step` takes the scaler itself.
    return all(
        getattr(each, TAKES_SCALE, False) is True
        # A load may have changed the settings since.
        and all(group.get("fused", True) for group in each.param_groups)
        and "grad_scaler" not in inspect.signature(type(each).step).parameters
        for each in optimizers
    )


@contextmanager
def skipping(optimizers: Sequence[torch.optim.Optimizer], found_inf: torch.Tensor | None) -> Iterator[None]:
    """Steps inside change nothing where `found_inf`, on the device, is 1."""
    given = {"grad_scale": None, "found_inf": found_inf} if found_inf is not None else {}
    for optimizer in optimizers:
        vars(optimizer).update(given)
    try:
        yield
    finally:
        # They hold for these steps: a step of the user's own after `relayout` must not see them.
        for optimizer in optimizers:
            for name in given:
                vars(optimizer).pop(name, None)


@contextmanager
def on_host(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Steps inside are on masters in the host's memory: by torch's fused kernels for the CPU where the settings do not
    decide, with what the settings have on a device brought here."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for group in (group for optimizer in optimizers for group in _fusable(optimizer)):
        changed.append((group, "fused", None))
        group["fused"] = True
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for key, value in [
            (key, value) for key, value in group.items() if key == "capturable" or torch.is_tensor(value)
        ]:
            here = value.cpu() if torch.is_tensor(value) else False  # torch captures no step on the CPU
            if here is not value:
                changed.append((group, key, value))
                group[key] = here
    try:
        yield
    finally:
        # The settings stay the user's: schedulers, checkpoints and a relayout to a plan without a host see them.
        for group, key, value in changed:
            if torch.is_tensor(value):
                value.copy_(group[key])
            group[key] = value


def _fusable(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The groups that leave open whether torch's optimizer updates in one pass over memory, and in which it can."""
    if in_table(optimizer) is not None:
        for group in optimizer.param_groups:
            is_open = "fused" in group and not any(group.get(key) for key in ("foreach", "differentiable"))
            if (
                is_open
                and group["fused"] is None
                and all(map(torch.is_floating_point, group["params"]))
                and not (group.get("momentum") and _begins_late(optimizer, group))
            ):
                yield group


def _begins_late(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether some parameters get their first update now, and others had theirs: torch's fused SGD raises then."""
    states = (optimizer.state.get(each, {}) for each in group["params"] if each.grad is not None)
    return len({any(value is not None for value in state.values()) for state in states}) > 1


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
        optimizer.state.update(of_no_parameter(state))
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


def of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What some optimizers keep in their state for all parameters, by a key of their choice."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def keys_not_along(
    state: Mapping[torch.Tensor, Mapping[str, Any]], shapes: Mapping[torch.Tensor, Sequence[int]] | None = None
) -> frozenset[str]:
    """Keys whose tensors do not have a number for each element; a scalar parameter does not show the difference.

    shapes: of parameters, where they are not those that they have now.
    """
    differ = {
        key
        for parameter, entries in state.items()
        if isinstance(parameter, torch.Tensor)
        for key, value in flat_state(entries).items()
        if isinstance(value, torch.Tensor) and value.shape != (shapes or {}).get(parameter, parameter.shape)
    }
    return frozenset(differ | {"step"})


def _cut(state: Mapping[str, Any], not_along: frozenset[str], owned: Owned, spec: Parameter) -> dict[str, Any]:
    """State of a whole parameter -> of the owned stretch: what has a number for each element is cut."""
    run, master = owned.segment.run, owned.parameter

    def cut(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or key == "step":  # torch leaves `step` where it is
            return reachable(value, master.device)
        if key in not_along or value.shape != spec.global_shape or is_shell(value):  # of a whole parameter
            return value.to(master.device)
        local = value if spec.portion is None else portion_of(value, spec.portion)
        part = local.reshape(-1)[run.start : run.stop]
        dtype = master.dtype if part.is_floating_point() else part.dtype
        # A copy, not a view: it would keep the state of the whole parameter in memory. Only the part moves.
        return part.to(device=master.device, dtype=dtype, copy=True).view(master.shape)

    return nested_state({key: cut(key, value) for key, value in flat_state(state).items()})


def reachable(value: Any, device: torch.device) -> Any:
    """State that is not cut, where an update on `device` reads it: updates on the host read nothing on another one."""
    return value.to(device) if torch.is_tensor(value) and device.type == "cpu" else value


class MasterOf:
    """What the optimizers of this rank have for a parameter of the model."""

    def __init__(self, model: nn.Module, inventory: Inventory, updated: Sequence[Owned], *, owns_all: bool) -> None:
        """inventory: of the whole model. updated: what the optimizers have. owns_all: whether each rank has all."""
        self._model = model
        self._masters = [each.parameter for each in updated]
        self._numbers = frozenset(map(id, self._masters))
        # Else on no rank, also for what happens to be whole on one: ranks run one program.
        self._whole = {each.segment.name: each.parameter for each in updated} if owns_all else {}
        self._elsewhere = set() if owns_all else {spec.name for spec in inventory.specs if spec.trainable}

    def __call__(self, parameter: Any) -> nn.Parameter | None:
        """The master; None of what is no trained parameter. Raises OptimizerError where it is not whole here."""
        if id(parameter) in self._numbers:  # the first step asks with each master, and would go through the model
            return None
        # Asked anew: a rank keeps no parameters of other stages, and a reference, a weak one too, keeps torch from
        # swapping a parameter.
        named = self._model.named_parameters() if isinstance(parameter, torch.Tensor) else ()
        name = next((name for name, each in named if each is parameter), None)
        if name in self._elsewhere:
            raise OptimizerError(
                f"optimizer.state[p] of parameter {name!r}: a rank has the state of parts, or of some parameters. "
                "sw.full_state_dict(engine, optimizer=True) gives what the plain optimizer has; inside `with "
                "engine.whole():` it can be written"
            )
        return None if name is None else self._whole.get(name)


class StateOfMasters(defaultdict[Any, Any]):
    """The state of an optimizer that has masters, which gives for a parameter of the model what there is of its master.

    A step asks for masters, which are there, and meets nothing of this.
    """

    master_of: Callable[[Any], nn.Parameter | None] = staticmethod(lambda _: None)

    def __missing__(self, key: Any) -> Any:
        """The state of the master. Raises OptimizerError where it is a part."""
        master = self.master_of(key)
        return super().__missing__(key) if master is None else self[master]

    def __contains__(self, key: object) -> bool:
        """The same."""
        return super().__contains__(key) or super().__contains__(self.master_of(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """The same."""
        return self[key] if key in self else default  # noqa: SIM401

    def __reduce__(self) -> Any:
        """As torch's: the engine is no part of it."""
        return defaultdict, (dict,), None, None, iter(self.items())


def follow_states(optimizers: Sequence[torch.optim.Optimizer], master_of: Callable[[Any], nn.Parameter | None]) -> None:
    """Let the states of optimizers answer for parameters of the model from here on."""
    for optimizer in optimizers:
        state: Any = getattr(optimizer, "state", None)
        if type(state) is defaultdict:
            # Of an optimizer that wraps another one, which may have the same object, the state stays what it is.
            if any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values()):
                continue
            optimizer.state = state = StateOfMasters(dict, state)
        if isinstance(state, StateOfMasters):
            state.master_of = master_of
