"""Which rule holds for which module and which parameter, and which rules do not go together.

From the strongest to the weakest: a pattern that is a name, a glob, the plan that the model carries ("auto"). With

    rules    {"*": "auto", "layers.*.up": "column", "layers.0.up": "replicate"}
    carried  {"layers.0.up": "colwise", "layers.1.up": "colwise", "layers.0.down": "rowwise"}

    layers.0.up    replicate   by its name, though a glob means it too
    layers.1.up    column      by the glob, though the model carries another word
    layers.0.down  rowwise     carried: "*" is the place where "auto" was given
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.names import is_exactly, meant_by, nearest
from shardwise.plan.outlines import TensorModule, TensorOutline, inside_of, parents
from shardwise.plan.tensor_plan import CUTS_THE_MODULE, ParameterCut, Style
from shardwise.plan.tensor_rules import Rule, read_rule

_TAKES_WHAT_IS_INSIDE = frozenset({"whole", "column", "row", "vocab", "channels", "tail"})
"""Kinds of rules that leave nothing inside the module to the plan that the model carries."""


@dataclass(frozen=True, slots=True)
class RuleTarget:
    """A module, or one of its parameters."""

    module: str
    """The first name of the module."""
    attribute: str | None = None
    """Of a parameter: where the module holds it."""

    def __str__(self) -> str:
        name = ".".join(filter(None, (self.module, self.attribute)))
        return repr(name) if name else "the model itself"


def match_rules(outline: TensorOutline, rules: Mapping[str, str]) -> tuple[dict[RuleTarget, Rule], list[str]]:
    """The rule of every target that has one, and all findings.

    A pattern that is a name beats globs, and any rule beats what the model carries, which "auto" stands for. Two rules
    of one rank that differ for one target are a finding; so is a pattern that means nothing.
    """
    targets = _targets(outline)
    names = list(targets)
    findings: list[str] = []
    given: dict[RuleTarget, dict[bool, dict[str, Rule]]] = {}
    """Of each target, by whether the pattern is a name."""
    automatic: set[str] = set()
    for pattern, text in rules.items():
        rule = read_rule(text)
        meant = [pattern] if pattern in targets else meant_by(pattern, names)
        if not meant:
            near = nearest(pattern, names)
            hint = f"; the nearest name is {near!r}" if near else "; the model has none"
            findings.append(f"{pattern!r} means none of the {len(names)} modules and parameters{hint}")
        if rule.kind == "auto":
            automatic.update(meant)
            continue
        for name in meant:
            given.setdefault(targets[name], {}).setdefault(is_exactly(pattern, name), {})[pattern] = rule
    found: dict[RuleTarget, Rule] = {}
    for target, each in given.items():
        chosen = each.get(True) or each[False]
        # Two globs are of one rank: no order of theirs would be right for all readers, so they must agree.
        if len({rule.text for rule in chosen.values()}) > 1:
            listed = " and ".join(f"{pattern!r} ({rule.text})" for pattern, rule in chosen.items())
            findings.append(f"{target} is meant by {listed}; give it one rule, under its own name")
        found[target] = next(iter(chosen.values()))
    if automatic:
        findings += _add_carried(outline, targets, automatic, found)
        _add_ties(outline, automatic, found)
    return found, findings


def _add_carried(
    outline: TensorOutline, targets: Mapping[str, RuleTarget], automatic: set[str], found: dict[RuleTarget, Rule]
) -> list[str]:
    """Add the rules that the model carries where nothing else is said; the findings."""
    if not outline.carried:
        return ['"auto" asks for the plan that the model carries, and it carries none; give {name: rule}']
    modules = {target.module: rule for target, rule in found.items() if target.attribute is None}
    taken = {name for name, rule in modules.items() if rule.kind in _TAKES_WHAT_IS_INSIDE}
    given = set(found)
    findings = []
    for name, text in outline.carried.items():
        around = [name, *parents(name), ""]
        target = targets[name]
        # A rule for a module replaces what the model carries for all in it: a "replicate" for an attention leaves no
        # carried `colwise` on its query. "heads", "sum" and the like say nothing of the parameters inside.
        inside = [target.module, *parents(target.module)] if target.attribute else list(parents(target.module))
        if target in given or not automatic.intersection(around) or taken.intersection(inside):
            continue
        try:
            rule = read_rule(text)
        except PlanError as error:
            findings += [f"{target}, as the model carries it: {problem}" for problem in error.problems]
            continue
        if (other := found.setdefault(target, rule)).text != rule.text:
            findings.append(f"{target} is carried by the model as {other.text!r} and as {rule.text!r}")
    return findings


def _add_ties(outline: TensorOutline, automatic: set[str], found: dict[RuleTarget, Rule]) -> None:
    """Where an embedding and a head are one parameter, and a rule cuts the tokens of one, cut those of the other."""
    # Models carry `lm_head: colwise_gather_output` and nothing for the embedding. Where both are one parameter, a cut
    # of one is a cut of the other, which then needs a rule for it. A rule that the user gave stays as it is.
    holders: dict[str, list[TensorModule]] = {}
    for module in outline.modules:
        if module.computes in ("linear", "embedding") and "weight" in module.parameters:
            holders.setdefault(module.parameters["weight"], []).append(module)
    for modules in holders.values():
        rules = [found.get(RuleTarget(module.name)) for module in modules]
        if not any(
            rule is not None and _cuts_tokens(rule, module) for rule, module in zip(rules, modules, strict=True)
        ):
            continue
        for module, rule in zip(modules, rules, strict=True):
            if rule is None and automatic.intersection([module.name, *parents(module.name), ""]):
                found[RuleTarget(module.name)] = read_rule("vocab")


def _cuts_tokens(rule: Rule, module: TensorModule) -> bool:
    # Cuts of `vocab` are even ones: with parts or units a tie would be cut in two ways.
    if rule.parts != 1 or rule.unit is not None:
        return False
    return rule.kind == "vocab" or (module.computes == "linear" and rule.kind == "column" and rule.gathers)


def _targets(outline: TensorOutline) -> dict[str, RuleTarget]:
    """Every name of every module and parameter."""
    targets = {name: RuleTarget(module.name) for module in outline.modules for name in module.names}
    # By every alias, so that a user may write any of the names that `model.named_parameters` would show.
    for name, module, attribute in outline.parameter_names():
        targets.setdefault(name, RuleTarget(module.name, attribute))
    return targets


def modules_around(modules: Mapping[str, TensorModule], name: str) -> list[TensorModule]:
    """The module of this name and those around it, from the inside out; `modules`: by first name."""
    return [modules[each] for each in (*([name] if name else []), *parents(name), "") if each in modules]


_KEEP_POSITIONS = frozenset({"heads"})
"""Styles that treat what a rank has of a sequence as they treat a whole one."""


def check_uses(
    outline: TensorOutline,
    rules: Mapping[RuleTarget, Rule],
    cuts: Mapping[str, Mapping[tuple[str, str], ParameterCut]],
    styles: Mapping[str, Sequence[Style]],
) -> list[str]:
    """All findings. rules: of modules and parameters. cuts: by parameter, and where it is held. styles: by module."""
    modules = {module.name: module for module in outline.modules}
    summing = {name for name, held in styles.items() if any(style.kind == "sum" for style in held)}
    inside = inside_of(styles)
    findings: list[str] = []
    for target, rule in rules.items():
        module = modules[target.module]
        own = {style.kind for style in styles.get(module.name, ())}
        if target.attribute is None:
            if rule.kind == "sum" and module.computes != "other":
                findings.append(
                    f"{target} ({module.kind}, {rule.text}): it computes one map from its parameters, and a bias "
                    f"would be summed too. Give it {_rule_for(module)}, and leave the rules of its parameters out"
                )
            continue
        name = module.parameters[target.attribute]
        is_cut = bool(cuts.get(name))
        if rule.kind == "once" and target.attribute == "bias" and own & {"row", "vocab"}:
            findings.append(f"{target} ({rule.text}): the rule of its module adds it once already; leave this one out")
        elif rule.kind == "once" and is_cut:
            findings.append(
                f"{target} ({rule.text}): it is cut over the ranks, so each has its own; leave one rule out"
            )
        elif rule.kind in ("column", "row") and is_cut and module.computes != "other":
            findings += _of_bare(target, rule, module, own, summing)
    for name, held in styles.items():
        for dim in (style.dim for style in held if style.kind == "sequence"):
            findings += _in_sequence(name, dim, {each: styles[each] for each in inside.get(name, ())})
    return findings


def _of_bare(
    target: RuleTarget, rule: Rule, module: TensorModule, own: Container[str], summing: Container[str]
) -> Iterator[str]:
    """A rule that cuts a parameter of a module that is itself a linear map or an embedding."""
    if target.attribute == "bias" and "row" in own:
        yield (
            f"{target} ({rule.text}): the rule of its module adds it whole, after the sum; leave this one out, or "
            "write 'row'"
        )
    elif not any(kind in own for kind in CUTS_THE_MODULE) and not any(
        name in summing for name in ([*parents(module.name), ""] if module.name else [])
    ):
        yield (
            f"{target} ({rule.text}): cut alone, it leaves {module.name!r} ({module.kind}) to give parts that nothing "
            f"brings together; give the module itself {_rule_for(module)}"
        )


def _in_sequence(around: str, dim: int, styles: Mapping[str, Sequence[Style]]) -> Iterator[str]:
    """Modules inside that would mix the positions of one rank with those of others. styles: of modules inside."""
    for name, held in styles.items():
        for style in held:
            if style.kind in _KEEP_POSITIONS or (style.kind, style.gather) == ("column", dim):
                continue
            if (style.kind, style.scatter) in (("row", dim), ("vocab", dim)):
                continue
            yield (
                f"{name!r} has the style {style.kind!r} inside of {around or 'the model itself'!r}, which has the "
                f"rule 'sequence': each rank has other positions there. Give column(gather={dim}) and "
                f"row(scatter={dim}) to the cut modules inside, and leave other rules out. Or leave 'sequence' out"
            )


def _rule_for(module: TensorModule) -> str:
    return "'vocab' or 'column'" if module.computes == "embedding" else "'column' or 'row'"
