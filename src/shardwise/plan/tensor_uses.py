"""Which rules of tensor parallelism do not go together in one module, or in a module and those around it."""

from collections.abc import Container, Iterator, Mapping, Sequence

from shardwise.plan.outlines import parents
from shardwise.plan.tensor_matching import RuleTarget
from shardwise.plan.tensor_outline import TensorModule, TensorOutline
from shardwise.plan.tensor_plan import ParameterCut, Style
from shardwise.plan.tensor_rules import Rule

_CUT_THE_MODULE = frozenset({"column", "row", "vocab", "channels"})
"""Styles of modules whose own parameters are cut with them."""

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
    findings: list[str] = []
    for target, rule in rules.items():
        module = modules[target.module]
        own = {style.kind for style in styles.get(module.name, ())}
        if target.attribute is None:
            if rule.kind == "sum" and module.computes != "other":
                findings.append(
                    f"{target} ({module.kind}, {rule.text}): it computes one map from its parameters, and a bias would "
                    f"be summed as well; give it {_rule_for(module)}, and leave the rules of its parameters out"
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
            findings += _in_sequence(name, dim, styles)
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
    elif not any(kind in own for kind in _CUT_THE_MODULE) and not any(
        name in summing for name in ([*parents(module.name), ""] if module.name else [])
    ):
        yield (
            f"{target} ({rule.text}): cut alone, it leaves {module.name!r} ({module.kind}) to give parts that nothing "
            f"brings together; give the module itself {_rule_for(module)}"
        )


def _in_sequence(around: str, dim: int, styles: Mapping[str, Sequence[Style]]) -> Iterator[str]:
    """Modules that would mix the positions of one rank with those of others."""
    for name, held in styles.items():
        if name == around or (around and not name.startswith(f"{around}.")):
            continue
        for style in held:
            if style.kind in _KEEP_POSITIONS or (style.kind, style.gather) == ("column", dim):
                continue
            if (style.kind, style.scatter) in (("row", dim), ("vocab", dim)):
                continue
            yield (
                f"{name!r} has the style {style.kind!r} inside of {around or 'the model itself'!r}, which has the rule "
                f"'sequence': each rank has other positions there; write column(gather={dim}) and row(scatter={dim}) "
                "for what is cut inside, and leave other rules out, or leave 'sequence' out"
            )


def _rule_for(module: TensorModule) -> str:
    return "'vocab' or 'column'" if module.computes == "embedding" else "'column' or 'row'"
