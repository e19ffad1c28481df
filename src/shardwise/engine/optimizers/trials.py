"""Trials of optimizers that are not torch's own: doubles update small tensors, and what they did is compared.

the plan                   the doubles have                             must do the same
cuts parameters            a 4 x 6 matrix, and shapes of the group      as its two halves in one step
gives them to owners       a matrix and another one                     with a third one, and alone
updates them by bucket     two matrices                                 one after the other, to the bit

steps    1 .. 11             with gradients of several sizes: some optimizers begin late, or clip what is large
         5040000 - 1 .. + 1  after that every count that the double keeps is set here: past any delay, and at a
                             multiple of nearly every period
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isclose, isfinite, prod
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from shardwise.comm.accelerators import random_numbers_kept
from shardwise.engine.forward.packed_tensors import is_shell
from shardwise.engine.optimizers.doubles import (
    Case,
    Numbers,
    Operations,
    Run,
    cases_of,
    numbers_of,
    run_double,
    trial_tensors,
)
from shardwise.engine.optimizers.known import keys_not_along
from shardwise.engine.optimizers.traits import OptimizerTraits, UpdateTraits, in_table, kind_of

_SMALL = (4, 6)
_STEPS = 11
_MOST_ELEMENTS = 1 << 14
"""Of a trial with numbers. Larger shapes are reduced, and only their operations are compared."""


def traits_of(optimizer: torch.optim.Optimizer, device: torch.device) -> OptimizerTraits:
    """What is known of an optimizer. device: that of the masters; no parameter has a gradient now."""
    known = in_table(optimizer)
    if known is not None:
        return OptimizerTraits(optimizer=optimizer, of_groups=[{(): known} for _ in optimizer.param_groups])
    found: dict[object, UpdateTraits] = {}
    of_groups: list[dict[object, UpdateTraits]] = []
    with random_numbers_kept(device):
        for group in optimizer.param_groups:
            of_groups.append({})
            for case in cases_of(optimizer, group, device):
                kind = kind_of(case.state)
                # Many groups differ in nothing but the rate, in place of which doubles have one of their own.
                settings = {key: each for key, each in group.items() if key not in ("params", "lr", "initial_lr")}
                key = repr(settings), kind, tuple(_own_shapes(case))
                if key not in found:
                    found[key] = tried(case)
                of_groups[-1][kind] = found[key]
    traits = OptimizerTraits(optimizer=optimizer, of_groups=of_groups)
    # A step of one that wraps another steps that one, and not a double of it.
    if inner := [each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer)]:
        keeps = any(traits_of(each, device).keeps_gradients for each in inner)
        own = [
            {kind: replace(each, keeps_gradients=keeps, made=frozenset()) for kind, each in group.items()}
            for group in of_groups
        ]
        traits = replace(traits, of_groups=own)
    return traits


def tried(case: Case) -> UpdateTraits:
    """What doubles find out."""
    one, other, third = (trial_tensors(_SMALL, _STEPS, seed=seed) for seed in range(3))
    third[1:] = [100 * each for each in third[1:]]
    seen = Operations()
    alone = run_double(case, [one], num_steps=_STEPS, late=True, watch=seen)
    if sent_by := seen.sent_by or _wants_ranks(alone):  # nothing else may run without a watch
        return UpdateTraits(looks_at="parameter", steps_apart=False, keeps_gradients=True, sent_by=sent_by)
    is_late = alone.error is None
    if not is_late:  # a count may be a place in a list, or more than the optimizer can bear
        alone = run_double(case, [one], num_steps=_STEPS, watch=seen)
    together, changed = (run_double(case, [one, each], num_steps=_STEPS, late=is_late) for each in (other, third))
    is_coupled = _is_coupled(case, alone, together, changed)
    is_elementwise = not is_coupled and _is_elementwise(case, late=is_late)
    return UpdateTraits(
        looks_at="group" if is_coupled else "element" if is_elementwise else "parameter",
        has_products=seen.has_products or alone.error is not None,
        steps_apart=_steps_apart(case),
        keeps_gradients=alone.keeps_gradients or alone.error is not None,
        whole_keys=keys_not_along(alone.double.state) if is_elementwise else frozenset(),
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


def _is_elementwise(case: Case, *, late: bool) -> bool:
    """Whether halves are updated as a whole is."""
    own = _own_shapes(case)
    for shape in dict.fromkeys([_SMALL, *map(_reduced, own)]):
        num_steps = _STEPS if shape == _SMALL else 3
        matrix, seen = trial_tensors(shape, num_steps), Operations()
        # Halves are 1-D, as slices in a bucket are: an optimizer that goes by rows or shapes gives itself away.
        half = prod(shape) // 2
        halves = [[each.reshape(-1)[part] for each in matrix] for part in (slice(half), slice(half, None))]
        whole = run_double(case, [matrix], num_steps=num_steps, late=late, watch=seen)
        # AdamP projects only gradients that are nearly orthogonal to their matrix.
        if whole.error or seen.has_sums:
            return False
        parts = run_double(case, halves, num_steps=num_steps, late=late)
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
        run = run_double(replace(case, state={}), [list(torch.ones(2, size))], num_steps=1)
        state = {} if run.error else run.double.state[run.double.param_groups[0]["params"][0]]
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        # A table of codes has one size, a scale for each block has not.
        return {
            key: object() if is_shell(value) else value.numel()
            for key, value in tensors.items()
            if is_shell(value) or value.numel() not in (1, size)
        }

    return odd_sizes(1 << 14) != odd_sizes(1 << 15)


def _is_coupled(case: Case, alone: Run, together: Run, changed: Run) -> bool:
    """Whether the update of one parameter depends on the others.

    alone, together, changed: runs of a parameter, of this one and another, and of this one and a third.
    """
    if alone.error or together.error or changed.error:  # it wants other shapes than these
        return _needs_others(case)
    if _keeps_sums(numbers_of(alone.double), numbers_of(together.double)):
        return True
    size = prod(_SMALL)
    with_other, with_third = ([move[:size] for move in run.moves] for run in (together, changed))
    # Matrices of one shape may be updated in one call, which rounds otherwise: in bfloat16, as a rule.
    return not _same(with_other, with_third) or not _same(with_other, alone.moves, 0.05)


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
    both = [(way[0], each[2], together[way][2]) for way, each in alone.items() if way in together]
    # Those in states begin with the place of their parameter. Whole numbers are counts.
    return any(
        place in ("", 0)
        and isfinite(mine)
        and isfinite(yours)
        and not (mine.is_integer() and yours.is_integer())
        and not isclose(mine, yours)
        for place, mine, yours in both
    )


def _steps_apart(case: Case) -> bool:
    """Whether a step on each parameter does, to the bit, what one step on all of them does.

    It does not for an optimizer that counts its steps once for all parameters, or whose update looks at several. A
    count may change the update only later, so what the doubles keep is compared too.
    """
    matrices = [trial_tensors(_SMALL, 4, seed=seed) for seed in range(2)]
    at_once, one_by_one = (_run_apart(case, matrices, one_by_one=each) for each in (False, True))
    if at_once is None or one_by_one is None:  # it wants other shapes than these: nothing can be concluded
        return False
    return torch.equal(at_once[0], one_by_one[0]) and at_once[1] == one_by_one[1]


def _run_apart(
    case: Case, matrices: Sequence[Sequence[torch.Tensor]], *, one_by_one: bool
) -> tuple[torch.Tensor, dict[Any, float]] | None:
    """How parameters move, and the numbers that are kept of all of them; None where a step raises."""
    without = nn.Parameter(matrices[0][0].to(case.device, copy=True))

    def step(double: torch.optim.Optimizer) -> None:
        (settings,) = double.param_groups
        # One of them has no gradient, as those that no microbatch used.
        given: dict[str, list[Any]] = {key: settings[key] for key in ("params", "param_names") if key in settings}
        given["params"] = [*given["params"], without]
        every = range(len(given["params"]))
        # Where there are several groups, a part has often nothing of some.
        empty = [{**settings, "params": []}] if one_by_one and len(case.optimizer.param_groups) > 1 else []
        for at in every if one_by_one else (None,):
            settings.update({key: each if at is None else each[at : at + 1] for key, each in given.items()})
            double.param_groups = [settings, *empty] if at else [*empty, settings]
            double.step()
        double.param_groups = [settings]
        settings.update(given, params=given["params"][:-1])

    run = run_double(case, matrices, num_steps=4, step=step)
    if run.error:
        return None
    numbers = {way: number for way, (_, _, number) in numbers_of(run.double).items() if way[0] in ("", 0)}
    return torch.cat([*run.moves, without.detach().cpu().flatten()]), numbers


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
