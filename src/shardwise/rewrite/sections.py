"""Sections: a rewrite's statements, to be carried out forward or backward; and what they did to given tensors.

A composed rewrite has several sections: each sees only what the one before gives out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from shardwise.errors import RewriteError
from shardwise.rewrite.applied_statements import AppliedInstance, StatementTask
from shardwise.rewrite.degrees import Fusings, Laid, leaves_open
from shardwise.rewrite.evaluation import Evaluation, evaluate
from shardwise.rewrite.findings import StatementFinding
from shardwise.rewrite.inversion import Undoing, undo
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Form, Node, source_node
from shardwise.rewrite.statements import Statement
from shardwise.rewrite.text_inverse import inverse_of_text, textual_losses

__all__ = ["AppliedSection", "Metas", "Section", "carry_out", "nodes_of", "refuse_losses"]

Metas = Mapping[str, TensorMeta]


@dataclass(frozen=True, slots=True)
class Section:
    """Statements, and which way they are carried out."""

    statements: tuple[Statement, ...]
    """As they were written, also where they are carried out backward."""
    inverted: bool = False
    lossy: bool = False
    """Of an inverted section: whether it may lose what cannot be undone."""

    @property
    def effective(self) -> tuple[Statement, ...]:
        """The statements that are carried out, as far as text can say them."""
        return inverse_of_text(self.statements) if self.inverted else self.statements

    @property
    def textual_losses(self) -> tuple[str, ...]:
        """What the statements alone tell cannot be undone."""
        return () if self.inverted else textual_losses(self.statements)

    def turned(self, *, lossy: bool) -> "Section":
        """The inverse; of an inverse that is what was written."""
        return replace(self, inverted=not self.inverted, lossy=lossy)


@dataclass(frozen=True, slots=True)
class AppliedSection:
    """A section that was carried out."""

    tasks: list[StatementTask]
    sources: Mapping[str, Node]
    evaluation: Evaluation
    unfit: tuple[StatementFinding, ...]
    """Of an inverse that could not be exact: why what is known of the target does not fit the statements."""

    @property
    def metas(self) -> dict[str, TensorMeta]:
        """What went in."""
        return {name: node.meta for name, node in self.sources.items()}

    @property
    def applied_instances(self) -> list[tuple[Statement, list[AppliedInstance]]]:
        """The statements and what each did."""
        trace = self.evaluation.trace
        return [(task.statement, applied_instances) for task, applied_instances in zip(self.tasks, trace, strict=True)]

    def undoing(self, aliases: Mapping[str, str]) -> Undoing:
        """The way back."""
        environment = self.evaluation.environment
        outputs = {name: environment.variables[name] for name in self.evaluation.outputs}
        return undo(self.applied_instances, environment.first, outputs, aliases)


def nodes_of(metas: Metas) -> dict[str, Node]:
    """Tensors as sources."""
    forms: dict[TensorMeta, Form] = {}
    return {name: source_node(name, meta, forms) for name, meta in metas.items()}


def carry_out(
    sections: Sequence[Section], sources: Metas, wanted: Metas | None, recorded: Metas | None
) -> list[AppliedSection]:
    """Carry sections out, one on what the other gives, up to one with findings.

    `wanted` is the target, where it is known; `recorded` what is known otherwise of the tensors to which inverted
    sections lead back. Raises RewriteError where an inverted section would lose something.
    """
    known = _known(sections, recorded or wanted)
    if not _asks_layouts(sections, sources, wanted):
        return list(_carried_out(sections, nodes_of(sources), known, wanted))
    # Once to see which way fused tensors go, and again with the degrees that layouts tell then.
    fusings = Fusings()
    first = list(_carried_out(sections, nodes_of(sources), known, wanted, fusings=fusings))
    laid = fusings.laid(first[-1].evaluation.outputs if len(first) == len(sections) else {}, sources, wanted or {})
    return list(_carried_out(sections, nodes_of(sources), known, wanted, laid=laid, before=first))


def _asks_layouts(sections: Sequence[Section], sources: Metas, wanted: Metas | None) -> bool:
    """Whether there are statements that leave open for how many ranks tensors are laid out, and layouts that tell."""
    asking = any(leaves_open(each.operations) for section in sections for each in section.statements)
    return asking and any(meta.degrees for meta in chain(sources.values(), (wanted or {}).values()))


def _carried_out(
    sections: Sequence[Section],
    nodes: Mapping[str, Node],
    known: Sequence[Metas | None],
    wanted: Metas | None,
    *,
    fusings: Fusings | None = None,
    laid: Sequence[Laid] = (),
    before: Sequence[AppliedSection] = (),
) -> Iterator[AppliedSection]:
    """Carry sections out, one on what the other gives; `before`: as they were carried out already."""
    added: frozenset[str] = frozenset()
    for place, section in enumerate(sections):
        if fusings is not None:
            fusings.section = place
        if place < len(before):
            tasks, unfit = before[place].tasks, before[place].unfit
        else:
            metas = {name: node.meta for name, node in nodes.items()} if section.inverted else {}
            tasks, unfit = _tasks(section, known[place], metas)
        targets = wanted if place == len(sections) - 1 else known[place]
        here: Laid = laid[place] if place < len(laid) else {}
        evaluation = evaluate(tasks, nodes, targets, added, laid=here, fusings=fusings)
        evaluation.findings += evaluation.undecided()
        yield AppliedSection(tasks, nodes, evaluation, unfit)
        if evaluation.findings:
            break
        nodes, added = evaluation.outputs, evaluation.added


def _known(sections: Sequence[Section], last: Metas | None) -> list[Metas | None]:
    """What is known of that which each section leads to: an inverted section tells what it starts from."""
    known: list[Metas | None] = []
    for place in reversed(range(len(sections))):
        known.append(last)
        section = sections[place]
        start = last if section.inverted else None
        last = None
        if start is not None and place:
            forward = evaluate(_forward(section), nodes_of(start))
            if not forward.findings:
                last = {name: node.meta for name, node in forward.outputs.items()}
    return known[::-1]


def _forward(section: Section) -> list[StatementTask]:
    """What an inverted section undoes. Where the names are known to which it leads they tell numbers with gaps too."""
    return [StatementTask.of(replace(each, gaps=True)) for each in section.statements]


def _tasks(
    section: Section, known: Metas | None, sources: Metas
) -> tuple[list[StatementTask], tuple[StatementFinding, ...]]:
    """What a section carries out: for an inverse the exact one, where that is known to which it leads."""
    if not section.inverted:
        return [StatementTask.of(each) for each in section.statements], ()
    unfit: tuple[StatementFinding, ...] = ()
    if known is not None:
        forward_tasks = _forward(section)
        forward = AppliedSection(forward_tasks, {}, evaluate(forward_tasks, nodes_of(known), sources), ())
        if not forward.evaluation.findings:
            undoing = forward.undoing({})
            if not section.lossy:
                refuse_losses(undoing.losses)
            return list(undoing.tasks), ()
        unfit = tuple(forward.evaluation.findings)
    if not section.lossy:
        refuse_losses(textual_losses(section.statements))
    return [StatementTask.of(each) for each in section.effective], unfit


def refuse_losses(losses: Sequence[str]) -> None:
    """Raise RewriteError where something is lost."""
    if losses:
        way = 'inverse(lossy="allow") (--lossy) of the rewrite as it is written undoes what can be'
        about = f"the rewrite cannot be undone exactly; {way}"
        raise RewriteError(*losses, about=about)
