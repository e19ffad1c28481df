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
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.comm.accelerators import random_numbers_kept
from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.inventory import Inventory
from shardwise.engine.packed_tensors import inner_by_path, is_shell, rebuilt
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.zero.flat_params import Owned
from shardwise.errors import OptimizerError, few_of, in_words
from shardwise.plan import Parameter
from shardwise.plan.optimizer_entries import NEVER_ALONG, python_type, python_types, values_of
from shardwise.plan.saved_settings import PYTHON_DTYPES, NamedOptimizer, OptimizerGroup

OptimizerFunction: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
"""f(the model's parameters, in their own shapes) -> an optimizer over them, or several; also an optimizer's class."""

OptimizerSource: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | OptimizerFunction
"""Optimizers over the model's parameters, or the function that makes them."""


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
            f"{len(lost)} of the model's trainable parameters are in no group: {few_of(lost)}. Give them to the "
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
    if keys := _keys_of_blocks(optimizer, group, device):
        return (
            f"its state ({', '.join(sorted(keys))}) has numbers for blocks of a parameter, and slices would cut the "
            f"blocks. {instead}"
        )
    generator = torch.Generator().manual_seed(0)
    # The parameter and its gradients. In float64, so that updates of any size differ from rounding.
    matrix = list(torch.randn(5, 4, 6, dtype=torch.float64, generator=generator))
    # Halves are 1-D, as slices in a bucket are: an optimizer that goes by rows or shapes gives itself away. Four
    # steps, because momentum shows from the second one on.
    first, second = ([each.reshape(-1)[at : at + 12] for each in matrix] for at in (0, 12))
    with random_numbers_kept(device):
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
            "its update of one half depends on the other, and each rank holds only its part. Use "
            "sw.Sharding(stage=0) (sharding.stage), where each rank updates everything"
        )
    return ""


def _keys_of_blocks(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> set[str]:
    """Keys of state that an optimizer keeps packed, in blocks that have a scale each."""
    # Small parameters get plain state: the trials of updates would not meet the blocks.
    sizes = (1 << 14, 1 << 15)

    def state_at(size: int) -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(0)
        with random_numbers_kept(device):
            stretch = list(torch.randn(2, size, generator=generator))
            return next(iter(_run_double(optimizer, group, [stretch], device, begins=True).state.values()), {})

    try:
        state = state_at(sizes[0])
        found = {key for key, value in state.items() if isinstance(value, torch.Tensor) and is_shell(value)}
        counts = {key: each.numel() for key, each in state.items() if isinstance(each, torch.Tensor)}
        # A table of its codes has one size, a scale for each block has not.
        unlike = {key for key, count in counts.items() if count not in (1, sizes[0])} - found
        if unlike:
            larger = state_at(sizes[1])
            found |= {key for key in unlike if larger[key].numel() != counts[key]}
    except Exception:  # it wants something else: the trials of updates say what
        return set()
    return found


def check_apart(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Raise OptimizerError for an optimizer whose update of one parameter depends on the others."""
    generator = torch.Generator().manual_seed(0)
    # Owners of whole parameters update them one by one, so matrices are tried together and each alone.
    matrices = [list(torch.randn(5, 4, 6, dtype=torch.float64, generator=generator)) for _ in range(2)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            with random_numbers_kept(device):
                try:
                    together = _trial(optimizer, group, matrices, device)
                    apart = torch.cat([_trial(optimizer, group, [each], device) for each in matrices])
                except Exception:  # it wants other shapes than these: nothing can be concluded
                    continue
            if not _same(together, apart):
                raise OptimizerError(
                    f"{type(optimizer).__name__} cannot update parameters one by one: its update of one depends on "
                    "the others. Use sw.Sharding(stage=0) (sharding.stage), where each rank updates everything"
                )


def updates_apart(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether a step on each parameter does, to the bit, what one step on all of them does.

    It does not for an optimizer that counts its steps once for all parameters, or whose update looks at several. A
    count may change the update only later, so what the doubles keep is compared too.
    """
    generator = torch.Generator().manual_seed(0)
    matrices = [list(torch.randn(5, 4, 6, dtype=torch.float64, generator=generator)) for _ in range(2)]

    def moves(group: dict[str, Any], *, one_by_one: bool) -> tuple[torch.Tensor, str]:
        without = nn.Parameter(matrices[0][0].to(device, copy=True))
        without_before = without.detach().clone()
        kept = ""

        def step(double: torch.optim.Optimizer) -> None:
            nonlocal kept
            (settings,) = double.param_groups
            # One of them has no gradient, as those that no microbatch used.
            given: dict[str, list[Any]] = {key: settings[key] for key in ("params", "param_names") if key in settings}
            given["params"] = [*given["params"], without]
            every = range(len(given["params"]))
            # Where there are several groups, a part has often nothing of some.
            empty = [{**settings, "params": []}] if one_by_one and len(optimizer.param_groups) > 1 else []
            for at in every if one_by_one else (None,):
                settings.update({key: each if at is None else each[at : at + 1] for key, each in given.items()})
                double.param_groups = [settings, *empty] if at else [*empty, settings]
                double.step()
            double.param_groups = [settings]
            settings.update(given, params=given["params"][:-1])
            kept = _kept_apart_from_parameters(double)

        moved = _trial(optimizer, group, matrices, device, step=step)
        return torch.cat([moved, (without.detach() - without_before).cpu().flatten()]), kept

    for group in optimizer.param_groups:
        try:
            with random_numbers_kept(device):
                at_once, kept_at_once = moves(group, one_by_one=False)
            with random_numbers_kept(device):
                one_by_one, kept_one_by_one = moves(group, one_by_one=True)
        except Exception:  # it wants other shapes than these: nothing can be concluded
            return False
        if not torch.equal(at_once, one_by_one) or kept_at_once != kept_one_by_one:
            return False
    return True


def _kept_apart_from_parameters(optimizer: torch.optim.Optimizer) -> str:
    """The settings and attributes of an optimizer in words, by which counts of its steps differ."""

    def words(value: Any, depth: int = 0) -> str:
        if isinstance(value, torch.Tensor):
            return repr(value.tolist()) if value.numel() == 1 else str(value.shape)
        if isinstance(value, nn.Module | type) or callable(value) or depth > 3:
            return type(value).__name__
        if isinstance(value, Mapping):
            # Without keys, which may be parameters.
            return repr([words(each, depth + 1) for each in value.values()])
        if isinstance(value, list | tuple):
            return repr([words(each, depth + 1) for each in value])
        own = getattr(value, "__dict__", None)
        return repr(value) if own is None else words(own, depth + 1)

    settings = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
    attributes = {name: each for name, each in vars(optimizer).items() if name not in ("state", "param_groups")}
    return words([settings, attributes])


def find_whole_keys(optimizer: torch.optim.Optimizer, device: torch.device) -> frozenset[str]:
    """Keys of the state that an elementwise optimizer holds once per parameter, not once per element.

    A slice of one element does not show the difference, so a trial on twelve does.
    """
    generator = torch.Generator().manual_seed(0)
    stretch = list(torch.randn(3, 12, dtype=torch.float64, generator=generator))
    keys: frozenset[str] = frozenset()
    with random_numbers_kept(device):
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
    *,
    step: Callable[[torch.optim.Optimizer], Any] = lambda double: double.step(),
) -> torch.Tensor:
    """Run a double of `optimizer` with the settings of `group`; by how much it moved the values, flat."""
    double = _run_double(optimizer, group, stretches, device, step=step)
    parameters = double.param_groups[0]["params"]
    moves = [each.detach().cpu() - values for each, (values, *_) in zip(parameters, stretches, strict=True)]
    return torch.cat([move.reshape(-1) for move in moves])


def _run_double(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    stretches: Sequence[Sequence[torch.Tensor]],
    device: torch.device,
    *,
    step: Callable[[torch.optim.Optimizer], Any] = lambda double: double.step(),
    begins: bool = False,
) -> torch.optim.Optimizer:
    """A double of `optimizer` with the settings of `group`, after it updated trial parameters.

    `stretches`: for each parameter its values, and then its gradient at each step. `begins`: without the state that
    the optimizer has.
    """
    # Not built anew, because constructors differ; not `deepcopy`, which would copy the user's parameters and moments.
    double = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and isinstance(value, OrderedDict):
            setattr(double, name, OrderedDict())  # hooks of the user are not for trials
        elif name != "step":  # a scheduler's wrapper is bound to the original
            setattr(double, name, _own(value))
    parameters = [nn.Parameter(values.clone().to(device)) for values, *_ in stretches]
    double.state = defaultdict(dict)
    double.param_groups = [{**{name: _own(value) for name, value in group.items()}, "params": parameters}]
    if "lr" in group:  # a warm-up may start at 0, where every optimizer looks the same
        double.param_groups[0]["lr"] = torch.full_like(group["lr"], 0.1) if torch.is_tensor(group["lr"]) else 0.1
    if optimizer.state and not begins:
        # An optimizer that makes its state when it is built (Adagrad before torch 2.12) shows what a fresh one has.
        not_along = keys_not_along(optimizer.state)
        example = next(iter(optimizer.state.values()))
        for parameter in parameters:
            double.state[parameter] = {
                key: torch.ones_like(parameter)
                if isinstance(value, torch.Tensor) and key not in not_along
                else _reachable(deepcopy(value), device)
                for key, value in example.items()
            }
    for number, gradients in enumerate(zip(*(rest for _, *rest in stretches), strict=True)):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone().to(device)
        try:
            step(double)
        except Exception:
            # Its class may make state when it is built, and a relayout has taken that of the original.
            if number or optimizer.state or not (state := _state_when_built(optimizer, parameters)):
                raise
            double.state.update(state)
            step(double)
    return double


def _reachable(value: Any, device: torch.device) -> Any:
    """State that is not cut, where an update on `device` reads it: updates on the host read nothing on another one."""
    return value.to(device) if torch.is_tensor(value) and device.type == "cpu" else value


def _state_when_built(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> dict[Any, Any]:
    """What the constructor of its class puts into the state; nothing where that takes more than its defaults."""
    try:
        return dict(type(optimizer)(parameters, **optimizer.defaults).state)
    except Exception:  # constructors differ, and may raise anything
        return {}


def _own(value: Any) -> Any:
    """The value for a double, which may write to it: a count is often a tensor of one element."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() == 1 and not isinstance(value, nn.Parameter) else value
    return copy(value) if isinstance(value, dict | list | set) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownOptimizer:
    """An optimizer and what was known of it before it got this rank's masters."""

    optimizer: torch.optim.Optimizer
    parameters: tuple[tuple[str, ...], ...]
    """For each group the names of all parameters that it trains, with owners on any rank; frozen ones are left out."""
    given: tuple[tuple[str, ...], ...]
    """For each group the names of all that it was given, ties as often as they were in it. Those that were frozen when
    the engine was made are among them: they are trained once they are unfrozen."""
    whole_keys: frozenset[str]
    """Keys of state that is not cut along with a parameter, whatever its shape."""

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

    def named(self) -> NamedOptimizer:
        """The optimizer's class, its groups and their settings."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self.parameters):
            raise OptimizerError(
                f"{type(self.optimizer).__name__} has {len(groups)} groups, and had {len(self.parameters)} in the last "
                "step; the next engine.step(batch) takes the others in"
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
            if isinstance(value, torch.Tensor) and is_shell(value):
                yield from ((name, f"{key}.{path}", each) for path, each in inner_by_path(value).items())
            elif isinstance(value, torch.Tensor):
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
    known = []
    for optimizer, keys in zip(optimizers, whole_keys, strict=True):
        given = tuple(tuple(map(inventory.name_of.__getitem__, group["params"])) for group in optimizer.param_groups)
        known.append(
            KnownOptimizer(
                optimizer=optimizer,
                parameters=tuple(tuple(name for name in dict.fromkeys(names) if name in trainable) for names in given),
                given=given,
                whole_keys=keys | NEVER_ALONG,
            )
        )
    return tuple(known)


def with_shells(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: torch.Tensor, state: Mapping[str, Any]
) -> dict[str, Any]:
    """State of a parameter as the optimizer keeps it: where it has a subclass around tensors, these come into one.

    like: a tensor with the parameter's shape, dtype and device. state: with keys such as `exp_avg.codes`.
    """
    if not any("." in key for key in state):
        return dict(state)
    # Which class it is, and what else it holds, the optimizer alone knows: a double updates such a parameter.
    with random_numbers_kept(like.device):
        zeros = torch.zeros_like(like)
        (made,) = _run_double(optimizer, group, [[zeros, zeros]], like.device, begins=True).state.values()
    found = dict(state)
    for key, value in made.items():
        if isinstance(value, torch.Tensor) and is_shell(value):
            parts = {path: found.pop(f"{key}.{path}", None) for path in inner_by_path(value)}
            if lost := sorted(path for path, part in parts.items() if part is None):
                raise OptimizerError(
                    f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}, and the state that is "
                    f"loaded has none of its parts {few_of(lost)}. Load the state of this optimizer, or the weights "
                    "alone"
                )
            found[key] = rebuilt(value, parts)
    return found


def can_skip_on_device(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether all of them leave out a step by a flag that is on the device: torch's `fused=True`, as a rule."""
    # The protocol of torch's GradScaler, without its older form, in which `step` takes the scaler itself.
    return all(
        getattr(each, "_step_supports_amp_scaling", False) is True
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
    if type(optimizer).step.__module__.startswith("torch.optim."):
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
            return _reachable(value, master.device)
        if key in not_along or value.shape != spec.global_shape or is_shell(value):  # of a whole parameter
            return value.to(master.device)
        local = value if spec.portion is None else portion_of(value, spec.portion)
        part = local.reshape(-1)[run.start : run.stop]
        dtype = master.dtype if part.is_floating_point() else part.dtype
        # A copy, not a view: it would keep the state of the whole parameter in memory. Only the part moves.
        return part.to(device=master.device, dtype=dtype, copy=True).view(master.shape)

    return {key: cut(key, value) for key, value in state.items()}
