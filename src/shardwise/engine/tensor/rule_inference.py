"""Rules of tensor parallelism for any model, from one forward: what "auto" gives a model that carries no plan.

One forward is traced, rules are inferred from the trace, and a plan by these rules is rehearsed. What a rehearsal shows
to be wrong is cured by numbers of heads that a module reads (the rule `heads`), or else left whole.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.engine.tensor.forward_recording import record
from shardwise.engine.tensor.rehearsal import RehearsalError, rehearse
from shardwise.errors import PlanError, in_words
from shardwise.plan.outlines import TensorModule, TensorOutline, parents
from shardwise.plan.tensor_cuts import GROUPS, HEADS, WORDS, plan_tensor
from shardwise.plan.tensor_inference import ForwardTrace, MapFamily, RuleInference, infer_rules
from shardwise.plan.tensor_plan import TensorPlan

_MOST_REHEARSALS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Inferred:
    """A plan, the rules that it follows, and what it leaves whole."""

    plan: TensorPlan
    rules: Mapping[str, str]
    left: Mapping[str, str]
    """Linear map or embedding -> why it is whole on every rank."""


def infer_plan(model: nn.Module, outline: TensorOutline, call: Callable[[], Any], *, num_ranks: int) -> Inferred:
    """The plan that one forward of the model allows; it has been rehearsed. `call()` runs the model.

    Raises PlanError, with the reasons, where nothing can be cut.
    """
    try:
        trace = record(model, outline, call)
    except Exception as error:
        raise PlanError(
            f'tensor.rules: "auto" runs the model once on a sample, and it raised {in_words(error)}; '
            "give a batch that the model takes, parallelize(..., sample=batch), or {name: rule}"
        ) from error
    return _Search(model, outline, call, trace, num_ranks).run()


@dataclass(slots=True)
class _AlikeFamilies:
    """Families that are alike, in layer after layer: what is tried for one holds for all."""

    choices: list[Mapping[str, tuple[str, ...]]]
    """Attributes that count heads, by the class of the module that has them; tried one after the other."""
    at: int = 0


@dataclass
class _Search:
    """Rehearses, and gives up what fails."""

    model: nn.Module
    outline: TensorOutline
    call: Callable[[], Any]
    trace: ForwardTrace
    num_ranks: int
    kinds: dict[object, _AlikeFamilies] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules: dict[str, TensorModule] = {each.name: each for each in self.outline.modules}

    def run(self) -> Inferred:
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
                self._give_up_planned(inference, error)
                continue
            try:
                rehearse(self.model, self.outline, plan, self.call)
            except RehearsalError as wrong:
                self._learn(inference, wrong)
                continue
            return Inferred(plan=plan, rules=rules, left=inference.left)
        raise PlanError(_nothing(infer_rules(self.trace, num_ranks=self.num_ranks, without=self.without).left))

    # Heads --------------------------------------------------------------------------------------------------------

    def _kind_of(self, family: MapFamily) -> _AlikeFamilies:
        key = (
            tuple(sorted({(self.modules[each].kind, self._parent(each).kind) for each in family.columns})),
            (
                family.num_groups,
                family.widths,
            ),
        )
        if key not in self.kinds:
            self.kinds[key] = _AlikeFamilies(list(self._choices(family)))
        return self.kinds[key]

    def _parent(self, name: str) -> TensorModule:
        return next(self.modules[each] for each in (*parents(name), "") if each in self.modules and each != name)

    def _around(self, family: MapFamily) -> dict[str, TensorModule]:
        """Modules that hold what is cut, and may count what they hold."""
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
        kind = self._kind_of(family)
        attributes = kind.choices[kind.at] if kind.at < len(kind.choices) else {}
        return {
            name: f"heads(attributes={'+'.join(attributes[module.kind])}, groups={family.num_groups})"
            for name, module in self._around(family).items()
            if module.kind in attributes
        }

    # What fails ---------------------------------------------------------------------------------------------------

    def _learn(self, inference: RuleInference, wrong: RehearsalError) -> None:
        """Try the next numbers of heads for the families that lie where it shows, or leave them whole."""
        families = self._at(inference, wrong.module)
        if not families:
            names = {name for family in inference.families for name in (*family.columns, *family.rows)}
            self.without |= dict.fromkeys(names or inference.vocabulary, f"with it cut, {_said(wrong)}")
            return
        for kind in {id(each): each for each in map(self._kind_of, families)}.values():
            alike = [each for each in inference.families if self._kind_of(each) is kind]
            kind.at += 1
            if kind.at >= len(kind.choices):
                for family in alike:
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

    def _give_up_planned(self, inference: RuleInference, error: PlanError) -> None:
        """Leave whole what the planner refuses."""
        text = str(error)
        names = [name for name in inference.rules if f"'{name}'" in text or f"'{name}." in text]
        families = [each for each in inference.families if {*each.rules} & {*names}] or (
            [] if {*inference.vocabulary} & {*names} else list(inference.families)
        )
        for family in families:
            self.without |= dict.fromkeys((*family.columns, *family.rows), error.problems[0])
        self.without |= {name: error.problems[0] for name in inference.vocabulary if name in names or not families}


def _said(wrong: RehearsalError) -> str:
    return f"{wrong.module or 'the model itself'!r} computes something else: {wrong.why}"


def _nothing(left: Mapping[str, str]) -> str:
    shown = [f"{name!r}: {why}" for name, why in list(left.items())[:8]]
    more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
    return (
        'tensor.rules: the model carries no plan, and "auto" finds nothing in it that can be cut; give {name: rule}, '
        f"or leave mesh.tp at 1. What it found: {'; '.join(shown) or 'no linear map ran'}{more}"
    )
