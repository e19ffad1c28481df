"""From a trace, with the features that have to be on one rank, to rules of tensor parallelism: the inference of "auto".

A trace gives every feature of what linear maps read and give a group. Features of one group have to be on one rank.
Groups that several maps have make a family: the maps that give them take `column`, those that read them `row`.

    query  0 0 1 1 2 2 3 3                             column(groups=4)
    key    0 0 1 1 2 2 3 3   ->   out  0 0 1 1 2 2 3 3     row(groups=4)
    value  0 0 1 1 2 2 3 3

A fused projection has the groups several times, side by side: `0 1 2 3 | 0 1 2 3 | 0 1 2 3` are three parts. A family
is cut if all its members have their groups in one order, with at least one group per rank. It also begins with columns
and ends in rows. A map that would be both is what the earlier family needs it to be.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.errors import plural

WHOLE = 0
"""The group of what every rank has."""

_UNUSED = -1
"""The group of an element of a parameter that nothing reads."""

Groups = tuple[int, ...]
"""The group of each index of a dim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMap:
    """A linear map or an embedding, as a forward used it."""

    module: str
    is_embedding: bool = False
    outputs: Groups = ()
    inputs: tuple[Groups, ...] = ()
    """Of each call that reads something that may be cut."""
    has_whole_input: bool = False
    """A call reads what every rank has."""
    column_problem: str = ""
    """Why its outputs cannot be cut."""
    row_problem: str = ""
    """Why its inputs cannot be cut."""
    why_whole: str = ""
    """What made its outputs whole, where something did."""
    is_head: bool = False
    """What it gives is the model's output."""
    vocabulary: int = 0
    """Rows of an embedding, or outputs of a head; 0 where a rule `vocab` does not fit it."""
    weight: str = ""
    """The first name of its weight; ties have one."""
    num_holders: int = 1
    """Modules that hold its weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedParameter:
    """A parameter of another module that meets what may be cut."""

    name: str
    dim: int | None
    """The dim that has its groups; None where several have."""
    groups: Groups


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTrace:
    """What one forward showed, in the order in which its maps ran."""

    maps: tuple[TracedMap, ...]
    parameters: tuple[TracedParameter, ...] = ()
    reasons: Mapping[int, str] = field(default_factory=dict)
    """What tied a group together, by the group."""
    not_run: tuple[str, ...] = ()
    """Linear maps that did not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MapFamily:
    """Maps that are cut together."""

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    num_groups: int
    """Of most features."""
    widths: frozenset[int]
    """Sizes of the dims that are cut, and of their parts."""
    rules: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleInference:
    """The rules that a trace allows, and what is left whole."""

    families: tuple[MapFamily, ...] = ()
    vocabulary: tuple[str, ...] = ()
    """Embeddings of tokens and heads over them."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Map -> why it is whole on every rank."""

    @property
    def rules(self) -> dict[str, str]:
        """All rules, by module or parameter."""
        families = {name: rule for family in self.families for name, rule in family.rules.items()}
        return families | dict.fromkeys(self.vocabulary, "vocab")


def infer_rules(trace: ForwardTrace, *, num_ranks: int, without: Mapping[str, str] | None = None) -> RuleInference:
    """The rules for `num_ranks`. `without`: maps that stay whole -> why."""
    # In the order in which maps ran: where a map could be in two families, the earlier one needs it first.
    without = without or {}
    reasons: dict[str, tuple[int, str]] = {}
    """With the number of groups of the family: a map may be in two, and what would have cut it most says more."""
    maps = {each.module: each for each in trace.maps}
    families = []
    roles: dict[str, str] = {}
    for members in _members(trace):
        columns, rows = members.columns, members.rows
        if why := _unfit(members, maps, without, roles) or _uneven(members, maps, trace, num_ranks):
            # A refused family stays whole, which is right in any case; the user is shown why.
            groups = {group for groups in members.sequences(maps) for group in groups} - {WHOLE, _UNUSED}
            weight = len(groups) if len(groups) > 1 else 0
            for each in (*columns, *rows):
                if each not in reasons or weight > reasons[each][0] or (weight == reasons[each][0] and each in columns):
                    reasons[each] = weight, why
            continue
        families.append(_family(members, maps))
        roles |= dict.fromkeys(columns, "column") | dict.fromkeys(rows, "row")
    vocabulary = tuple(_vocabulary(trace, roles, num_ranks, without))
    left = {name: why for name, (_, why) in reasons.items()}
    # Last wins: what a rehearsal showed, and that a map did not run, say more than what its family lacks.
    left |= {**without, **dict.fromkeys(trace.not_run, "it did not run on the sample")}
    cut = {*roles, *vocabulary}
    return RuleInference(
        families=tuple(families),
        vocabulary=vocabulary,
        left={name: why for name, why in left.items() if name not in cut},
    )


@dataclass(slots=True)
class _Members:
    """Maps whose outputs, and maps whose inputs, share groups; with the parameters that they meet."""

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    parameters: list[TracedParameter] = field(default_factory=list)

    def sequences(self, maps: Mapping[str, TracedMap]) -> list[Groups]:
        """The groups along every dim that would be cut."""
        found = [maps[each].outputs for each in self.columns]
        found += [groups for each in self.rows for groups in maps[each].inputs]
        return found + [each.groups for each in self.parameters]


def _members(trace: ForwardTrace) -> Iterator[_Members]:
    """Families, in the order in which their first maps ran; those that are whole come first."""
    # Union-find: groups that are along one dim belong to one family, whichever map or parameter brings them together.
    root: dict[int, int] = {}

    def find(group: int) -> int:
        while root.setdefault(group, group) != group:
            root[group] = root[root[group]]
            group = root[group]
        return group

    dims = [each.outputs for each in trace.maps] + [sum(each.inputs, ()) for each in trace.maps]
    for groups in [*dims, *(each.groups for each in trace.parameters)]:
        first, *others = {*groups} - {WHOLE, _UNUSED} or {WHOLE}
        for group in others:
            root[find(group)] = find(first)
    found: dict[int, _Members] = {}

    def family_of(groups: Groups) -> _Members:
        group = next((group for group in groups if group not in (WHOLE, _UNUSED)), None)
        return _Members() if group is None else found.setdefault(find(group), _Members())

    for each in trace.maps:
        if each.outputs:
            family = family_of(each.outputs)
            family.columns.append(each.module)
            # `family_of` keeps no family for what is whole: it is given out at once, or its reason would be lost.
            if set(each.outputs) == {WHOLE}:
                yield family
        for groups in each.inputs:
            rows = family_of(groups).rows
            if each.module not in rows:
                rows.append(each.module)
    for parameter in trace.parameters:
        family_of(parameter.groups).parameters.append(parameter)
    yield from found.values()


def _unfit(
    members: _Members, maps: Mapping[str, TracedMap], without: Mapping[str, str], roles: Mapping[str, str]
) -> str:
    """Why single members cannot be cut as the family needs; nothing where they can."""
    columns, rows = members.columns, members.rows
    for each in (*columns, *rows):
        if each in without:
            return without[each]
        if each in roles:
            return f"{each!r} is cut along its other dim ({roles[each]})"
    # A residual stream is the usual case: it is added to what every rank has, so what gives it is whole.
    if any(WHOLE in groups for groups in members.sequences(maps)):
        return next(
            (why for each in columns if (why := maps[each].why_whole)), "it meets a value that every rank has whole"
        )
    if split := [each.name for each in members.parameters if each.dim is None]:
        return f"the parameter {split[0]!r} would be cut along two dims"
    # A cut that nothing ends would leave every rank with a part of the model's output, or a wrong sum.
    if not rows:
        return "no linear map reads its outputs, feature by feature"
    for each in rows:
        if maps[each].has_whole_input:
            return f"{each!r} reads a cut value in one call, and a whole one in another"
        if len({_settings(groups) for groups in maps[each].inputs}) > 1:
            return f"{each!r} reads a value that would be cut in several ways"
    problems = [(each, maps[each].column_problem or _tied(maps[each])) for each in columns]
    problems += [(each, maps[each].row_problem or _tied(maps[each])) for each in rows]
    return next((f"{each!r}: {why}" for each, why in problems if why), "")


def _uneven(members: _Members, maps: Mapping[str, TracedMap], trace: ForwardTrace, num_ranks: int) -> str:
    """Why the groups of a family cannot be laid over the ranks; nothing where they can."""
    # One order for all, or orders without a common group: then cutting each into equal runs puts a group on one rank.
    orders = {part.order for groups in members.sequences(maps) for part in _parts_of(groups)}
    fewest = min(map(len, orders), default=0)
    if fewest < num_ranks:
        reason = next((trace.reasons[group] for order in orders for group in order if group in trace.reasons), "")
        because = f", tied by {reason}" if reason else ""
        return f"{plural(fewest, 'group')} of features that belong together{because}, for {num_ranks} ranks"
    if both := [each for each in members.columns if each in members.rows]:
        return f"{both[0]!r} reads its outputs itself"
    groups = [group for order in orders for group in order]
    if len(groups) != len(set(groups)):
        return "its features have another order than those of their reader"
    return ""


def _tied(each: TracedMap) -> str:
    return "its weight is shared with another module" if each.num_holders > 1 else ""


@dataclass(frozen=True, slots=True)
class _DimPart:
    """Groups side by side, each with as many indices."""

    order: Groups
    unit: int

    @property
    def size(self) -> int:
        return len(self.order) * self.unit


def _parts_of(groups: Groups) -> list[_DimPart]:
    """A dim as parts; in each part every group has one run of the same length."""
    # [0 0 1 1 | 0 1]: runs (0, 2) (1, 2) (0, 1) (1, 1). A new part begins where a group comes again, or a run has
    # another length than those before it. Groups as (order, unit): (0 1, 2) and (0 1, 1).
    runs: list[list[int]] = []
    for group in groups:
        if runs and runs[-1][0] == group:
            runs[-1][1] += 1
        else:
            runs.append([group, 1])
    found: list[_DimPart] = []
    order: dict[int, None] = {}
    unit = 0
    for group, length in runs:
        if order and (length != unit or group in order):
            found.append(_DimPart(tuple(order), unit))
            order = {}
        order[group] = None
        unit = length
    return [*found, _DimPart(tuple(order), unit)] if order else found


def _settings(groups: Groups) -> str:
    parts = _parts_of(groups)
    counts = "+".join(str(len(each.order)) for each in parts)
    if len(parts) == 1:
        return f"groups={counts}"
    return f"parts={'+'.join(str(each.size) for each in parts)}, groups={counts}"


def _family(members: _Members, maps: Mapping[str, TracedMap]) -> MapFamily:
    rules = {each: f"column({_settings(maps[each].outputs)})" for each in members.columns}
    rules |= {each: f"row({_settings(maps[each].inputs[0])})" for each in members.rows}
    rules |= {each.name: f"column(dim={each.dim}, {_settings(each.groups)})" for each in members.parameters}
    sequences = members.sequences(maps)
    parts = [part for groups in sequences for part in _parts_of(groups)]
    return MapFamily(
        columns=tuple(members.columns),
        rows=tuple(members.rows),
        num_groups=min(len(each.order) for each in parts),
        widths=frozenset({each.size for each in parts} | {len(groups) for groups in sequences}),
        rules=rules,
    )


def _vocabulary(trace: ForwardTrace, roles: Mapping[str, str], num_ranks: int, without: Iterable[str]) -> Iterator[str]:
    """Embeddings of tokens and heads over them, where all that hold a weight can be cut alike."""
    heads = {each.vocabulary for each in trace.maps if each.is_head}
    by_weight: dict[str, list[TracedMap]] = {}
    for each in trace.maps:
        by_weight.setdefault(each.weight, []).append(each)
    # A tied embedding and head are one weight, which is cut in one way or not at all.
    for held in by_weight.values():
        fits = all(each.vocabulary >= num_ranks and each.module not in roles for each in held)
        fits = fits and all(each.is_embedding or (each.is_head and not each.column_problem) for each in held)
        if not fits or len(held) != held[0].num_holders or any(each.module in without for each in held):
            continue
        # No head has as many outputs as this embedding has rows: it may be one of positions or of token types.
        if any(each.is_embedding for each in held) and held[0].vocabulary not in heads:
            continue
        if not any(each.is_embedding for each in trace.maps if each.vocabulary == held[0].vocabulary):
            continue  # a head over a few classes
        yield from (each.module for each in held)
