"""Units: the parameters of a model that are gathered together, and the modules whose forward needs them (stage 3).

Without patterns from the user, a unit is a repeated block: a member of the outermost list (ModuleList, Sequential) with
several modules of one class. Or it is a child of a module with several children of one class and no such list in them.
A module outside of blocks is a separate unit, so that an embedding, a last norm and a head are gathered apart:

    embedding   |  layers.0  |  layers.1  |  layers.2  |   norm   |  head        six units; a head that is tied to the
    weight      |  all in it |            |            |   weight |  weight      embedding calls for the embedding's

Units are gathered before a forward and freed after it. A smaller unit takes less memory and more collectives, and a
parameter that no unit's forward covers could not be gathered in time.

Modules that run again in backward, or are kept on the host, are named in the same way: by patterns, or as the blocks.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.names import meant_by, nearest
from shardwise.plan.outlines import Outline, parents
from shardwise.plan.specs import Modules

ITSELF = "."
"""The model itself, among the names of units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Parameters that are gathered together."""

    name: str
    """Of the module; "" for the model itself."""
    modules: tuple[str, ...]
    """The modules whose forwards read them: the unit's own, and those outside of it that hold a tie to it."""
    parameters: tuple[str, ...]
    """By their first names, in the order of the model."""


def unit_of(units: Sequence[Unit]) -> dict[str, str]:
    """Parameter -> name of its unit."""
    return {parameter: unit.name for unit in units for parameter in unit.parameters}


def plan_units(
    outline: Outline,
    *,
    first_names: Mapping[str, str],
    patterns: Sequence[str] | None = None,
    placed: Collection[str] | None = None,
) -> tuple[Unit, ...]:
    """The units of a model, in the order of their first parameters.

    first_names: every name of a parameter -> its first one, which has the others as ties. patterns: names or globs of
    the modules that are units, "." for the model itself. Matches of one pattern inside each other are one unit, and a
    parameter belongs to the innermost unit. placed: the modules that are on a stage of a pipeline. No unit reaches
    beyond one, and parameters outside of all have none. Raises PlanError for patterns that match nothing, or no module
    that is called and holds parameters.
    """
    # A parameter has one unit, that of its first name. Every other unit in which a tie of it is becomes a module before
    # whose forward that unit is gathered too.
    chosen = (
        set(repeated_blocks(outline))
        if patterns is None
        else _matched_modules(outline, patterns, setting="sharding.units", with_parameters=True)
    )
    holders: dict[str, list[str]] = {}  # parameter -> the units that hold it, the one of its first name first
    for unit, parameter in _homes(outline, chosen, placed):
        found = holders.setdefault(first_names[parameter], [])
        if unit not in found:
            found.append(unit)
    for unit, module, parameter in _other_homes(outline, chosen):
        found = holders.get(first_names[parameter], [])
        # A unit inside of the shared module is gathered by its own forward, under whichever name that is called. Only a
        # unit around it misses the calls under the other names.
        is_apart = bool(found) and not f"{found[0]}.".startswith(f"{module}.")
        if is_apart and unit not in found:
            found.append(unit)
    members: dict[str, list[str]] = {}
    modules: dict[str, list[str]] = {}
    for parameter, units in holders.items():
        members.setdefault(units[0], []).append(parameter)
        called = modules.setdefault(units[0], [units[0]])
        called += [name for name in units[1:] if name not in called]
    return tuple(
        Unit(name=name, modules=tuple(modules[name]), parameters=tuple(parameters))
        for name, parameters in members.items()
    )


def _homes(outline: Outline, chosen: Collection[str], placed: Collection[str] | None) -> Iterator[tuple[str, str]]:
    """(unit that holds it, parameter) for every place of a parameter that has a unit, in the order of the model."""

    def walk(
        module: Outline, unit: str | None, called: str, is_placed: bool, is_inside: bool
    ) -> Iterator[tuple[str, str]]:
        """`called`: the innermost module around whose forward is called, which reads what its lists hold. `is_inside`:
        it also reads what its other children hold."""
        # Only a module whose forward is called can gather: a list, and what an attention of torch computes with itself
        # (without calling it), belong to the module around.
        if not module.is_container and not is_inside:
            called = module.name
        is_inside |= _is_one(module)
        if placed is not None and any(name in placed for name in module.names):
            is_placed = True
            # A unit around several stages would gather, on each rank, parameters that other ranks hold: it ends here.
            unit = called if unit is not None else None
        if module.name in chosen:
            unit = module.name
        if is_placed:
            for parameter, _ in module.own_parameters:
                yield called if unit is None else unit, parameter
        for child in module.children:
            yield from walk(child, unit, called, is_placed, is_inside)

    return walk(outline, None, outline.name, placed is None, False)


def _other_homes(outline: Outline, chosen: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """(unit around another name, module, parameter in it) for modules that are reached by several names."""
    for module in outline.modules():
        for alias in module.aliases:
            around = next((name for name in parents(alias) if name in chosen), None)
            if around is not None:
                for inner in module.modules():
                    for parameter, _ in inner.own_parameters:
                        yield around, module.name, parameter


def repeated_blocks(outline: Outline) -> Iterator[str]:
    """The names of repeated blocks, the outermost ones."""
    if _is_one(outline):
        yield outline.name
        return
    # Blocks without parameters (activations) repeat too, and need no unit.
    # By name: two outlines are compared with all that is in them.
    kinds = {child.name: child.kind for child in outline.children if child.num_places and not child.is_container}
    count_of = Counter(kinds.values())
    for child in outline.children:
        is_repeated = child.name in kinds and count_of[child.kind] > 1
        # An encoder and a decoder of one class are repeated, but their layers are the blocks: look inside of them.
        if is_repeated and (_is_list(outline) or not _has_list(child)):
            yield child.name
        else:
            yield from repeated_blocks(child)


def _is_one(outline: Outline) -> bool:
    """Whether it computes with what is in it."""
    return outline.is_indivisible and not _has_list(outline)


def _has_list(outline: Outline) -> bool:
    """Whether there is a list in it with several modules of one class that hold parameters."""
    if _is_list(outline):
        kinds = Counter(child.kind for child in outline.children if child.num_places and not child.is_container)
        if any(count > 1 for count in kinds.values()):
            return True
    return any(map(_has_list, outline.children))


def _is_list(outline: Outline) -> bool:
    """Whether its members run one by one."""
    return outline.is_container or outline.kind == "Sequential"


def _matched_modules(
    outline: Outline, patterns: Sequence[str], *, setting: str, with_parameters: bool = False
) -> set[str]:
    """The first names of the modules that patterns of a setting mean: the outermost matches of each.

    with_parameters: of those that hold parameters. Raises PlanError for patterns without a module that is called.
    """
    by_name = {name: module for module in outline.modules() for name in module.names if name}
    chosen: set[str] = {outline.name} if ITSELF in patterns else set()
    problems = []
    for pattern in patterns:
        if pattern == ITSELF:
            continue
        meant = meant_by(pattern, list(by_name))
        # "layers.*" also matches what is inside of "layers.0": globs know no dots. The outermost are meant.
        every = frozenset(meant)
        outermost = [name for name in meant if every.isdisjoint(parents(name))]
        usable = [by_name[name] for name in outermost if by_name[name].num_places or not with_parameters]
        if not meant:
            near = nearest(pattern, list(by_name))
            hint = f"; the nearest module is {near!r}" if near is not None else "; the model has no modules inside"
            problems.append(f"{setting}: {pattern!r} matches none of the {len(by_name)} modules{hint}")
        elif not usable:
            problems.append(f"{setting}: {pattern!r} matches modules without parameters only, such as {meant[0]!r}")
        elif lists := [each for each in usable if each.is_container]:
            problems.append(
                f"{setting}: {pattern!r} matches {lists[0].name!r}, a {lists[0].kind} without a call of its "
                f"forward; name its modules ({lists[0].name + '.*'!r}), or the module around it"
            )
        chosen |= {each.name for each in usable}
    if problems:
        raise PlanError(*problems)
    return chosen


def meant_modules(outline: Outline, asked: Modules, *, setting: str) -> list[str]:
    """First names of the modules that a setting means, in the order of the model; none is inside of another.

    Raises PlanError for a model without blocks, and for names of no module that is called.
    """
    chosen = set(repeated_blocks(outline)) if asked == "blocks" else _matched_modules(outline, asked, setting=setting)
    if not chosen:
        raise PlanError(f'{setting}: "blocks" asked, but no block of the model repeats; give the names of its modules')
    if found := _without_call(outline, chosen):
        inner, around = found
        raise PlanError(
            f"{setting}: {inner!r} is a part of {around!r}, which computes with its parameters and does not call it; "
            f"name {around!r}"
        )
    return [
        each.name
        for each in outline.modules()
        if each.name in chosen and (not each.name or chosen.isdisjoint((*parents(each.name), "")))
    ]


def _without_call(outline: Outline, chosen: set[str]) -> tuple[str, str] | None:
    """A chosen module that is never called, and the one that computes with it."""
    for around in outline.modules():
        # A layer of a transformer calls what is in it where it trains; attention does not.
        if around.is_indivisible and around.kind == "MultiheadAttention":
            for inner in around.modules():
                if inner is not around and inner.name in chosen:
                    return inner.name, around.name
    return None
