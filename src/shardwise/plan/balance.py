"""A placement that makes the loads of the stages even: the model is opened as far as that needs, and cut in order.

A unit is a module that stays whole. Units are cut into runs, one for each stage, so that the largest load is as small
as it can be. A module is opened only if that lowers the largest load by a quarter: the code of an opened module becomes
glue, which every rank runs. Two models on 2 stages:

    embed 10 | layers.0 4 | layers.1 4 | layers.2 4 | head 10    cut 18 + 14
    with layers.1 opened   10 | 4 | 2 2 | 4 | 10                 cut 16 + 16: 16 > 0.75 * 18, so it stays whole
    embed 2 | layer 20 | head 2                                  cut 22 + 2
    with layer opened      2 | 5 5 5 5 | 2                       cut 12 + 12: 12 < 0.75 * 22, so it is opened
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from shardwise.errors import PlanError
from shardwise.plan.outlines import Outline, parents


def least_largest_load(loads: Sequence[float], num_runs: int) -> float:
    """The largest load of a run in the best cut of `loads` (none negative) into `num_runs` runs, none empty.

    Found by halving between a bound below and a load that some cut reaches: runs filled in order up to a limit are the
    fewest. There must be as many loads as runs, so that fewer runs can be cut further.
    """
    # The answer is at least the largest load, and at most all of them in one run. Every trial moves a bound to a load
    # that some cut really has, so that whole numbers end after few trials and floats end at an exact sum, not near one.
    sums = list(accumulate(loads, initial=0))
    low, high = max(end - start for start, end in pairwise(sums)), sums[-1]
    while low < high:
        # Flops of large models are beyond what a float holds exactly: whole numbers stay whole.
        limit = (low + high) // 2 if isinstance(high, int) else (low + high) / 2
        num, reached, beyond = _filled(sums, limit)
        if num <= num_runs and reached < high:
            high = reached
        elif num > num_runs and beyond > low:
            low = beyond
        else:  # neighbours among the floats
            break
    return high


def _filled(sums: Sequence[float], limit: float) -> tuple[int, float, float]:
    """Runs filled in order up to `limit`: how many, the largest, and the least limit that would change one of them."""
    num, reached, beyond, start = 0, sums[0], inf, 0
    while start + 1 < len(sums):
        end = max(start + 1, bisect_right(sums, sums[start] + limit) - 1)
        reached = max(reached, sums[end] - sums[start])
        if end + 1 < len(sums):
            beyond = min(beyond, sums[end + 1] - sums[start])
        num, start = num + 1, end
    return num, reached, beyond


def cut_evenly(loads: Sequence[float], num_runs: int) -> list[int]:
    """Where each run ends, in the best cut of `loads` (none negative) into `num_runs` runs, none empty.

    Of the cuts with the least largest load, take the least sum of squares, so that the other runs are even too. Of
    those take the one with the lightest first and last run: the first holds most activations, the last computes the
    loss.
    """
    # best[end]: the cheapest cut of the first `end` loads into `num` runs, as (sum of squares, load of the outer runs).
    # Only ends within the limit are looked at, so the time is far from loads * loads * runs for models of many layers.
    limit = least_largest_load(loads, num_runs)
    sums = list(accumulate(loads, initial=0))
    best: list[tuple[float, float]] = [(0, 0)] + [(inf, inf)] * len(loads)
    cuts: list[list[int]] = []
    for num in range(1, num_runs + 1):
        before, best = best, [(inf, inf)] * len(sums)
        cuts.append([0] * len(sums))
        for end in _ends_within(sums, limit, num, num_runs - num):
            for start in range(end - 1, num - 2, -1):
                if (load := sums[end] - sums[start]) > limit:
                    break
                squares, outer = before[start]
                cost = (squares + load * load, outer + (load if num in (1, num_runs) else 0))
                if cost < best[end]:
                    best[end], cuts[-1][end] = cost, start
    ends = [len(loads)]
    for starts in reversed(cuts[1:]):
        ends.append(starts[ends[-1]])
    return ends[::-1]


def _ends_within(sums: Sequence[float], limit: float, num_before: int, num_behind: int) -> range:
    """Where the runs before an end, and those behind it, can stay within `limit`, as far as their sum shows."""
    reach = limit * (1 + 1e-9)  # a little further, for sums that are not exact
    first = bisect_left(sums, sums[-1] - num_behind * reach)
    last = bisect_right(sums, num_before * reach)
    return range(max(first, num_before), min(last, len(sums) - num_behind))


_WORTH_OPENING = 0.75
"""The largest load must fall below this part of what it was, or a module stays whole: each opened one costs glue."""

_NOT_WORTH_OPENING = 1.05
"""A module is closed again where the largest load stays within this multiple of what opening it gave."""

_SHOWN_NAMES = 12

Opened = frozenset[str]
"""Names of the modules that were opened to make loads even."""


@dataclass(slots=True)
class _BalancedUnit:
    """A module that stays whole, with the parameters that go to its stage because their own module was opened."""

    module: Outline
    load: float
    parameters: list[str]


def balanced_stages(
    outline: Outline, *, num_stages: int, work: Mapping[str, float] | None = None, order: Sequence[str] | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """The stage of every module that stays whole, and of the own parameters of the opened ones.

    Stages are runs of modules in `order`. Raises PlanError where there are more stages than modules to place.
    """
    tree = _Tree(outline, work, order)
    if num_stages == 1 and not tree.units(frozenset()):
        return {}, dict.fromkeys((name for module in outline.modules() for name, _ in module.own_parameters), 0)
    # First enough units for all stages, then evener ones, and at the end closed again what turned out to be no help.
    opened = _opened_for(tree, num_stages)
    while (further := _opened_further(tree, opened, num_stages)) is not None:
        opened = further
    opened = _without_idle(tree, opened, num_stages)
    units = tree.units(opened)
    modules: dict[str, int] = {}
    parameters: dict[str, int] = {}
    ends = cut_evenly([unit.load for unit in units], num_stages)
    for stage, (start, end) in enumerate(pairwise([0, *ends])):
        for unit in units[start:end]:
            modules[unit.module.name] = stage
            parameters.update(dict.fromkeys(unit.parameters, stage))
    return modules, parameters


def _opened_for(tree: "_Tree", num_stages: int) -> Opened:
    """What has to be opened so that there is a unit for each stage: the heaviest first."""
    opened: Opened = frozenset()
    while len(units := tree.units(opened)) < num_stages:
        openable = [unit for unit in units if unit.module.name in tree.openable]
        if not openable:
            names = [unit.module.name for unit in units]
            shown = ", ".join(names[:_SHOWN_NAMES]) + ", ..." * (len(names) > _SHOWN_NAMES)
            raise PlanError(
                f"pipeline: {num_stages} stages asked, but the model has only {len(names)} modules that can be placed"
                f"{': ' * bool(names)}{shown}; use fewer stages (mesh.pp, pipeline.chunks)"
            )
        # A module with parameters of its own computes with them in its forward, between its children. Opened, that
        # becomes glue: last of all.
        heaviest = max(openable, key=lambda unit: (not unit.module.own_parameters, unit.load))
        opened |= {heaviest.module.name}
    return opened


def _opened_further(tree: "_Tree", opened: Opened, num_stages: int) -> Opened | None:
    """What to open so that the largest load falls far enough to be worth it; None where nothing does."""
    units = tree.units(opened)
    loads = [unit.load for unit in units]
    limit = _WORTH_OPENING * least_largest_load(loads, num_stages)
    # Not even perfectly even loads would be worth it.
    if sum(loads) / num_stages >= limit:
        return None
    # No cut can bring a stage below its heaviest unit: those above the limit all have to be opened, and what is in them
    # where it is as heavy again.
    while heavy := {unit.module.name for unit in units if unit.load >= limit}:
        if not heavy <= tree.openable:
            return None
        opened |= heavy
        if tree.largest_load(opened, num_stages) < limit:
            return opened
        units = tree.units(opened)
    return _one_opened(tree, opened, num_stages, limit)


def _one_opened(tree: "_Tree", opened: Opened, num_stages: int, limit: float) -> Opened | None:
    """The one unit of a largest stage to open, so that the largest load falls below `limit`; None where none does."""
    units = tree.units(opened)
    runs = [units[start:end] for start, end in pairwise([0, *cut_evenly([unit.load for unit in units], num_stages)])]
    largest = max(sum(unit.load for unit in run) for run in runs)
    # A cut inside a unit moved to the end of that unit makes no run heavier than by the unit: a light one cannot help.
    inside = [
        unit.module
        for run in runs
        if sum(unit.load for unit in run) == largest
        for unit in run
        if unit.module.name in tree.openable and unit.load >= largest - limit
    ]
    for holds_parameters in (False, True):  # a module with parameters of its own is opened last
        trials = [opened | {module.name} for module in inside if bool(module.own_parameters) == holds_parameters]
        best = min(trials, key=lambda trial: tree.largest_load(trial, num_stages), default=None)
        if best is not None and tree.largest_load(best, num_stages) < limit:
            return best
    return None


def _without_idle(tree: "_Tree", opened: Opened, num_stages: int) -> Opened:
    """What was opened on the way to something better, and brings next to nothing itself, is closed again."""
    limit = _NOT_WORTH_OPENING * tree.largest_load(opened, num_stages)
    # From the inside out: a module can be closed only when those in it are. Names break ties, alike on all ranks.
    for name in sorted(opened, key=lambda name: (-name.count("."), name)):
        closed = opened - {name}
        if len(tree.units(closed)) >= num_stages and tree.largest_load(closed, num_stages) <= limit:
            opened = closed
    return opened


class _Tree:
    """A model's modules with their loads, and the units that they make when some are opened."""

    def __init__(self, outline: Outline, work: Mapping[str, float] | None, order: Sequence[str] | None) -> None:
        self._outline = outline
        self._work = work
        self._position = None if order is None else {name: at for at, name in enumerate(order)}
        self._elements: dict[str, int] = {}
        self._with_parameters: set[str] = set()
        self.openable: set[str] = set()
        """Names of the modules that hold others with parameters."""
        self._survey(outline)
        # Whole, these could not be run on one stage: part of what is in them is called from elsewhere.
        self._always_open = self._torn_modules() | self._uncalled_modules()

    def units(self, opened: Opened) -> list[_BalancedUnit]:
        """The units in order of execution, when these modules are opened."""
        units: list[_BalancedUnit] = []
        waiting: list[tuple[list[str], float]] = []  # parameters whose own module holds no unit, with their load
        self._walk(self._outline, opened, units, waiting)
        for names, load in waiting if units else ():
            _give(units[-1], names, load)
        if self._position is None:
            return units
        positions = self._positions(units)
        return [units[at] for at in sorted(range(len(units)), key=positions.__getitem__)]

    def largest_load(self, opened: Opened, num_stages: int) -> float:
        """The largest load of a stage in the best cut."""
        return least_largest_load([unit.load for unit in self.units(opened)], num_stages)

    def _survey(self, module: Outline) -> None:
        for child in module.children:
            self._survey(child)
            if child.name in (self.openable if child.is_container else self._with_parameters):
                self.openable.add(module.name)
        self._elements[module.name] = sum(num for _, num in module.own_parameters) + sum(
            self._elements[child.name] for child in module.children
        )
        if module.own_parameters or any(child.name in self._with_parameters for child in module.children):
            self._with_parameters.add(module.name)

    def _torn_modules(self) -> set[str]:
        """Modules that hold, under some name, a module that is also outside of them: they cannot be placed whole."""
        module_of = {name: module for module in self._outline.modules() for name in module.names}
        torn: set[str] = set()
        for module in self._outline.modules():
            if module.aliases and module.name in self._with_parameters:
                # Around one of its names, but not around all of them: the shared module would be on two stages.
                around = [{module_of[outer].name for outer in parents(name)} for name in module.names]
                torn |= around[0].union(*around) - around[0].intersection(*around)
        return torn

    def _uncalled_modules(self) -> set[str]:
        """Modules that are not called themselves while one in them is."""
        if self._position is None:
            return set()
        called = {outer for name in self._position for outer in parents(name)}
        return called - set(self._position)

    def _walk(
        self, module: Outline, opened: Opened, units: list[_BalancedUnit], waiting: list[tuple[list[str], float]]
    ) -> None:
        """Append the units in a module; own parameters of an opened one go to the unit that follows them."""
        if module.name not in self._with_parameters:
            return
        if module.name and not module.is_container and module.name not in self._always_open | opened:
            units.append(_BalancedUnit(module, self._load(module), []))
            for names, load in waiting:
                _give(units[-1], names, load)
            waiting.clear()
            return
        start = len(units)
        for child in module.children:
            self._walk(child, opened, units, waiting)
        own = [name for name, _ in module.own_parameters]
        # The opened module's forward uses its own parameters as glue. On the stage of the child that runs first they
        # are near to where they are used.
        if own and len(units) > start:
            positions = self._positions(units)
            _give(units[min(range(start, len(units)), key=positions.__getitem__)], own, self._own_load(module))
        elif own:
            waiting.append((own, self._own_load(module)))

    def _positions(self, units: Sequence[_BalancedUnit]) -> list[int]:
        """When each unit is first called; one that never is follows the one registered before it."""
        if self._position is None:
            return list(range(len(units)))
        positions: list[int] = []
        for unit in units:
            positions.append(self._position.get(unit.module.name, positions[-1] if positions else -1))
        return positions

    def _load(self, module: Outline) -> float:
        return self._elements[module.name] if self._work is None else self._work.get(module.name, 0)

    def _own_load(self, module: Outline) -> float:
        """The load of an opened module beyond that of the modules in it."""
        if self._work is None:
            return sum(num for _, num in module.own_parameters)
        return max(0, self._load(module) - sum(self._load(each) for each in _called_children(module)))


def _called_children(module: Outline) -> Iterator[Outline]:
    for child in module.children:
        if child.is_container:
            yield from _called_children(child)
        else:
            yield child


def _give(unit: _BalancedUnit, parameters: Sequence[str], load: float) -> None:
    unit.parameters += parameters
    unit.load += load
