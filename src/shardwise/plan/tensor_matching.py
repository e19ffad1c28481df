"""Which rule holds for which module and which parameter."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.errors import PlanError
from shardwise.plan.names import meant_by, nearest
from shardwise.plan.outlines import parents
from shardwise.plan.tensor_outline import TensorModule, TensorOutline
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


@dataclass(slots=True)
class _MatchedRules:
    """The rules whose patterns mean one target."""

    exact: dict[str, Rule] = field(default_factory=dict)
    globs: dict[str, Rule] = field(default_factory=dict)


def match_rules(outline: TensorOutline, rules: Mapping[str, str]) -> tuple[dict[RuleTarget, Rule], list[str]]:
    """The rule of every target that has one, and all findings.

    A pattern that is a name beats globs, and any rule beats what the model carries, which "auto" stands for. Two rules
    of one rank that differ for one target are a finding; so is a pattern that means nothing.
    """
    targets = _targets(outline)
    names = list(targets)
    findings: list[str] = []
    given: dict[RuleTarget, _MatchedRules] = {}
    automatic: set[str] = set()
    for pattern, text in rules.items():
        rule = read_rule(text)
        meant = meant_by(pattern, names)
        if not meant:
            near = nearest(pattern, names)
            hint = f"; the nearest name is {near!r}" if near else "; the model has none"
            findings.append(f"{pattern!r} means none of the {len(names)} modules and parameters{hint}")
        if rule.kind == "auto":
            automatic.update(meant)
            continue
        for name in meant:
            known = given.setdefault(targets[name], _MatchedRules())
            (known.exact if name == pattern else known.globs)[pattern] = rule
    found: dict[RuleTarget, Rule] = {}
    for target, each in given.items():
        chosen = each.exact or each.globs
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
    if rule.parts != 1 or rule.unit is not None:
        return False
    return rule.kind == "vocab" or (module.computes == "linear" and rule.kind == "column" and rule.gathers)


def _targets(outline: TensorOutline) -> dict[str, RuleTarget]:
    """Every name of every module and parameter."""
    targets = {name: RuleTarget(module.name) for module in outline.modules for name in module.names}
    for name, module, attribute in outline.parameter_names():
        targets.setdefault(name, RuleTarget(module.name, attribute))
    return targets


def around(modules: Mapping[str, TensorModule], name: str) -> list[TensorModule]:
    """The module of this name and those around it, from the inside out; `modules`: by first name."""
    return [modules[each] for each in (*([name] if name else []), *parents(name), "") if each in modules]
