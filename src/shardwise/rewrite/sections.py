"""Sections: parts of a rewrite, from text to what they did to tensors. Each sees what the one before gives out.

Figure 1. `a -> b`, a line `---`, `b -> c`, and the inverse::

    Section        "a -> b"           "b -> c"            as written, with parameters; `inverted` says which way
                   (Statement,)       (Statement,)        parsed
    AppliedSection a --> b            b --> c             carried out on nodes: `Evaluation`
    Proved         undoing b -> a     undoing c -> b      and each was shown to lead back
    inverse        c -> b, then b -> a                    reversed, each section turned
"""

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain, pairwise
from os import PathLike
from typing import Any, NamedTuple

from shardwise.errors import RewriteError
from shardwise.rewrite.degrees import Fusings, KnownDegrees, degrees_in
from shardwise.rewrite.evaluation import Evaluation, evaluate
from shardwise.rewrite.expansion import AppliedInstance, StatementTask
from shardwise.rewrite.inversion import Claim, Undoing, prove, undo
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Form, Node, source_node
from shardwise.rewrite.statements import Statement, StatementFinding
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.syntax import needed_parameters, parse
from shardwise.rewrite.text_inverse import inverse_of_text, textual_losses
from shardwise.rewrite.verbs.registry import TextParameters

BOUNDARY = "---"
"""A separate line between two sections: the next section sees only the outputs so far."""


_INVERSE = "# inverse of:"
"""A line before what is written the way there, and is carried out backward."""


_AOA_KEYS = frozenset({"aoa_statements", "aoa_config_reverse"})


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a rewrite, as it was written, and which way it is carried out."""

    text: str
    inverted: bool = False
    lossy: bool = False
    """Of an inverted section: whether it may lose what cannot be undone."""
    given: tuple[tuple[str, int | str], ...] = ()
    """The parameters that were given to it."""
    parsed: tuple[Statement, ...] | None = None
    """The statements as they were written; None while a section of the rewrite lacks parameters."""

    @property
    def statements(self) -> tuple[Statement, ...]:
        """As they were written, also where they are carried out backward."""
        assert self.parsed is not None, "parameters are asked for before"
        return self.parsed

    @property
    def effective(self) -> tuple[Statement, ...]:
        """The statements that are carried out, as far as text can say them."""
        return inverse_of_text(self.statements) if self.inverted else self.statements

    @property
    def textual_losses(self) -> tuple[str, ...]:
        """What the statements alone tell cannot be undone."""
        return () if self.inverted else textual_losses(self.statements)

    @property
    def needed(self) -> frozenset[str]:
        """What the text names in braces."""
        return needed_parameters(self.text) if "{" in self.text else frozenset()

    @property
    def lacking(self) -> frozenset[str]:
        """What of it has no value."""
        return self.needed - dict(self.given).keys()

    def with_parameters(self, parameters: TextParameters) -> "Section":
        """The section with those of the parameters that it lacks; what it was given it keeps."""
        # A value that was given stays: two sides of a composed rewrite may mean other things by one name.
        lacking = self.lacking
        given = {**dict(self.given), **{name: value for name, value in parameters.items() if name in lacking}}
        return replace(self, given=tuple(sorted(given.items())))

    def __str__(self) -> str:
        """As it was written, under a comment that says so where it is undone."""
        written = self.text.strip("\n")
        return f"{_INVERSE}\n{written}" if self.inverted else written


def sections_of(source: object, parameters: object) -> tuple[Section, ...]:
    """The sections of a rewrite in the order in which they are carried out. Raises RewriteError for what is none."""
    text, inverted = _read(source)
    sections = [Section(part, inverted) for part in _parts(text)]
    # To undo two sections is to undo the second one first.
    return with_parameters(reversed(sections) if inverted else sections, parameters)


def _read(source: object) -> tuple[str, bool]:
    """The text of a rewrite, and whether it goes backward."""
    if isinstance(source, Mapping):
        return _configured(source)
    text = _joined(source)
    if text is None:
        hint = "; read a file by Rewrite.file(path)" if isinstance(source, PathLike) else ""
        raise RewriteError(
            f"a rewrite is text, a sequence of statements, or an AOA configuration, not {source!r:.100}{hint}"
        )
    return text, False


def _configured(source: Mapping[Any, Any]) -> tuple[str, bool]:
    if not source.keys() <= _AOA_KEYS or "aoa_statements" not in source:
        has = ", ".join(map(repr, source)) or "nothing"
        raise RewriteError(f"an AOA configuration has aoa_statements and perhaps aoa_config_reverse; this has {has}")
    problems = []
    text = _joined(source["aoa_statements"])
    if text is None:
        problems.append(f"aoa_statements are text or a sequence of statements, not {source['aoa_statements']!r:.100}")
    inverted = source.get("aoa_config_reverse", False)
    if not isinstance(inverted, bool):
        problems.append(f"aoa_config_reverse is True or False, not {inverted!r:.100}")
    if problems or text is None:
        raise RewriteError(*problems)
    return text, inverted


def _joined(statements: object) -> str | None:
    if isinstance(statements, str):
        return statements
    if isinstance(statements, Sequence) and all(isinstance(each, str) for each in statements):
        return "\n".join(statements)
    return None


def _parts(text: str) -> list[str]:
    """The text of each section, at its line of the whole."""
    lines = text.splitlines()
    bounds = [-1, *(at for at, line in enumerate(lines) if line.strip() == BOUNDARY), len(lines)]
    # Newlines stand for the sections before, so that findings name the line of the whole text.
    return ["\n" * (start + 1) + "\n".join(lines[start + 1 : stop]) for start, stop in pairwise(bounds)]


def with_parameters(sections: Iterable[Section], parameters: object) -> tuple[Section, ...]:
    """Give each section the parameters that it names and lacks.

    Raises RewriteError for those that none names, for bad values, and for another value of what none lacks.
    """
    if not isinstance(parameters, Mapping):
        raise RewriteError(f"parameters are a mapping of names to integers or text, not {parameters!r:.100}")
    known = tuple(sections)
    named = sorted(frozenset().union(*[each.needed for each in known]))
    problems = []
    for name, value in parameters.items():
        if name not in named:
            close = get_close_matches(str(name), named, n=1)
            hint = f"; the nearest is {close[0]!r}" if close else ""
            has = f"it names {', '.join(map(repr, named))}" if named else "it names none"
            problems.append(f"the rewrite has no parameter {name!r}: {has}{hint}")
        elif not isinstance(value, int | str) or isinstance(value, bool):
            problems.append(f"the parameter {name!r} is {value!r:.100}; parameters are integers or text")
        elif (held := _held(known, name)) and value not in held:
            has = " and ".join(map(repr, held))
            problems.append(
                f"the parameter {name!r} is {has} already, and is not changed to {value!r:.100}; make the rewrite "
                "anew, from its text"
            )
    if problems:
        raise RewriteError(*problems)
    return tuple([each.with_parameters(parameters) for each in known])


def _held(sections: Iterable[Section], name: str) -> list[int | str]:
    """The values that a parameter has; none while a section lacks it."""
    naming = [each for each in sections if name in each.needed]
    if any(name in each.lacking for each in naming):
        return []
    return list(dict.fromkeys([dict(each.given)[name] for each in naming]))


def parsed(sections: Sequence[Section]) -> tuple[Section, ...]:
    """The sections with their statements, once none lacks parameters. Raises RewriteError with what is wrong in any."""
    if any(each.lacking for each in sections):
        return tuple(sections)
    found = []
    problems: list[str] = []
    for each in sections:
        try:
            found.append(replace(each, parsed=parse(each.text, dict(each.given))) if each.parsed is None else each)
        except RewriteError as error:
            problems += error.problems
    if problems:
        raise RewriteError(*problems)
    return tuple(found)


def refuse_losses(losses: Sequence[str]) -> None:
    """Raise RewriteError where something is lost."""
    if losses:
        way = 'inverse(lossy="allow") (--lossy) of the rewrite as it is written undoes the other statements'
        about = f"the rewrite cannot be undone exactly; {way}"
        raise RewriteError(*losses, about=about)


Metas = Mapping[str, TensorMeta]


@dataclass(frozen=True, slots=True)
class AppliedSection:
    """A section that was carried out."""

    tasks: list[StatementTask]
    sources: Mapping[str, Node]
    targets: Metas | None
    """What is known of that which it leads to."""
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


def carry_out(
    sections: Sequence[Section], sources: Metas, wanted: Metas | None, recorded: Metas | None
) -> list[AppliedSection]:
    """Carry sections out, one on what the other gives, up to one with findings.

    `wanted` is the target, where it is known; `recorded` what is known otherwise of the tensors to which inverted
    sections lead back. Raises RewriteError where an inverted section would lose something.
    """
    known = _known(sections, recorded or wanted)
    # Two passes cost twice the time, and few rewrites leave a degree open.
    if not _asks_layouts(sections, sources, wanted):
        return list(_carried_out(sections, nodes_of(sources), known, wanted))
    # Once to see which way fused tensors go, and again with the degrees that layouts tell then.
    fusings = Fusings()
    first = list(_carried_out(sections, nodes_of(sources), known, wanted, fusings=fusings))
    outputs = first[-1].evaluation.outputs if len(first) == len(sections) else {}
    degrees = fusings.found_degrees(outputs, sources, wanted or {})
    return list(_carried_out(sections, nodes_of(sources), known, wanted, degrees=degrees, before=first))


def lasting_degrees(done: Sequence[AppliedSection], sections: Sequence[Section]) -> dict[str, tuple[int, ...]]:
    """For how many ranks outputs are laid out from now on, whatever cuts them later; see `Fusings.lasting`."""
    sources, wanted = done[0].metas, done[-1].targets or {}
    lays = any(True for section in sections for each in section.statements for _ in degrees_in(each.operations))
    if not lays and not any(meta.recorded for meta in sources.values()):
        return {}
    fusings = Fusings()
    *_, last = _carried_out(sections, done[0].sources, (), None, fusings=fusings, before=done)
    fusings.found_degrees(last.evaluation.outputs, sources, wanted)
    return fusings.lasting(last.evaluation.outputs, sources, wanted)


def _asks_layouts(sections: Sequence[Section], sources: Metas, wanted: Metas | None) -> bool:
    """Whether statements leave open for how many ranks tensors are laid out, and layouts or other statements tell."""
    written = {each for section in sections for one in section.statements for each in degrees_in(one.operations)}
    tells = len(written) > 1 or any(meta.degrees for meta in chain(sources.values(), (wanted or {}).values()))
    return None in written and tells


def _carried_out(
    sections: Sequence[Section],
    nodes: Mapping[str, Node],
    known: Sequence[Metas | None],
    wanted: Metas | None,
    *,
    fusings: Fusings | None = None,
    degrees: Sequence[KnownDegrees] = (),
    before: Sequence[AppliedSection] = (),
) -> Iterator[AppliedSection]:
    """Carry sections out, one on what the other gives; `before`: as they were carried out already."""
    added: frozenset[str] = frozenset()
    for place, section in enumerate(sections):
        if fusings is not None:
            fusings.section = place
        if place < len(before):
            # Tasks of the first pass are kept: `degrees` names instances by the number of their task.
            tasks, unfit, targets = before[place].tasks, before[place].unfit, before[place].targets
        else:
            targets = wanted if place == len(sections) - 1 else known[place]
            metas = {name: node.meta for name, node in nodes.items()} if section.inverted else {}
            tasks, unfit = _tasks(section, known[place], metas)
        here: KnownDegrees = degrees[place] if place < len(degrees) else {}
        evaluation = evaluate(tasks, nodes, targets, added, degrees=here, fusings=fusings)
        evaluation.findings += evaluation.undecided()
        yield AppliedSection(tasks, nodes, targets, evaluation, unfit)
        # The next section would see outputs that are not there, and report these.
        if evaluation.findings:
            break
        nodes, added = evaluation.outputs, evaluation.added


def _known(sections: Sequence[Section], last: Metas | None) -> list[Metas | None]:
    """What is known of that which each section leads to: an inverted section tells what it starts from."""
    known: list[Metas | None] = []
    # From the target back: what an inverted section leads to tells, carried out forward, what it starts from.
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
        forward = AppliedSection(forward_tasks, {}, None, evaluate(forward_tasks, nodes_of(known), sources), ())
        # The record fits, so this inverse is the exact one: with dtypes, sizes and digits that the text lacks.
        if not forward.evaluation.findings:
            undoing = forward.undoing({})
            if not section.lossy:
                refuse_losses(undoing.losses)
            return list(undoing.tasks), ()
        # Not raised here: the text may be enough. If it is not, the first of these explains why.
        unfit = tuple(forward.evaluation.findings)
    if not section.lossy:
        refuse_losses(textual_losses(section.statements))
    return [StatementTask.of(each) for each in section.effective], unfit


def nodes_of(metas: Metas) -> dict[str, Node]:
    """Tensors as sources."""
    forms: dict[TensorMeta, Form] = {}
    return {name: source_node(name, meta, forms) for name, meta in metas.items()}


class Proved(NamedTuple):
    """A section that was carried out, its way back, and what was proved of that."""

    done: AppliedSection
    undoing: Undoing
    claim: Claim

    @property
    def applied_instances(self) -> list[AppliedInstance]:
        """What all statements did."""
        return list(chain.from_iterable(self.done.evaluation.trace))


def fit(
    sections: Sequence[Section],
    sources: Metas,
    wanted: Metas | None,
    recorded: Metas | None,
    aliases: Mapping[str, str],
) -> list[Proved]:
    """Carry sections out and prove each one's way back. Raises RewriteError with all findings."""
    proved = []
    done = carry_out(sections, sources, wanted, recorded)
    findings = done[-1].evaluation.findings
    if findings:
        problems = [str(each) for each in sorted(findings, key=lambda each: (each.place.line, each.place.column))]
        if done[-1].unfit:
            hint = (
                "the target's names and shapes were not used for this inverse, since the rewrite does not fit the "
                "target"
            )
            problems.append(f"{hint}: {done[-1].unfit[0]}")
        raise RewriteError(*problems)
    for place, each in enumerate(done):
        # Ties are between sources, and only the first section sees these.
        other_names = {} if place else aliases
        undoing = each.undoing(other_names)
        evaluation = each.evaluation
        applied_instances = [applied for instances in evaluation.trace for applied in instances]
        claim = Claim(
            sources=each.sources,
            outputs=evaluation.outputs,
            agree=evaluation.agree,
            lost=undoing.lost | other_names.keys(),
            aliases=other_names,
            crops=any(each.ops is not None and each.ops.cropped for each in applied_instances),
        )
        # Every check is proved, in production too: a fault of this library must not reach a file.
        prove(claim, applied_instances, undoing.tasks)
        proved.append(Proved(each, undoing, claim))
    return proved


@contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for cyclic garbage among new objects alone: all that is planned stays, and looking takes a third.

    Of all objects it would look at each of very many names again and again.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        # Another thread that is inside as well came first, and restores what was.
        if before[2] != _NEVER:
            gc.set_threshold(*before)


_NEVER = 1 << 30


def mismatches(outputs: Metas, added: Collection[str], ties: Mapping[str, str], target: Metas) -> Iterator[str]:
    """Say what of the outputs is not as a target wants it."""
    for name, meta in target.items():
        made = outputs.get(name)
        if made is None:
            if name not in added:
                close = get_close_matches(name, outputs, n=1) if len(outputs) < 4000 else []
                hint = f"; it makes {close[0]}" if close else ""
                yield f"{name}: the target wants it, and the rewrite does not make it{hint}"
        elif made.shape != meta.shape:
            yield f"{name}: shape {list(meta.shape)} in the target, {list(made.shape)} by the rewrite"
        elif made.dtype != meta.dtype:
            here = f"{made.dtype} by the rewrite; cast it by dtype={meta.dtype!r}"
            yield f"{name}: dtype {meta.dtype} in the target, {here}"
    for name in (*outputs, *added):
        if name not in target and name not in ties:
            what = "adds it" if name in added else "makes it"
            yield f"{name}: the rewrite {what}, and the target has no such tensor; drop it by `{name} -> _`"


def agreeing(proved: Sequence[Proved], aliases: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The groups of sources without dims; one stands for all."""
    groups = []
    for each in proved:
        for nodes in each.done.evaluation.agree:
            names = dict.fromkeys([aliases.get(leaf, leaf) for node in nodes for leaf in node.leaves])
            if len(names) > 1:
                groups.append(tuple(names))
    return tuple(dict.fromkeys(groups))


def dropped_sources(
    proved: Sequence[Proved], outputs: Mapping[str, Node], groups: Sequence[Sequence[str]], aliases: Mapping[str, str]
) -> frozenset[str]:
    """The sources that no output uses."""
    if not any(each.undoing.lost for each in proved):
        return frozenset()
    used: set[str] = set()
    for node in outputs.values():
        used.update(node.used)
    for group in groups:
        if not used.isdisjoint(group):
            used.update(group)
    used = {aliases.get(name, name) for name in used}
    return frozenset([name for name in proved[0].done.sources if name not in aliases and name not in used])


def ties_of(outputs: Mapping[str, Node], aliases: Mapping[str, str], wanted: Collection[str] | None) -> dict[str, str]:
    """Return alias -> output for outputs that have the same elements as another only through a tie of the sources.

    A statement that copies a tensor makes a new tensor. Of tied outputs the one that the target wants stands for the
    others, else the one whose sources are no aliases.
    """
    tied = set(aliases.values())
    groups: list[tuple[ViewedTensor, dict[tuple[str, ...], str]]] = []
    for name, node in outputs.items():
        # Only what comes of a tied source can be tied. This spares comparing all outputs with each other.
        if tied.isdisjoint([aliases.get(leaf, leaf) for leaf in node.leaves]):
            continue
        value = node.value_under(aliases)
        for other, members in groups:
            if other.same_elements(value):
                members.setdefault(node.leaves, name)
                break
        else:
            groups.append((value, {node.leaves: name}))
    ties = {}
    for _, members in groups:

        def rank(each: tuple[tuple[str, ...], str]) -> tuple[bool, bool]:
            leaves, name = each
            return wanted is not None and name not in wanted, any(leaf in aliases for leaf in leaves)

        (_, first), *others = sorted(members.items(), key=rank)
        ties.update({name: first for _, name in others})
    return ties
