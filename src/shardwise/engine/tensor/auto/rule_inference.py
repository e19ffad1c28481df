"""Rules of tensor parallelism for any model, from one forward: what "auto" gives a model that carries no plan.

One forward is traced (`forward_recording`), rules are inferred from the trace, and a plan by these rules is rehearsed
(`rehearsal`). A trace cannot show how a forward counts. After `q(x).view(b, -1, self.num_heads, 4)` a rank with half of
the heads has to find half in `num_heads`. So a rehearsal that fails is answered with attempts:

    rehearsal 1   q k v column, o row                          "what 'o' reads is not its part"
    rehearsal 2   ... and heads(attributes=num_heads)          passes: this is the plan
    else          heads and widths, widths, ...                the last one fails: q k v o are whole, with the reason

An attempt for one layer holds for all equal ones, so a model of 96 layers takes as many attempts as one layer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardwise.engine.tensor.auto.forward_recording import record
from shardwise.engine.tensor.auto.rehearsal import RehearsalError, rehearse, that_ask
from shardwise.errors import PlanError, few_of, in_words
from shardwise.plan.outlines import TensorModule, TensorOutline, parents
from shardwise.plan.tensor_cuts import GROUPS, HEADS, WORDS, plan_tensor
from shardwise.plan.tensor_inference import ForwardTrace, MapFamily, RuleInference, infer_rules
from shardwise.plan.tensor_matching import modules_around
from shardwise.plan.tensor_plan import TensorPlan

_MOST_REHEARSALS = 64
"""Each costs a forward per rank, in every process."""


def infer_plan(
    model: nn.Module, outline: TensorOutline, rules: Mapping[str, str] | str, call: Callable[[], Any], *, num_ranks: int
) -> tuple[TensorPlan, Mapping[str, str], Mapping[str, str]]:
    """A plan that one forward of the model allows, and a rehearsal; its rules, and what it leaves whole and why.

    rules: "auto", or those that beat what is inferred. call: runs the model. Raises PlanError, with the reasons, where
    nothing can be cut, and for rules with which the model computes something else.
    """
    try:
        trace = record(model, outline, call)
    except Exception as error:
        raise PlanError(
            f'tensor.rules: "auto" runs the model once on a sample, and it raised {in_words(error)}. Give a batch '
            "that the model takes, parallelize(..., sample=batch), or {name: rule}"
        ) from error
    found, inferred, left = _Search(model, outline, call, trace, num_ranks).run()
    if isinstance(rules, str):
        return found, inferred, left
    # What is inferred takes the place of a carried plan, so that the planner joins both as it always does.
    mixed = plan_tensor(replace(outline, carried=inferred), rules, num_ranks=num_ranks)
    if asking := that_ask(mixed):
        raise PlanError(
            'tensor.rules: what "auto" infers beside rules of yours is tried for each rank alone, and the rule of '
            f"{few_of(asking)} needs the answers of all ranks. Give the rules of all modules, without "
            f'"auto". Inferred: {dict(inferred)}'
        )
    try:
        rehearse(model, outline, mixed, call)
    except RehearsalError as wrong:
        raise PlanError(
            'tensor.rules: with these rules and those of "auto" for the rest, '
            f"{wrong.module or 'the model itself'!r} computes something else: {wrong.why}. Leave rules of yours out, "
            f"or give all of them. Inferred: {dict(inferred)}"
        ) from wrong
    return mixed, inferred, left


@dataclass
class _Search:
    """Infers, plans and rehearses until a plan holds, and gives up what fails."""

    model: nn.Module
    outline: TensorOutline
    call: Callable[[], Any]
    trace: ForwardTrace
    num_ranks: int
    choices: dict[object, list[Mapping[str, tuple[str, ...]]]] = field(default_factory=dict)
    """Of families that are alike, in layer after layer: attributes that count heads, by the class of the module that
    has them. The first ones are tried."""
    without: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules: dict[str, TensorModule] = {each.name: each for each in self.outline.modules}

    def run(self) -> tuple[TensorPlan, Mapping[str, str], Mapping[str, str]]:
        # Each turn begins anew from the trace, with what has been given up left out: without one map another family may
        # fit that was refused before.
        for _ in range(_MOST_REHEARSALS):
            inference = infer_rules(self.trace, num_ranks=self.num_ranks, without=self.without)
            rules = inference.rules
            if not rules:
                break
            heads = [self._heads_of(family) for family in inference.families]
            for each in heads:
                rules |= each
            try:
                plan = plan_tensor(self.outline, rules, num_ranks=self.num_ranks)
            except PlanError as error:
                # What a trace shows, the planner takes; else all that it was asked for is whole.
                self.without |= dict.fromkeys(inference.rules, error.problems[0])
                continue
            try:
                rehearse(self.model, self.outline, plan, self.call)
            except RehearsalError as wrong:
                self._learn(inference, wrong)
                continue
            return plan, rules, inference.left
        raise PlanError(_nothing(infer_rules(self.trace, num_ranks=self.num_ranks, without=self.without).left))

    # Heads --------------------------------------------------------------------------------------------------------

    def _kind_of(self, family: MapFamily) -> object:
        # Layers are alike where the classes of their maps and of what holds them are, and the groups: names differ.
        around = [modules_around(self.modules, each)[:2] for each in family.columns]
        kinds = frozenset(tuple(module.kind for module in each) for each in around)
        kind = (kinds, family.num_groups, family.widths)
        if kind not in self.choices:
            self.choices[kind] = list(self._choices(family))
        return kind

    def _around(self, family: MapFamily) -> dict[str, TensorModule]:
        """The modules that hold the maps, or hold what holds them, and may count their features."""
        found = {}
        for each in (*family.columns, *family.rows):
            for name in [*parents(each), ""][:2]:
                if name in self.modules:
                    found[name] = self.modules[name]
        return found

    def _choices(self, family: MapFamily) -> Iterator[Mapping[str, tuple[str, ...]]]:
        """Sets of attributes that may count what is cut: none, heads, heads and widths, widths."""
        yield {}
        groups, around = family.num_groups, self._around(family)

        def chosen(accept: Callable[[str, int], bool]) -> dict[str, tuple[str, ...]]:
            found: dict[str, tuple[str, ...]] = {}
            for module in around.values():
                names = tuple(key for key, value in module.numbers.items() if _counts(value) and accept(key, value))
                if names:
                    found[module.kind] = names
            return found

        def _counts(value: int) -> bool:
            return value > 0 and value % groups == 0

        # From the likeliest to the odd. Words that mean heads come first; then any number that is a width of what is
        # cut (`inner`, `embed_dim`), and last a number that happens to be that of the groups.
        heads = frozenset((*HEADS, *GROUPS))
        sizes = frozenset(WORDS) - heads
        tried = [
            chosen(lambda key, _: key in heads),
            chosen(lambda key, value: key in heads or (value in family.widths and key not in sizes)),
            chosen(lambda key, value: value in family.widths and key not in heads | sizes),
            chosen(lambda key, value: key in heads or (value in family.widths | {groups} and key not in sizes)),
            chosen(lambda key, value: value == groups and key not in sizes),
        ]
        yield from (each for at, each in enumerate(tried) if each and each not in tried[:at])

    def _heads_of(self, family: MapFamily) -> dict[str, str]:
        attributes = next(iter(self.choices[self._kind_of(family)]), {})
        return {
            name: f"heads(attributes={'+'.join(attributes[module.kind])}, groups={family.num_groups})"
            for name, module in self._around(family).items()
            if module.kind in attributes
        }

    # What fails ---------------------------------------------------------------------------------------------------

    def _learn(self, inference: RuleInference, wrong: RehearsalError) -> None:
        """Try the next numbers of heads for the families of the module where it shows, or leave them whole."""
        families = self._at(inference, wrong.module)
        if not families:
            # It shows in a module that holds nothing that is cut: no family can be blamed, so all are whole.
            names = {name for family in inference.families for name in (*family.columns, *family.rows)}
            self.without |= dict.fromkeys(names or inference.vocabulary, f"with it cut, {_said(wrong)}")
            return
        # All families of a module are moved on together: a rehearsal says where it fails, not which of them is wrong.
        for kind in dict.fromkeys(map(self._kind_of, families)):
            self.choices[kind] = self.choices[kind][1:]
            if not self.choices[kind]:
                for family in [each for each in inference.families if self._kind_of(each) == kind]:
                    self.without |= dict.fromkeys((*family.columns, *family.rows), f"with it cut, {_said(wrong)}")

    def _at(self, inference: RuleInference, name: str) -> list[MapFamily]:
        """Families of a module, or of what is in the nearest module around it that holds any."""
        for around in (name, *parents(name)):
            if around in inference.vocabulary:
                self.without[around] = "a rehearsal shows that it is no lookup"
            inside = [
                family
                for family in inference.families
                if any(each == around or each.startswith(f"{around}.") for each in (*family.columns, *family.rows))
            ]
            if inside and around:
                return inside
        return []


def _said(wrong: RehearsalError) -> str:
    return f"{wrong.module or 'the model itself'!r} computes something else: {wrong.why}"


def _nothing(left: Mapping[str, str]) -> str:
    shown = [f"{name!r}: {why}" for name, why in list(left.items())[:8]]
    more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
    return (
        'tensor.rules: the model carries no plan, and "auto" finds nothing in it to cut; give {name: rule}, '
        f"or leave mesh.tp at 1. It found: {'; '.join(shown) or 'no linear map ran'}{more}"
    )
