"""What an unknown optimizer can be trusted with: doubles of it update small tensors, whole and in parts.

No optimizer is known by its name, and nothing in one says whether its update of an element looks at others. A wrong
guess would train, and badly. So what a plan needs is tried:

    the plan                   tried                                        must do the same
    cuts parameters            a 4 x 6 matrix, and shapes of the group      as its two halves in one step
                               two halves                                   each half alone
    gives them to owners       a matrix and another one                     with a third one, and alone

    steps    1 .. 11             with gradients of several sizes: some optimizers begin late, or clip what is large
             5040000 - 1 .. + 1  after that every count that the double keeps is set here: past any delay, and at a
                                 multiple of nearly every period
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isclose, isfinite, prod
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.comm.accelerators import random_numbers_kept
from shardwise.engine.forward.inventory import Inventory
from shardwise.engine.forward.packed_tensors import is_shell
from shardwise.engine.forward.update_work import counted_work, is_sum
from shardwise.engine.optimizers.doubles import (
    Case,
    Moves,
    alike_runs,
    cases_of,
    kind_of,
    numbers_of,
    run_double,
    trial_tensors,
)
from shardwise.engine.optimizers.known import keys_not_along, refusal_of_closure
from shardwise.engine.torch_private import TorchDispatchMode, tree_leaves
from shardwise.errors import OptimizerError

Found = TypeVar("Found")

STAGE_0 = "Use sw.Sharding(stage=0) (sharding.stage), where each rank updates everything"
"""What to do with an optimizer that no rank can update a part of."""

_SMALL = (4, 6)
_STEPS = 11
_MOST_ELEMENTS = 1 << 14
"""Of a trial with numbers. Larger shapes are reduced, and only their operations are compared."""
_MOST_VERDICTS = 256


def check_silent(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Raise OptimizerError for an optimizer that sends something to other ranks in its step."""
    for case in (case for optimizer in optimizers for case in cases_of(optimizer, device)):
        _remembered(_refuse_talking, case, [])


def _refuse_talking(case: Case) -> None:
    watch = _Operations()
    with random_numbers_kept(case.device), watch:
        try:
            run_double(case, [trial_tensors(_SMALL, 1)], num_steps=1, late=False)
        except Exception as error:  # other reasons are found where they matter
            *_, (frame, _) = walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__", "").startswith("torch.distributed"):  # it wants a process group
                watch.collective = watch.collective or "torch.distributed"
    if watch.collective:
        raise OptimizerError(
            f"{type(case.optimizer).__name__} talks to other ranks in its step ({watch.collective}), and shardwise "
            "does that. Use its class for one process: each matrix is then updated on one rank, for all"
        )


def check_closures(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """Raise OptimizerError for an optimizer whose step takes no closure by its signature, and fails without one."""
    for optimizer in optimizers:
        takes_one = "closure" in inspect.signature(type(optimizer).step).parameters
        if not takes_one or type(optimizer).__module__.startswith("torch.optim."):
            continue
        needs_one = False
        for case in cases_of(optimizer, device)[:1]:
            run = partial(run_double, case, [trial_tensors(_SMALL, 1)], num_steps=1, late=False)
            with random_numbers_kept(device), suppress(Exception):  # other reasons are found where they matter
                try:
                    run()
                except Exception:  # its own assertion, or a TypeError of the None that it calls
                    run(step=lambda double: double.step(partial(float, 0)))
                    needs_one = True
        if needs_one:
            raise refusal_of_closure(optimizer)


def work_of_wholes(
    optimizers: Sequence[torch.optim.Optimizer],
    inventory: Inventory,
    device: torch.device,
    *,
    instead: str = STAGE_0,
) -> dict[str, int]:
    """Of each parameter that its optimizer must see whole: the work of one update, in operations.

    instead: what to do with an optimizer that no rank can update a part of. Raises OptimizerError for one.
    """
    spec_of = {spec.name: spec for spec in inventory.specs}
    work: dict[str, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if is_elementwise(optimizer, group, device, instead=instead):
                continue
            check_apart([optimizer], device, groups=[group], instead=instead)
            cases = {kind_of(case.state): case for case in cases_of(optimizer, device, [group])}
            counted: dict[object, int] = {}
            for parameter in group["params"]:
                name = inventory.name_of[parameter]
                shape, kind = spec_of[name].global_shape, kind_of(dict.get(optimizer.state, parameter) or {})
                if (shape, kind) not in counted:
                    case = cases.get(kind, next(iter(cases.values())))
                    with random_numbers_kept(device):
                        counted[shape, kind] = counted_work(shape, partial(_update_alone, case))
                work[name] = counted[shape, kind]
    return work


def _update_alone(case: Case, stretch: Sequence[torch.Tensor]) -> None:
    run_double(replace(case, device=stretch[0].device), [stretch], num_steps=len(stretch) - 1, late=False)


def _elementwise_groups(
    optimizer: torch.optim.Optimizer, inventory: Inventory, work: Collection[str]
) -> list[dict[str, Any]]:
    """The groups whose parameters may be updated in parts; `work`: of those that may not."""
    return [
        group
        for group in optimizer.param_groups
        if not any(inventory.name_of[parameter] in work for parameter in group["params"])
    ]


def is_elementwise(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, *, instead: str = ""
) -> bool:
    """Whether parts of parameters can be updated, each alone. Raises OptimizerError where an update depends on others.

    instead: what to do then.
    """
    for case in cases_of(optimizer, device, [group]):
        with random_numbers_kept(device):
            verdict = _remembered(_is_elementwise, case, _own_shapes(case))
        if verdict is None:
            raise _refusal_of_coupled(optimizer, instead)
        if not verdict:
            return False
    return True


_UNKNOWN: Any = object()
_verdicts: dict[object, Any] = {}
"""Of functions of cases, by what decides: 10 ms for AdamW, which many an engine of a process has."""


def _remembered(find: Callable[[Case], Found], case: Case, shapes: Sequence[tuple[int, ...]]) -> Found:
    """`find(case)`, or what it returned for an equal case before. An error that it raised is not remembered.

    shapes: of the parameters, as far as they decide.
    """
    known = _all_of(case, shapes)
    if known is None:
        return find(case)
    found: Any = _verdicts.get((find, known), _UNKNOWN)  # other threads may clear them at any time
    if found is _UNKNOWN:
        if len(_verdicts) > _MOST_VERDICTS:
            _verdicts.clear()
        found = _verdicts[find, known] = find(case)
    return found  # type: ignore[no-any-return]


def _is_elementwise(case: Case) -> bool | None:
    """Whether halves are updated as a whole is; None where the update of one half depends on the other."""
    verdict = _found_elementwise(case, _own_shapes(case))
    # Only what is element-wise updates a long vector in no time: Shampoo has a square of its length.
    return verdict and not _keeps_blocks(case)


def _all_of(case: Case, shapes: Sequence[tuple[int, ...]]) -> object:
    """All that an update may look at, as a key; None where that is more than plain settings."""
    optimizer = case.optimizer
    if case.state or any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        return None
    own = {name: each for name, each in vars(optimizer).items() if name not in ("state", "param_groups", "step")}
    group = {name: each for name, each in case.group.items() if name != "params"}
    try:
        settings = [tuple(sorted((name, _plain(each)) for name, each in every.items())) for every in (own, group)]
    except TypeError:
        return None
    return (type(optimizer), type(optimizer).step, *settings, tuple(shapes), case.device)


def _plain(value: Any) -> Any:
    """A setting as a part of a key. Raises TypeError for what is more than numbers and texts."""
    if isinstance(value, dict | OrderedDict):
        return tuple((_plain(key), _plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_plain, value))
    if value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(type(value).__name__)
    return type(value), value


def _found_elementwise(case: Case, shapes: Sequence[tuple[int, ...]]) -> bool | None:
    if _keeps_sums(case):
        return None
    # Each parallelize on each rank waits for these steps: a tenth of a millisecond each, where nothing is found.
    trials = [(_SMALL, _STEPS, True), (_SMALL, 8, False), *((shape, 3, True) for shape in map(_reduced, shapes))]
    for at, (shape, num_steps, late) in enumerate(trials):
        matrix = trial_tensors(shape, num_steps, steady=not late)
        # Halves are 1-D, as slices in a bucket are: an optimizer that goes by rows or shapes gives itself away.
        half = prod(shape) // 2
        first, second = ([each.reshape(-1)[part] for each in matrix] for part in (slice(half), slice(half, None)))
        # Three runs tell two reasons apart: what goes by the shape (whole against halves), and what couples
        # parameters in one step (halves together against one alone), as a norm over a group does.
        alone = [] if at else [[first]]
        try:
            whole, together, *alone_moves = alike_runs(case, [[matrix], [first, second], *alone], num_steps, late=late)
        except Exception:  # whatever an unknown optimizer raises: it wants other shapes than halves have
            return False
        if not _same(whole, together):
            return False
        if alone_moves and not _same([each[:half] for each in together], alone_moves[0]):
            return None
        # AdamP projects only gradients that are nearly orthogonal to their matrix.
        if _sums_up(case, shape):
            return False
    # What is larger than a trial with numbers is updated by the same operations.
    return all(
        _operations(case, shape) == _operations(case, _reduced(shape)) for shape in shapes if shape != _reduced(shape)
    )


def _sums_up(case: Case, shape: tuple[int, ...]) -> bool:
    """Whether an update takes a sum or a largest value of what it updates: it may matter for some values only."""
    watch = _Operations()
    with watch:
        run_double(case, [trial_tensors(shape, 2)], num_steps=2, late=False)
    return watch.sums


def _keeps_blocks(case: Case) -> bool:
    """Whether the state of a parameter that is not small is packed, in blocks that have a scale each."""
    # Small parameters get plain state: the trials of updates would not meet the blocks.
    sizes = (1 << 14, 1 << 15)

    def state_at(size: int) -> Mapping[str, torch.Tensor]:
        with random_numbers_kept(case.device):
            double, _ = run_double(replace(case, state={}), [list(torch.ones(2, size))], num_steps=1, late=False)
        state = double.state[double.param_groups[0]["params"][0]]
        return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}

    try:
        state = state_at(sizes[0])
        if any(map(is_shell, state.values())):
            return True
        # A table of its codes has one size, a scale for each block has not.
        unlike = [key for key, value in state.items() if value.numel() not in (1, sizes[0])]
        larger = state_at(sizes[1]) if unlike else {}
        return any(larger[key].numel() != state[key].numel() for key in unlike)
    except Exception:  # it wants something else: the trials of updates say what
        return False


def check_apart(
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    *,
    instead: str,
    groups: Sequence[dict[str, Any]] | None = None,
) -> None:
    """Raise OptimizerError for an optimizer whose update of one parameter depends on the others.

    instead: what to do then. groups: those that are tried; None: all.
    """
    for case in (case for optimizer in optimizers for case in cases_of(optimizer, device, groups)):
        if _remembered(_is_coupled, case, [tuple(parameter.shape) for parameter in case.group["params"]]):
            raise _refusal_of_coupled(case.optimizer, instead)


def _is_coupled(case: Case) -> bool:
    """Whether the update of one parameter depends on the others."""
    one, other, third = (trial_tensors(_SMALL, _STEPS, seed=seed) for seed in range(3))
    third[1:] = [100 * each for each in third[1:]]
    with random_numbers_kept(case.device):
        if _keeps_sums(case):
            return True
        try:
            runs = alike_runs(case, [[one, other], [one, third], [one]], _STEPS)
        except Exception:  # it wants other shapes than these
            return _needs_others(case)
    with_other, with_third, alone = ([move[: one[0].numel()] for move in moves] for moves in runs)
    # Matrices of one shape may be updated in one call, which rounds otherwise: in bfloat16, as a rule.
    return not _same(with_other, with_third) or not _same(with_other, alone, 0.05)


def _needs_others(case: Case) -> bool:
    """Whether a group updates all of its own shapes together, and some of them not, or otherwise, alone."""
    stretches = [trial_tensors(_reduced(each.shape), 2, seed=at) for at, each in enumerate(case.group["params"])]
    try:
        _, together = run_double(case, stretches, num_steps=2, late=False)
    except Exception:  # the sizes that were reduced do not fit, say: nothing can be concluded
        return False
    parts = [move.split([each[0].numel() for each in stretches]) for move in together]
    for at, stretch in enumerate(stretches):
        try:
            _, alone = run_double(case, [stretch], num_steps=2, late=False)
        except Exception:  # whatever it raises, it does not without the others
            return True
        if not _same([each[at] for each in parts], alone, 0.05):
            return True
    return False


def _keeps_sums(case: Case) -> bool:
    """Whether steps keep a number in a group, or on the optimizer, that all its parameters go into, as a distance."""
    # It may change updates only late, or for certain gradients: D-Adaptation raises its step size when they agree.
    one, other = (trial_tensors(_SMALL, 2, seed=seed) for seed in range(2))
    try:
        alone, together = (
            numbers_of(run_double(case, each, num_steps=2, late=False)[0]) for each in ([one], [one, other])
        )
    except Exception:  # it wants other shapes than these: nothing can be concluded
        return False
    # Those in states begin with the place of their parameter. Whole numbers are counts.
    return any(
        not (mine.is_integer() and together[way][2].is_integer()) and not isclose(mine, together[way][2])
        for way, (_, _, mine) in alone.items()
        if way[0] in ("", 0) and way in together and isfinite(mine) and isfinite(together[way][2])
    )


def _refusal_of_coupled(optimizer: torch.optim.Optimizer, instead: str) -> OptimizerError:
    return OptimizerError(
        f"{type(optimizer).__name__} cannot update parameters one by one: its update of one depends on the others, and "
        f"each rank holds only some. {instead}"
    )


def updates_apart(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether a step on each parameter does, to the bit, what one step on all of them does.

    It does not for an optimizer that counts its steps once for all parameters, or whose update looks at several. A
    count may change the update only later, so what the doubles keep is compared too.
    """
    matrices = [trial_tensors(_SMALL, 4, seed=seed) for seed in range(2)]

    def moves(case: Case, *, one_by_one: bool) -> tuple[torch.Tensor, str]:
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

        with random_numbers_kept(device):
            _, moved = run_double(case, matrices, num_steps=4, late=False, step=step)
        return torch.cat([*moved, (without.detach() - without_before).cpu().flatten()]), kept

    for case in cases_of(optimizer, device):
        try:
            at_once, kept_at_once = moves(case, one_by_one=False)
            one_by_one, kept_one_by_one = moves(case, one_by_one=True)
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


def tried_keys(
    optimizer: torch.optim.Optimizer,
    inventory: Inventory,
    work: Collection[str],
    device: torch.device,
    *,
    is_partial: bool,
) -> tuple[frozenset[str], frozenset[str]]:
    """Keys of the state that are not per element where masters are parts, and settings that steps make.

    work: the parameters that are whole all the same.
    """
    # A whole master tells by its shape which of its state is per element.
    groups = _elementwise_groups(optimizer, inventory, work) if is_partial else ()
    return _find_whole_keys(optimizer, groups, device), made_by_steps(optimizer, device)


def _find_whole_keys(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], device: torch.device
) -> frozenset[str]:
    """Keys of the state that elementwise groups have once per parameter, not once per element.

    A slice of one element does not show the difference, so a trial on twelve does.
    """
    keys: frozenset[str] = frozenset()
    with random_numbers_kept(device):
        for case in cases_of(optimizer, device, groups):
            keys |= keys_not_along(run_double(case, [trial_tensors((12,), 2)], num_steps=2, late=False)[0].state)
    return keys


def made_by_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> frozenset[str]:
    """Settings that its steps put into a group, as a count of them; also those that are there already."""
    # A step of one that wraps another steps that one.
    if any(isinstance(each, torch.optim.Optimizer) for each in vars(optimizer).values()):
        return frozenset()
    with random_numbers_kept(device):
        return frozenset().union(*(_remembered(_made_by_steps, case, []) for case in cases_of(optimizer, device)))


def _made_by_steps(case: Case) -> set[str]:
    found: set[str] = set()
    given = {key for key in case.group if key in case.optimizer.defaults or key == "params"}
    # What a step makes it makes again; what the user gave is missed, or stays away.
    for left_out in (None, *(case.group.keys() - given)):
        group = {key: value for key, value in case.group.items() if key != left_out}
        try:
            double, _ = run_double(replace(case, group=group), [trial_tensors(_SMALL, 1)], num_steps=1, late=False)
        except Exception:  # it needs the setting, or other shapes
            continue
        found |= double.param_groups[0].keys() - group.keys()
    return found


def _own_shapes(case: Case) -> list[tuple[int, ...]]:
    """For each number of dims the largest shape in the group: some update small parameters in another way."""
    largest: dict[int, tuple[int, ...]] = {}
    every = {tuple(parameter.shape) for parameter in case.group["params"]}
    most = max(map(len, every), default=0)
    for shape in every:
        # Vectors are what halves of the small matrix are.
        if prod(shape) > 1 and len(shape) >= min(most, 2):
            largest[len(shape)] = max(largest.get(len(shape), shape), shape, key=lambda each: (prod(each), each))
    return [largest[dims] for dims in sorted(largest) if largest[dims] != _SMALL]


def _reduced(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its largest dims halved until a trial on it is quick."""
    sizes = list(shape)
    while prod(sizes) > _MOST_ELEMENTS:
        at = sizes.index(max(sizes))
        sizes[at] = -(-sizes[at] // 2)
    return tuple(sizes)


def _same(one: Moves, other: Moves, tolerance: float = 1e-6) -> bool:
    # Not to the bit: kernels may round 24 elements and 12 differently. A real difference is of the size of the
    # update. Step by step, since steps differ in size.
    return all(
        bool((mine - yours).nan_to_num().abs().max() <= tolerance * yours.nan_to_num().abs().max() + 1e-12)
        and torch.equal(mine.isnan(), yours.isnan())
        for mine, yours in zip(one, other, strict=True)
    )


class _Operations(TorchDispatchMode):
    """Notes the operations of torch, and ends at the first that sends something to other ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.collective = ""
        self.sums = False
        """Whether some elements of a tensor became one number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.names.append(name)
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.collective = name
            raise OptimizerError(f"{name} in a trial")
        if is_sum(func.overloadpacket):
            self.sums |= any(torch.is_tensor(each) and each.numel() > 1 for each in tree_leaves(args))
        return func(*args, **(kwargs or {}))


def _operations(case: Case, shape: tuple[int, ...]) -> list[str]:
    """The operations by which a double updates a parameter of this shape, without numbers."""
    on_meta = replace(case, device=torch.device("meta"))
    watch = _Operations()
    nothing = torch.empty((), device="meta").expand(shape)
    with watch:
        try:
            run_double(on_meta, [[nothing, nothing]], num_steps=3, late=False)
        except Exception as error:  # it wants numbers: it is compared up to here
            watch.names.append(type(error).__name__)
    return watch.names
