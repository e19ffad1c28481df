"""Trials of optimizers that are not torch's own: doubles update small tensors, and what they did is compared.

    an optimizer with groups      for each group, and all flags of a parameter    a `Case`
    a case, a few tensors         steps of a double on made gradients             a `Run`: what they did and left

They make eleven steps with gradients of several sizes: some optimizers begin late, or clip what is large.

    the plan                   the doubles have                             must do the same
    cuts parameters            a 4 x 6 matrix, and shapes of the group      as its two halves in one step
    gives them to owners       a matrix and another one                     with a third one, and alone
    updates them by bucket     two matrices                                 one after the other, to the bit
"""

import inspect
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from math import isclose, isfinite, prod
from traceback import walk_tb
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardwise.comm.accelerators import random_numbers_kept, random_states, set_random_states
from shardwise.engine.forward.part_watch import is_product, is_sum
from shardwise.engine.optimizers.known import keys_not_along
from shardwise.engine.optimizers.traits import (
    Flags,
    OptimizerTraits,
    UpdateTraits,
    flags_of,
    in_table,
    state_of,
    together,
)
from shardwise.engine.parameter_kinds import inner_by_path, is_shell, rebuilt
from shardwise.engine.torch_private import OPTIMIZER_HOOKS, TorchDispatchMode, tensor_leaves
from shardwise.errors import OptimizerError, few_of
from shardwise.plan.optimizer_entries import NEVER_ALONG

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
            tensors = tensor_leaves(args)
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
    for each in tensor_leaves(values):
        with suppress(RuntimeError, NotImplementedError):  # a subclass around tensors has none
            found.add(each.untyped_storage().data_ptr())
    return found - {0}


_SMALL = (4, 6)
_STEPS = 11
_MOST_ELEMENTS = 1 << 14
"""Of a trial with numbers. Larger shapes are reduced, and only their operations are compared."""


def traits_of(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerTraits:
    """What is known of an optimizer. device: that of the masters; no parameter has a gradient now."""
    known = in_table(optimizer)
    if known is not None:
        of_groups: list[dict[Flags, UpdateTraits]] = [{(): known} for _ in optimizer.param_groups]
        return OptimizerTraits(optimizer=optimizer, of_groups=of_groups, of_all=known)
    found: dict[object, UpdateTraits] = {}
    of_groups = []
    with random_numbers_kept(device):
        for group in optimizer.param_groups:
            of_groups.append({})
            for flags in dict.fromkeys(flags_of(optimizer, each) for each in group["params"]) or [()]:
                case = Case(optimizer=optimizer, group=group, flags=flags, device=device)
                # Many groups differ in nothing but the rate, in place of which doubles have one of their own.
                settings = {key: each for key, each in group.items() if key not in ("params", "lr", "initial_lr")}
                key = repr(settings), flags, tuple(_own_shapes(case))
                if key not in found:
                    found[key] = tried(case)
                of_groups[-1][flags] = found[key]
    of_all = together(list(found.values()))
    # A step of one that wraps another steps that one, and not a double of it.
    if inner := [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]:
        keeps = any(traits_of(each, device).of_all.keeps_gradients for each in inner)
        of_all = replace(of_all, keeps_gradients=keeps, made=frozenset())
    return OptimizerTraits(optimizer=optimizer, of_groups=of_groups, of_all=of_all)


def tried(case: Case) -> UpdateTraits:
    """What doubles find out."""
    one, other, third = (trial_tensors(_SMALL, _STEPS, seed=seed) for seed in range(3))
    third[1:] = [100 * each for each in third[1:]]
    seen = Operations()
    run = partial(run_double, case, num_steps=_STEPS)
    alone = run([one], watch=seen)
    if sent_by := seen.sent_by or _wants_ranks(alone):  # nothing else may run without a watch
        return UpdateTraits(looks_at="parameter", steps_apart=False, keeps_gradients=True, sent_by=sent_by)
    with_other, with_third = (run([one, each]) for each in (other, third))
    has_others = len(case.optimizer.param_groups) > 1
    in_turn = run([one, other], step=partial(_one_by_one, has_others=has_others))
    is_coupled = _is_coupled(case, alone, with_other, with_third)
    is_elementwise = not is_coupled and _is_elementwise(case)
    return UpdateTraits(
        looks_at="group" if is_coupled else "element" if is_elementwise else "parameter",
        has_products=seen.has_products or alone.error is not None,
        steps_apart=not (with_other.error or in_turn.error)
        and all(map(torch.equal, with_other.moves, in_turn.moves))
        and _keep_alike(with_other, in_turn),
        keeps_gradients=alone.keeps_gradients or alone.error is not None,
        whole_keys=keys_not_along(alone.double.state) if is_elementwise else NEVER_ALONG,
        made=_made_by_steps(case),
        needs_closure=alone.error is not None and _steps_on_closure(case),
    )


def _wants_ranks(run: Run) -> str:
    if run.error is None:
        return ""
    *_, (frame, _) = walk_tb(run.error.__traceback__)
    return "torch.distributed" if frame.f_globals.get("__name__", "").startswith("torch.distributed") else ""


def _steps_on_closure(case: Case) -> bool:
    """Whether a step that failed, by an assertion or a TypeError of None, does not fail with a closure."""
    takes_one = "closure" in inspect.signature(type(case.optimizer).step).parameters
    given = partial(run_double, case, [trial_tensors(_SMALL, 1)], num_steps=1)
    return takes_one and given(step=lambda double: double.step(partial(float, 0))).error is None


def _is_elementwise(case: Case) -> bool:
    """Whether halves are updated as a whole is."""
    own = _own_shapes(case)
    for shape in dict.fromkeys([_SMALL, *map(_reduced, own)]):
        num_steps = _STEPS if shape == _SMALL else 3
        matrix, seen = trial_tensors(shape, num_steps), Operations()
        # Halves are 1-D, as slices in a bucket are: an optimizer that goes by rows or shapes gives itself away.
        half = prod(shape) // 2
        halves = [[each.reshape(-1)[part] for each in matrix] for part in (slice(half), slice(half, None))]
        whole = run_double(case, [matrix], num_steps=num_steps, watch=seen)
        # AdamP projects only gradients that are nearly orthogonal to their matrix.
        if whole.error or seen.has_sums:
            return False
        parts = run_double(case, halves, num_steps=num_steps)
        if parts.error or not _same(whole.moves, parts.moves):
            return False
    # What is larger than a trial with numbers is updated by the same operations.
    larger = [shape for shape in own if shape != _reduced(shape)]
    if any(_operations(case, shape) != _operations(case, _reduced(shape)) for shape in larger):
        return False
    # Only what is element-wise updates a long vector in no time: Shampoo has a square of its length.
    return not _keeps_blocks(case)


def _keeps_blocks(case: Case) -> bool:
    """Whether the state of a parameter that is not small is packed, in blocks that have a scale each."""

    # Small parameters get plain state: the trials of updates would not meet the blocks.
    def odd_sizes(size: int) -> dict[str, Any]:
        run = run_double(replace(case, flags=()), [list(torch.ones(2, size))], num_steps=1)
        state = {} if run.error else run.double.state[run.double.param_groups[0]["params"][0]]
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        # A table of codes has one size, a scale for each block has not.
        return {
            key: object() if is_shell(value) else value.numel()
            for key, value in tensors.items()
            if is_shell(value) or value.numel() not in (1, size)
        }

    return odd_sizes(1 << 14) != odd_sizes(1 << 15)


def _is_coupled(case: Case, alone: Run, with_other: Run, with_third: Run) -> bool:
    """Whether the update of one parameter depends on the others; from runs of it alone, and with two of them."""
    if alone.error or with_other.error or with_third.error:  # it wants other shapes than these
        return _needs_others(case)
    if _keeps_sums(numbers_of(alone.double), numbers_of(with_other.double)):
        return True
    one, same = ([move[: prod(_SMALL)] for move in run.moves] for run in (with_other, with_third))
    # Matrices of one shape may be updated in one call, which rounds otherwise: in bfloat16, as a rule.
    return not _same(one, same) or not _same(one, alone.moves, 0.05)


def _needs_others(case: Case) -> bool:
    """Whether a group updates all of its own shapes together, and some of them not, or otherwise, alone."""
    stretches = [trial_tensors(_reduced(each.shape), 2, seed=at) for at, each in enumerate(case.group["params"])]
    together = run_double(case, stretches, num_steps=2)
    if together.error:  # the sizes that were reduced do not fit, say: nothing can be concluded
        return False
    parts = [move.split([each[0].numel() for each in stretches]) for move in together.moves]
    for at, stretch in enumerate(stretches):
        alone = run_double(case, [stretch], num_steps=2)
        if alone.error or not _same([each[at] for each in parts], alone.moves, 0.05):
            return True
    return False


def _keeps_sums(alone: Numbers, together: Numbers) -> bool:
    """Whether a group, or the optimizer, has a number that all parameters went into, as a distance."""
    # It may change updates only late, or for certain gradients: D-Adaptation raises its step size when they agree.
    both = [(way[0], mine, together[way]) for way, mine in alone.items() if way in together]
    # Those in states begin with the place of their parameter. Whole numbers are counts.
    return any(
        place in ("", 0)
        and isfinite(mine)
        and isfinite(yours)
        and not (mine.is_integer() and yours.is_integer())
        and not isclose(mine, yours)
        for place, mine, yours in both
    )


def _one_by_one(double: torch.optim.Optimizer, *, has_others: bool) -> None:
    """Step on each parameter, as bucket after bucket is. has_others: whether the optimizer has several groups."""
    (settings,) = double.param_groups
    given: dict[str, list[Any]] = {key: settings[key] for key in ("params", "param_names") if key in settings}
    without_gradient = nn.Parameter(torch.zeros_like(given["params"][0]))  # as those that no microbatch used
    # Where there are several groups, a part has often nothing of some.
    empty = [{**settings, "params": []}] if has_others else []
    for at in range(len(given["params"])):
        settings.update({key: each[at : at + 1] for key, each in given.items()})
        double.param_groups = [settings, *empty] if at else [*empty, settings]
        double.step()
    settings["params"] = [without_gradient]
    double.step()
    double.param_groups = [settings]
    settings.update(given)


def _keep_alike(one: Run, other: Run) -> bool:
    """Whether both have the same numbers in the group and on the optimizer: a count may change updates later only."""
    mine, yours = (
        {way: number for way, number in numbers_of(run.double).items() if way[0] in ("", 0)} for run in (one, other)
    )
    return mine == yours


def _made_by_steps(case: Case) -> frozenset[str]:
    found: set[str] = set()
    given = {key for key in case.group if key in case.optimizer.defaults or key == "params"}
    # What a step makes it makes again; what the user gave is missed, or stays away.
    for left_out in (None, *(case.group.keys() - given)):
        group = {key: value for key, value in case.group.items() if key != left_out}
        run = run_double(replace(case, group=group), [trial_tensors(_SMALL, 1)], num_steps=1)
        if run.error is None:  # else it needs the setting, or other shapes
            found |= run.double.param_groups[0].keys() - group.keys()
    return frozenset(found)


def _own_shapes(case: Case) -> list[tuple[int, ...]]:
    """For each number of dims the largest shape in the group: some update small parameters in another way."""
    largest: dict[int, tuple[int, ...]] = {}
    every = {tuple(parameter.shape) for parameter in case.group["params"]}
    most = max(map(len, every), default=0)
    for shape in every:
        # Vectors are what halves of the small matrix are.
        if prod(shape) > 1 and len(shape) >= min(most, 2):
            largest[len(shape)] = max(largest.get(len(shape), shape), shape, key=lambda each: (prod(each), each))
    return [largest[dims] for dims in sorted(largest)]


def _reduced(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with its largest dims halved until a trial on it is quick."""
    sizes = list(shape)
    while prod(sizes) > _MOST_ELEMENTS:
        at = sizes.index(max(sizes))
        sizes[at] = -(-sizes[at] // 2)
    return tuple(sizes)


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], tolerance: float = 1e-6) -> bool:
    # Not to the bit: kernels may round 24 elements and 12 differently. A real difference is of the size of the
    # update. Step by step, since steps differ in size.
    return all(
        bool((mine - yours).nan_to_num().abs().max() <= tolerance * yours.nan_to_num().abs().max() + 1e-12)
        and torch.equal(mine.isnan(), yours.isnan())
        for mine, yours in zip(one, other, strict=True)
    )


def _operations(case: Case, shape: tuple[int, ...]) -> list[str]:
    """The operations by which a double updates a parameter of this shape, without numbers."""
    nothing, seen = torch.empty((), device="meta").expand(shape), Operations()
    run = run_double(replace(case, device=torch.device("meta")), [[nothing, nothing]], num_steps=3, watch=seen)
    # Where it wants numbers it is compared up to there.
    return [*seen.names, type(run.error).__name__]
