"""Doubles of optimizers, which update small tensors in trials: one group each, and flags in its state.

an optimizer with groups      for each group, and all flags of a parameter    a `Case`
a case, a few tensors         steps on made gradients                         a `Run`: what they did and left
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import cycle
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardwise.comm.accelerators import random_numbers_kept, random_states, set_random_states
from shardwise.engine.forward.part_watch import is_product, is_sum
from shardwise.engine.optimizers.traits import Flags, state_of
from shardwise.engine.parameter_kinds import inner_by_path, is_shell, rebuilt
from shardwise.engine.torch_private import OPTIMIZER_HOOKS, TorchDispatchMode, tree_leaves
from shardwise.errors import OptimizerError, few_of

_SIZES = (1.0, 1.0, 1.0, 1.0, 1e-2, 1e3, 1.0)
"""Of gradients, step by step."""
_ALONE = threading.RLock()
"""The stance is the process's: threads that set it and put it back in turns could leave it eager for ever."""

Step = Callable[[torch.optim.Optimizer], Any]
Numbers = dict[tuple[Any, ...], float]
"""By the way that leads to each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way in which an optimizer updates: a group, and flags in the state of some of its parameters."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    flags: Flags
    device: torch.device


class Operations(TorchDispatchMode):
    """Notes the operations of torch, and ends at the first that sends something to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.sent_by = ""
        self.has_sums = False
        """Whether some elements of a tensor became one number."""
        self.has_products = False
        """Whether matrices were multiplied or decomposed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, packet = str(func), func.overloadpacket
        self.names.append(name)
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.sent_by = name
            raise OptimizerError(f"{name} in a trial")
        if is_sum(packet):
            tensors = [each for each in tree_leaves(args) if torch.is_tensor(each)]
            self.has_sums |= any(each.numel() > 1 for each in tensors)
            # An outer product is no more work than one on single elements.
            self.has_products |= is_product(packet) and all(min(each.shape, default=1) > 1 for each in tensors)
        return func(*args, **(kwargs or {}))


@dataclass(kw_only=True, slots=True)
class Run:
    """What steps of a double did."""

    double: torch.optim.Optimizer
    """The optimizer itself where no double could be made."""
    moves: list[torch.Tensor] = field(default_factory=list)
    """For each step by how much it moved the values, flat."""
    keeps_gradients: bool = False
    """Whether memory of a gradient was part of what it kept after some step."""
    error: Exception | None = None
    """Why it ended early: an unknown optimizer may raise anything."""


def with_shells(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], like: torch.Tensor, state: Mapping[str, Any]
) -> dict[str, Any]:
    """State of a parameter as the optimizer keeps it: where it has a subclass around tensors, these come into one.

    like: a tensor with the parameter's shape, dtype and device. state: with keys such as `exp_avg.codes`. Raises
    OptimizerError where some of them are missing.
    """
    if not any("." in key for key in state):
        return dict(state)
    # Which class it is, and what else it holds, the optimizer alone knows: a double updates such a parameter.
    case = Case(optimizer=optimizer, group=group, flags=(), device=like.device)
    with random_numbers_kept(like.device), torch.enable_grad():
        zeros = torch.zeros_like(like)
        run = run_double(case, [[zeros, zeros]], num_steps=1)
    if run.error is not None:
        raise run.error
    made = run.double.state[run.double.param_groups[0]["params"][0]]
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


def trial_tensors(shape: Sequence[int], num_steps: int, *, seed: int = 0) -> list[torch.Tensor]:
    """A parameter and its gradients. In float64, so that updates of any size differ from rounding."""
    generator = torch.Generator().manual_seed(seed)
    values, direction, *noises = torch.randn(num_steps + 2, *shape, dtype=torch.float64, generator=generator)
    # They have a direction in common: some optimizers look for one.
    return [values, *((direction + each) * size for each, size in zip(noises, cycle(_SIZES)))]


def run_double(
    case: Case,
    stretches: Sequence[Sequence[torch.Tensor]],
    *,
    num_steps: int,
    step: Step = lambda double: double.step(),
    watch: AbstractContextManager[Any] | None = None,
) -> Run:
    """Run a double on trial parameters.

    stretches: for each parameter its values, and then its gradients. step: made in the place of the double's own.
    watch: around each.
    """
    run = Run(double=case.optimizer)
    before = torch.cat([values.reshape(-1) for values, *_ in stretches])
    devices = [torch.device("cpu"), *([case.device] if case.device.type not in ("cpu", "meta") else [])]
    drawn = [(device, random_states(device)) for device in devices]
    try:
        run.double = _double(case, [values for values, *_ in stretches])
        parameters = run.double.param_groups[0]["params"]
        for number in range(num_steps):
            # New tensors each time: some take one away, or write to it.
            gradients = [each[1 + number % (len(each) - 1)].to(case.device, copy=True) for each in stretches]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            # What draws noise draws the same for the first parameter, whatever comes after it. Not by a seed, which
            # torch gives to every device.
            for device, kept in drawn:
                set_random_states(device, kept)
            # Eagerly: the watch of a trial keeps the compiler from a step, and it would not try that code again.
            with _ALONE, torch.compiler.set_stance("force_eager"), watch or nullcontext():
                try:
                    step(run.double)
                except Exception:
                    # Its class may make state when it is built.
                    if number or not _make_state(case.optimizer, run.double):
                        raise
                    step(run.double)
            own = {name: each for name, each in vars(run.double).items() if name not in ("state", "param_groups")}
            run.keeps_gradients |= bool(storages([*run.double.state.values(), own]) & storages(gradients))
            if case.device.type != "meta":
                now = torch.cat([each.detach().cpu().reshape(-1) for each in parameters])
                run.moves.append(now - before)
                before = now
    except Exception as error:
        run.error = error
    for device, kept in drawn:  # the next run begins as this one did
        set_random_states(device, kept)
    return run


def _double(case: Case, values: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """A double of the optimizer, over parameters with these values."""
    optimizer, group, device = case.optimizer, case.group, case.device
    # Not built anew, because constructors differ; not `deepcopy`, which would copy the user's parameters and moments.
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith(OPTIMIZER_HOOKS) and isinstance(value, OrderedDict):
            setattr(double, name, OrderedDict())  # hooks of the user are not for trials
        elif isinstance(value, MethodType) and value.__self__ is optimizer:
            setattr(double, name, MethodType(value.__func__, double))
        elif name not in ("step", "state", "param_groups"):  # any other step is bound to the original
            setattr(double, name, _own(value))
    parameters = [nn.Parameter(each.to(device, copy=True)) for each in values]
    double.state = defaultdict(dict)
    double.param_groups = [{**{name: _own(each) for name, each in group.items() if name != "params"}}]
    double.param_groups[0]["params"] = parameters
    if "lr" in group:  # a warm-up may start at 0, where every optimizer looks the same
        double.param_groups[0]["lr"] = torch.full_like(group["lr"], 0.1) if torch.is_tensor(group["lr"]) else 0.1
    for key, value in optimizer.state.items():
        if not isinstance(key, torch.Tensor):  # of no parameter
            double.state[key] = deepcopy(value)
    for parameter in parameters if case.flags else ():
        double.state[parameter] = state_of(case.flags)
    return double


def _make_state(optimizer: torch.optim.Optimizer, double: torch.optim.Optimizer) -> bool:
    """Give a double the state that its class makes; whether it makes any."""
    try:
        made = dict(type(optimizer)(double.param_groups[0]["params"], **optimizer.defaults).state)
    except Exception:  # constructors differ, and may raise anything
        return False
    double.state.update(made)
    return bool(made)


def _own(value: Any, depth: int = 0) -> Any:
    """The value for a double, which may write to it: a count is often a tensor of one element, or in a dict."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if value.numel() == 1 and not isinstance(value, nn.Parameter) else value
    if not isinstance(value, dict | list | set):
        return value
    made = copy(value)
    if depth < 3 and isinstance(made, dict | list):
        for at, each in list(made.items() if isinstance(made, dict) else enumerate(made)):
            made[at] = _own(each, depth + 1)
    return made


def numbers_of(double: torch.optim.Optimizer) -> Numbers:
    """The numbers that a double keeps: in its group, 0, in states, and as attributes, ""."""
    found: Numbers = {}

    def look(container: Any, way: tuple[Any, ...]) -> None:
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if isinstance(value, dict | list):
                if len(way) < 5 and value is not double.state and value is not double.param_groups:
                    look(value, (*way, key))
            elif type(value) in (int, float) or (torch.is_tensor(value) and value.numel() == 1):
                found[*way, key] = float(value)

    for at, each in enumerate([*double.param_groups, *double.state.values()]):
        if isinstance(each, dict):
            look(each, (at,))
    look(vars(double), ("",))
    return found


def storages(values: Any) -> set[int]:
    """The memory of all tensors in a nesting."""
    found: set[int] = set()
    for each in tree_leaves(values):
        if isinstance(each, torch.Tensor):
            with suppress(RuntimeError, NotImplementedError):  # a subclass around tensors has none
                found.add(each.untyped_storage().data_ptr())
    return found - {0}
