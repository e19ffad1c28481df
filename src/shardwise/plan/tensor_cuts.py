"""Plan tensor parallelism: from rules to cuts of parameters and styles of modules, or every reason why not.

What is cut for heads must not go through the middle of one. A projection whose outputs are viewed as heads is cut
between groups: a key-value head with the query heads that read it. All projections of one attention have a whole number
of outputs per group, so one number serves query, key, value, a gate per head and a sink per head. With 8 query heads
and 2 key-value heads of size 8, on 2 ranks:

    parameter       size    group    rank 0              rank 1
    q outputs         64       32    0:32  heads 0-3     32:64  heads 4-7
    k, v outputs      16        8    0:8   head 0        8:16   head 1
    o inputs          64       32    0:32                32:64
    on 4 ranks      refused: "it works with 2 key-value heads, which cannot be cut over 4 ranks"

A rule for a module with an adapter cuts what is in it (`adapted_maps`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from shardwise.errors import PlanError
from shardwise.plan.outlines import AdaptedMap, TensorModule, TensorOutline, inside_of
from shardwise.plan.tensor_matching import RuleTarget, check_uses, match_rules, modules_around
from shardwise.plan.tensor_plan import CUTS_THE_MODULE, ParameterCut, Ranges, Style, TensorPlan
from shardwise.plan.tensor_rules import Rule
from shardwise.space import even_cuts

# Names of attributes of attention modules and their configurations, as model families spell them. A family with another
# spelling is cut without regard to heads: the proof of its first forward refuses it, and `groups=` in the rule helps.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_head", "nhead", "nheads", "attention_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_query_groups", "n_head_kv")
HEADS_PER_GROUP = ("num_key_value_groups", "n_rep", "num_kv_groups", "num_queries_per_kv")
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "d_kv")

WORDS = frozenset((*HEADS, *GROUPS, *HEADS_PER_GROUP, *_HEAD_SIZES))
"""Attributes that say how a module works with heads."""

_LEVELS = 2
"""How far around a projection a module of heads is looked for: it holds the projection, or what wraps it."""


def groups_of_heads(around: Iterable[TensorModule]) -> int | None:
    """The number of groups (key-value heads) of the nearest module that works with heads; None where there is none.

    `around`: the module that is cut, and those around it, from the inside out.
    """
    called = (each for each in around if each.kind != "ModuleDict")
    for module, _ in zip(called, range(_LEVELS + 1), strict=False):
        if not WORDS & module.numbers.keys():
            continue
        # The module's own numbers go before its configuration: layers of one model may differ from what it says.
        own, configured = module.numbers, module.configured
        if groups := _first(own, GROUPS):
            return groups
        heads = _first(own, HEADS) or _first(configured, HEADS)
        if heads and (per_group := _first(own, HEADS_PER_GROUP)) and heads % per_group == 0:
            return heads // per_group
        if groups := _first(configured, GROUPS):
            return groups
        # Nothing counts key-value heads: each head has its own (multi-head attention).
        if heads:
            return heads
    return None


def _first(numbers: Mapping[str, int], words: Iterable[str]) -> int | None:
    return next((numbers[word] for word in words if numbers.get(word, 0) > 0), None)


_ROPE_SIZE = "qk_rope_head_dim"
"""Outputs of a latent attention's `kv_a_proj` that hold positions: all heads read them."""

_SUM_THEMSELVES = frozenset({"column", "row", "vocab", "sum"})
"""Styles that sum outputs, or gradients of inputs."""


def plan_tensor(outline: TensorOutline, rules: Mapping[str, str] | Literal["auto"], *, num_ranks: int) -> TensorPlan:
    """Cut the parameters of a model over `num_ranks` as the rules say.

    `rules`: {name or glob of modules or parameters: rule}; "auto" is short for {"*": "auto"}: what the model carries.
    Raises PlanError with every finding: rules without meaning, in contradiction or unfit for a module, sizes that
    cannot be cut, ties that would be cut in two ways.
    """
    planner = _Planner(outline, num_ranks)
    planner.apply({"*": "auto"} if rules == "auto" else rules)
    if planner.findings:
        raise PlanError(*(f"tensor.rules: {finding}" for finding in planner.findings))
    return planner.plan()


class _Planner:
    """Collects cuts, styles and findings."""

    def __init__(self, outline: TensorOutline, num_ranks: int) -> None:
        self.findings: list[str] = []
        self._outline = outline
        self._num_ranks = num_ranks
        self._modules = {module.name: module for module in outline.modules}
        self._names_inside = inside_of(self._modules)
        # By parameter, and by where it is held (module, attribute): a tie is cut at each place, and `_check_ties`
        # compares the cuts.
        self._cuts: dict[str, dict[tuple[str, str], ParameterCut]] = {}
        self._styles: dict[str, list[Style]] = {}
        self._summed: set[str] = set()
        self._named: set[str] = set()
        self._left: dict[str, str] = {}

    def apply(self, rules: Mapping[str, str]) -> None:
        found, self.findings = match_rules(self._outline, rules)
        for target, rule in found.items():
            module = self._modules[target.module]
            if target.attribute is None:
                self._apply_to_module(module, rule)
            else:
                self._apply_to_parameter(module, target.attribute, rule)
        self._check_ties()
        self._check_sums()
        self.findings += check_uses(self._outline, found, self._cuts, self._styles)
        if not self._cuts and not self.findings and not self._left:
            self.findings.append(
                f"no rule cuts a parameter over the {self._num_ranks} ranks along tp. Give some module the rule "
                "'column', 'row' or 'vocab', or leave mesh.tp at 1"
            )

    def plan(self) -> TensorPlan:
        # In the order of the model, and not of the rules: equal plans have equal texts, however the rules are written.
        order = {name: at for at, name in enumerate(self._outline.shapes)}
        return TensorPlan(
            num_ranks=self._num_ranks,
            cuts={name: next(iter(self._cuts[name].values())) for name in sorted(self._cuts, key=order.__getitem__)},
            styles={name: tuple(self._styles[name]) for name in self._modules if name in self._styles},
            summed=frozenset(self._summed - self._cuts.keys()),
            named=frozenset(self._named - self._cuts.keys()),
            left=self._left,
        )

    # Modules ------------------------------------------------------------------------------------------------------

    def _apply_to_module(self, module: TensorModule, rule: Rule) -> None:
        match self._outline.adapters.get(module.name):
            case AdaptedMap() as adapted if rule.kind in CUTS_THE_MODULE:
                self._cut_adapted(module, adapted, rule)
                return
            case tuple(copies):
                for each in copies:
                    self._apply_to_module(each, rule)
                return
        if rule.kind not in ("heads", "split"):  # which say nothing of the parameters inside
            self._named |= self._held(module)
        if rule.sums_gradients or rule.kind == "once":
            self._summed |= self._held(module)
        match rule.kind:
            case "column" | "row":
                self._cut_linear(module, rule)
            case "vocab" | "channels":
                self._cut_embedding(module, rule)
            case "sequence" | "split":
                self._add_style(module, Style(kind=rule.kind, dim=rule.dim or 0))
            case "sum" | "once":
                self._add_style(module, Style(kind=rule.kind))
            case "tail":
                self._share_tail(module, rule)
            case "heads":
                self._count_heads(module, rule)

    def _cut_adapted(self, module: TensorModule, adapted: AdaptedMap, rule: Rule) -> None:
        """A map with adapters; a map that gives or takes whole values is cut without them."""
        base = adapted.base
        # Whole inputs and whole outputs: the adapter may stay whole, its result is added to a whole value.
        if rule.gathers or rule.splits or rule.kind not in ("column", "row"):
            if (name := adapted.foreign) is None:
                self._apply_to_module(base, rule)
            else:
                self._leave(module, rule, name)
            return
        weight = base.parameters["weight"]
        outputs = 0 if base.computes == "linear" else 1
        dim = outputs if rule.kind == "column" else 1 - outputs
        size, whole = self._outline.shapes[weight][dim], self._outline.shapes[weight][1 - dim]
        # One number for each index of the cut dim is cut with it. Of columns, one for each input stays whole.
        fitting = [(size,), (size, 1)] if rule.kind == "column" else [(1, size)]
        staying = [(1, whole)] if rule.kind == "column" else []
        shapes = {(each.name, key): self._outline.shapes[each.parameters[key]] for each, key in adapted.others}
        odd = [each.parameters[key] for each, key in adapted.others if shapes[each.name, key] not in fitting + staying]
        if odd or base.computes == "embedding":
            if rule.gather is not None or rule.scatter is not None:
                self._refuse(module, rule, "its adapter needs whole inputs; leave the settings gather and scatter out")
            elif (ranges := self._ranges(_named(module), size, rule, base)) is not None:
                kind: Literal["taken", "gathered"] = "taken" if rule.kind == "column" else "gathered"
                self._add_style(module, Style(kind=kind, ranges=ranges))
                self._leave(module, rule, odd[0] if odd else weight)
            return
        self._apply_to_module(base, rule)
        for each in adapted.ups if rule.kind == "column" else adapted.downs:
            self._cut_linear(each, rule, heads_around=base)
        cut = self._cuts.get(weight, {}).get((base.name, "weight"))
        for each, key in adapted.others:
            if cut is not None and shapes[each.name, key] in fitting:
                self._cut(each, key, 1 if rule.kind == "row" else 0, cut.ranges)

    def _leave(self, module: TensorModule, rule: Rule, why: str) -> None:
        """Note that a module with an adapter is whole on every rank."""
        self._named |= self._held(module)
        self._left[module.name] = f"its adapter has {why!r}, which {rule.text!r} cannot cut with its base layer"

    def _cut_linear(self, module: TensorModule, rule: Rule, *, heads_around: TensorModule | None = None) -> None:
        """heads_around: the module from which heads are looked for; None: this one."""
        if module.computes == "embedding" and rule.kind == "column":
            self._cut_embedding(module, rule)
            return
        if module.computes not in ("linear", "transposed linear"):
            why = module.problem or "it is not a linear map of its input (weight and bias); " + _instead(module)
            self._refuse(module, rule, why)
            return
        if rule.dim is not None:
            self._refuse(module, rule, "the setting dim is for bare parameters; leave it out")
            return
        weight = module.parameters["weight"]
        # A Linear has its outputs as rows of the weight, a transposed one (Conv1D of GPT-2) as columns.
        outputs = 0 if module.computes == "linear" else 1
        dim = outputs if rule.kind == "column" else 1 - outputs
        # What is gathered again at once may be cut anywhere: no forward looks at a part.
        needs_heads = not (rule.gathers or rule.splits)
        around = (heads_around or module) if needs_heads else None
        ranges = self._ranges(_named(module), self._outline.shapes[weight][dim], rule, around)
        if ranges is None:
            return
        if rule.kind == "column" and module.column_problem:
            self._refuse(module, rule, module.column_problem)
            return
        self._cut(module, "weight", dim, ranges)
        if rule.kind == "column":
            if "bias" in module.parameters:
                self._cut(module, "bias", 0, ranges)
            style = Style(
                kind="column",
                ranges=ranges,
                gathers=rule.gathers,
                gather=rule.gather,
                attributes=module.output_sizes,
            )
        else:
            style = Style(kind="row", ranges=ranges, splits=rule.splits, scatter=rule.scatter)
            if rule.scatter is not None and "bias" in module.parameters:
                # Each rank adds it to its own positions, and so has the gradient of those alone.
                self._summed.add(module.parameters["bias"])
        self._add_style(module, style)

    def _cut_embedding(self, module: TensorModule, rule: Rule) -> None:
        # A head over a vocabulary is a linear map. Cut by rows with its logits gathered, it agrees with the embedding
        # that it may be tied to.
        if module.computes in ("linear", "transposed linear") and rule.kind == "vocab" and rule.gathers:
            if rule.scatter is not None:
                self._refuse(module, rule, "a head gives logits, which are not summed; leave the setting scatter out")
                return
            self._cut_linear(module, replace(rule, kind="column"))
            return
        if module.computes != "embedding":
            self._refuse(module, rule, module.problem or "it is no embedding; " + _instead(module))
            return
        is_vocab = rule.kind == "vocab"
        if problem := module.problem or ("" if is_vocab else module.column_problem):
            self._refuse(module, rule, problem)
            return
        if rule.gather is not None:
            self._refuse(module, rule, "an embedding takes tokens, which are not gathered; leave the setting out")
            return
        weight = module.parameters["weight"]
        dim = 0 if is_vocab else 1
        heads_around = None if is_vocab or rule.gathers else module
        ranges = self._ranges(_named(module), self._outline.shapes[weight][dim], rule, heads_around)
        if ranges is not None:
            self._cut(module, "weight", dim, ranges)
            if is_vocab:
                self._add_style(module, Style(kind="vocab", ranges=ranges, scatter=rule.scatter))
                # A whole parameter in the module sees this rank's rows alone, and so has a part of its gradient.
                self._summed |= self._held(module)
            else:
                self._add_style(module, Style(kind="channels", ranges=ranges, gathers=rule.gathers))

    def _share_tail(self, module: TensorModule, rule: Rule) -> None:
        size = rule.size
        for each in modules_around(self._modules, module.name):
            size = size or each.numbers.get(_ROPE_SIZE) or each.configured.get(_ROPE_SIZE)
        if not size:
            self._refuse(
                module,
                rule,
                f"no module around it has {_ROPE_SIZE}; say how many outputs are shared: '{rule.text}(size=64)'",
            )
            return
        self._add_style(module, Style(kind="tail", size=size))

    def _count_heads(self, module: TensorModule, rule: Rule) -> None:
        groups = rule.groups if isinstance(rule.groups, int) else groups_of_heads([module])
        if groups is None:
            why = f"it has none of the attributes that count heads: {', '.join(HEADS + GROUPS)}"
            known = "+".join(rule.attributes) or "NAME"
            self._refuse(module, rule, f"{why}; say how many there are: 'heads(attributes={known}, groups=N)'")
            return
        names = rule.attributes or tuple(word for word in HEADS + GROUPS if word in module.numbers)
        if wrong := [name for name in names if name not in module.numbers or module.numbers[name] % groups]:
            self._refuse(module, rule, f"{wrong[0]} is no whole number, or none for each of {groups} key-value heads")
        elif self._check_units(_named(module), rule, groups, 1, groups):
            ranges = tuple((each,) for each in even_cuts(groups, self._num_ranks))
            self._add_style(module, Style(kind="heads", ranges=ranges, size=groups, attributes=names))

    # Parameters ---------------------------------------------------------------------------------------------------

    def _apply_to_parameter(self, module: TensorModule, attribute: str, rule: Rule) -> None:
        name = module.parameters[attribute]
        shape = self._outline.shapes[name]
        self._named.add(name)
        if rule.sums_gradients:
            self._summed.add(name)
        if rule.kind != "whole" and module.problem and module.computes == "other":
            self.findings.append(f"{_named(module, attribute)} ({rule.text}): {module.problem}")
            return
        match rule.kind:
            case "whole":
                pass
            case "once":
                self._summed.add(name)
                self._hide(module, attribute)
            case "row" if attribute == "bias" and rule.dim is None:
                pass  # added once, after the sum
            case "column" | "row" if shape:
                dim = rule.dim
                if dim is None:
                    dim = len(shape) - 1 if rule.kind == "row" else max(len(shape) - 2, 0)
                if dim >= len(shape):
                    self.findings.append(f"{_named(module, attribute)} ({rule.text}): it has no dim {dim}, but {shape}")
                    return
                ranges = self._ranges(_named(module, attribute), shape[dim], rule, module)
                if ranges is not None:
                    self._cut(module, attribute, dim, ranges)
            case _:
                self.findings.append(
                    f"{_named(module, attribute)} ({rule.text}): this rule is not for a bare parameter of shape "
                    f"{shape}. Give 'column' or 'row' (dim=0 and the like), 'once' or 'replicate'"
                )

    def _hide(self, module: TensorModule, attribute: str) -> None:
        styles = self._styles.setdefault(module.name, [])
        hidden = next((style for style in styles if style.kind == "hide"), None)
        if hidden is None:
            # Innermost (styles are listed from the inside out): it changes what the module's own forward reads.
            styles.insert(0, Style(kind="hide", attributes=(attribute,)))
        else:
            styles[styles.index(hidden)] = replace(hidden, attributes=(*hidden.attributes, attribute))

    # Cuts ---------------------------------------------------------------------------------------------------------

    def _ranges(self, what: str, size: int, rule: Rule, heads_around: TensorModule | None) -> tuple[Ranges, ...] | None:
        """What each rank has of a dim; None where that is refused."""
        parts = rule.parts
        if isinstance(parts, int) and size % parts:
            self.findings.append(f"{what} ({rule.text}): {size} indices are not {parts} equal parts")
            return None
        sizes = (size // parts,) * parts if isinstance(parts, int) else parts
        if sum(sizes) != size:
            self.findings.append(
                f"{what} ({rule.text}): the parts {'+'.join(map(str, sizes))} are {sum(sizes)} indices, not {size}"
            )
            return None
        # What the rule says goes before what modules around say.
        found = None
        if rule.unit is None and rule.groups is None and heads_around is not None:
            found = groups_of_heads(modules_around(self._modules, heads_around.name))
        given = rule.groups if isinstance(rule.groups, tuple) else (rule.groups or found,) * len(sizes)
        if len(given) != len(sizes):
            self.findings.append(f"{what} ({rule.text}): it gives groups for {len(given)} parts, and has {len(sizes)}")
            return None
        cuts = []
        start = 0
        for length, groups in zip(sizes, given, strict=True):
            if rule.groups is not None and groups is not None and length % groups:
                self.findings.append(f"{what} ({rule.text}): {length} indices are not {groups} equal groups")
                return None
            # Groups that were found, not given, and that do not divide the length mean something else: a module near
            # the attention that has nothing to do with heads (a router, say) is cut index by index.
            by_heads = groups is not None and length % groups == 0
            unit = rule.unit or (length // groups if groups is not None and by_heads else 1)
            if not self._check_units(what, rule, length, unit, groups if by_heads else None):
                return None
            # Each part for itself: rank 0 has the first of query, of key and of value, and not all of the query.
            cuts.append([(start + a, start + b) for a, b in even_cuts(length, self._num_ranks, unit=unit)])
            start += length
        return tuple(_joined(each) for each in zip(*cuts, strict=True))

    def _check_units(self, what: str, rule: Rule, length: int, unit: int, groups: int | None) -> bool:
        whole = length % unit == 0
        if whole and length // unit >= self._num_ranks:
            return True
        if not whole:
            holds, do = f"{length} indices are no whole number of units of {unit}", "give a unit that divides them"
        elif groups is not None:
            holds = f"it works with {groups} key-value heads, which cannot be cut over {self._num_ranks} ranks"
            do = (
                f"give mesh.tp at most {groups}, or the rule 'replicate' to this module and to the readers of its "
                "outputs"
            )
        else:
            holds = f"{length} indices in units of {unit} are {length // unit} for {self._num_ranks} ranks"
            do = f"give mesh.tp at most {length // unit}, or the rule 'replicate'"
        self.findings.append(f"{what} ({rule.text}): {holds}; {do}")
        return False

    def _cut(self, module: TensorModule, attribute: str, dim: int, ranges: tuple[Ranges, ...]) -> None:
        name = module.parameters[attribute]
        cut = ParameterCut(shape=self._outline.shapes[name], dim=dim, ranges=ranges)
        known = self._cuts.setdefault(name, {})
        if known.setdefault((module.name, attribute), cut) != cut:
            self.findings.append(
                f"{_named(module, attribute)} is cut by the rule of its module and in another way by its own; give one"
            )

    def _inside(self, module: TensorModule) -> list[TensorModule]:
        return [self._modules[name] for name in self._names_inside.get(module.name, ())]

    def _held(self, module: TensorModule) -> set[str]:
        """The parameters of a module and of those in it."""
        return {name for each in (module, *self._inside(module)) for name in each.parameters.values()}

    def _add_style(self, module: TensorModule, style: Style) -> None:
        styles = self._styles.setdefault(module.name, [])
        # A rule for an adapter and one for the map in it (of a tie, say) may both come here: what is summed, once.
        if style in styles:
            return
        if style.kind in _SUM_THEMSELVES and any(each.kind in _SUM_THEMSELVES for each in styles):
            self.findings.append(f"{_named(module)}: it is cut by its own rule and by that of its adapter; give one")
        styles.append(style)

    # Checks -------------------------------------------------------------------------------------------------------

    def _check_ties(self) -> None:
        """A parameter is cut alike wherever it is held."""
        places: dict[str, list[tuple[TensorModule, str]]] = {}
        for module in self._modules.values():
            for attribute, name in module.parameters.items():
                places.setdefault(name, []).append((module, attribute))
        for name, cuts in self._cuts.items():
            (first, cut), *_ = cuts.items()
            for module, attribute in places[name]:
                if (other := cuts.get((module.name, attribute))) != cut:
                    how = "whole" if other is None else f"cut along dim {other.dim} at {_cut_points(other)}"
                    self.findings.append(
                        f"'{first[0]}.{first[1]}' and {_named(module, attribute)} are one parameter (a tie). The "
                        f"first is cut along dim {cut.dim} at {_cut_points(cut)}, the second is {how}. Give both "
                        "modules rules that cut alike (an embedding and its head: 'vocab' for both)"
                    )

    def _check_sums(self) -> None:
        """What is summed is a part on each rank, and is summed once."""
        for name in [name for name, styles in self._styles.items() if any(style.kind == "sum" for style in styles)]:
            module = self._modules[name]
            self._summed |= self._held(module)
            if not self._held(module) & self._cuts.keys():
                self.findings.append(
                    f"{_named(module)}: its rule sums its outputs over the ranks, but cuts no parameter in it; give "
                    "its parameters rules, or leave it out"
                )
            for each in self._inside(module):
                if any(style.kind in _SUM_THEMSELVES for style in self._styles.get(each.name, ())):
                    self.findings.append(
                        f"{_named(module)}: its rule sums its outputs over the ranks, but {_named(each)} in it has a "
                        "rule that sums already; leave one of them out"
                    )

    def _refuse(self, module: TensorModule, rule: Rule, why: str) -> None:
        self.findings.append(f"{_named(module)} ({module.kind}, {rule.text}): {why}")


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges that touch are one."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _cut_points(cut: ParameterCut) -> str:
    stops = [stop for ranges in cut.ranges for _, stop in ranges]
    return ", ".join(map(str, sorted(stops)[:-1])) or str(math.prod(cut.shape))


def _instead(module: TensorModule) -> str:
    if module.computes == "embedding":
        return "an embedding is cut by 'vocab' (its tokens), 'column' or 'embedding_colwise' (its columns, gathered)"
    if module.computes == "other":
        return "give rules to the modules in it, or to its parameters by their own names"
    return "a linear map is cut by 'column' or 'row'"


def _named(module: TensorModule, attribute: str | None = None) -> str:
    return str(RuleTarget(module.name, attribute))
