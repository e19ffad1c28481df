"""Inversion of what was done: the exact way back, instance by instance, and what is lost on it.

What a rewrite did is a graph of variables and deeds. A variable can be made again when it comes out, or when some deed
that read it can be undone, which takes all that the deed wrote. Where several deeds read it there are copies, and those
might differ later: the first one counts, and that it does is a loss.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.state_names import split_state_name
from shardwise.rewrite.compiled_ops import CompiledOps, InverseOps
from shardwise.rewrite.deeds import Deed, Part, Task
from shardwise.rewrite.environment import Variable
from shardwise.rewrite.expansion import Expanded
from shardwise.rewrite.statements import Operation, Statement

__all__ = ["Undoing", "undo"]


class Undoing(NamedTuple):
    """The way back."""

    tasks: tuple[Task, ...]
    losses: tuple[str, ...]
    """What does not come back as it was, in words."""
    lost: frozenset[str]
    """Sources that cannot be made again at all."""


class _Loss(NamedTuple):
    """Something that does not come back, and through which statement."""

    statement: Statement
    what: str
    name: str
    rest: str = ""


class _Graph:
    """Which variables can be made again, and how."""

    def __init__(self, trace: Sequence[tuple[Statement, Sequence[Deed]]], outputs: Collection[Variable]) -> None:
        self.outputs = frozenset(outputs)
        self.route: dict[Variable, Deed] = {}
        """By the undoing of which deed a variable is made again, where it is."""
        self.copies: set[Variable] = set()
        """Variables that could be made again by the undoing of some deed; also those that come out."""
        self.blocked: dict[Variable, Variable] = {}
        """Why a variable cannot be made again: which one of those that were made of it cannot."""
        for _, deeds in reversed(trace):
            for deed in reversed(deeds):
                self._add(deed)

    def available(self, variable: Variable) -> bool:
        """Whether a variable can be made again."""
        return variable in self.outputs or variable in self.route

    def usable(self, deed: Deed) -> bool:
        """Whether a deed can be undone. What stands for all can be taken from any."""
        if deed.ops is None and deed.along:
            return any(map(self.available, deed.right))
        return all(map(self.available, deed.right))

    def _add(self, deed: Deed) -> None:
        if not deed.left:
            return
        if self.usable(deed):
            for variable in reversed(deed.left):
                self.copies.add(variable)
                if variable not in self.outputs:
                    self.route[variable] = deed  # of several the first, since the last come first here
        else:
            missing = next(each for each in deed.right if not self.available(each))
            for variable in deed.left:
                self.blocked.setdefault(variable, missing)

    def dropping(self, statement: Statement, name: str, source: Variable) -> _Loss:
        """What to say of a source that cannot be made again, since `statement` drops something."""
        if source.dropped is not None or name not in self._coming_out:
            return _Loss(statement, "drops", name)
        if name in self._dropped:
            return _Loss(statement, "drops a part of", name, ", of which nothing comes back")
        rest = ", of which nothing comes back: what was joined is parted again only as a whole"
        return _Loss(statement, "drops a part of what was joined with", name, rest)

    @cached_property
    def _coming_out(self) -> frozenset[str]:
        """The sources of which elements come out."""
        return frozenset().union(*[each.node.used for each in self.outputs if each.node is not None])

    @cached_property
    def _dropped(self) -> frozenset[str]:
        """The sources of which elements are dropped somewhere."""
        dropped = {each for each in self.blocked.values() if each.dropped is not None}
        return frozenset().union(*[each.node.used for each in dropped if each.node is not None])

    def dropped_by(self, variable: Variable) -> Statement:
        """The statement because of which a variable cannot be made again."""
        while variable.dropped is None:
            variable = self.blocked[variable]
        return variable.dropped


def undo(
    trace: Sequence[tuple[Statement, Sequence[Deed]]],
    sources: Mapping[str, Variable],
    outputs: Mapping[str, Variable],
    aliases: Mapping[str, str],
) -> Undoing:
    """Return the way back from outputs to sources.

    `trace` are the statements with what each did, `aliases` those sources that are other names of sources.
    """
    graph = _Graph(trace, outputs.values())
    losses = [*_copied(trace, graph), *_narrowed(trace, graph)]
    spares = _Spares(trace, sources)
    tasks = [task for statement, deeds in reversed(trace) for task in _undone(statement, deeds, graph, spares)]
    survivors: dict[str, str] = {}
    for name, variable in sources.items():
        if graph.available(variable):
            survivors.setdefault(aliases.get(name, name), name)
    gone = [name for name, each in sources.items() if not graph.available(each) and name not in aliases]
    lost = {name for name in gone if name not in survivors}
    for name in gone:
        statement = graph.dropped_by(sources[name])
        if name in survivors:
            tasks.append(_task(statement, [Expanded((survivors[name],), (name,))]))
        elif not _follows(name, lost):
            losses.append(graph.dropping(statement, name, sources[name]))
            tasks.append(_task(statement, [Expanded((), (name,))]))
    lost.update([name for name in sources if _follows(name, lost)])
    return Undoing(tuple(tasks), _worded(losses), frozenset(lost))


def _follows(name: str, lost: Collection[str]) -> bool:
    """Whether this is the optimizer state of a parameter that is lost, which is lost with it."""
    split = split_state_name(name)
    return split is not None and split[0] in lost


def _task(statement: Statement, instances: Iterable[Expanded], operations: tuple[Operation, ...] = ()) -> Task:
    return Task(back(statement), (Part(operations, tuple(instances)),))


def back(statement: Statement, *, optional: bool = False) -> Statement:
    """Return the statement that findings show when what undoes `statement` goes wrong."""
    text = f"(inverse of) {statement.text}"
    return Statement(statement.right, statement.left, (), optional, statement.place, text)


class _Spares:
    """Names for what is in between on the way back: none that a variable has."""

    def __init__(self, trace: Sequence[tuple[Statement, Sequence[Deed]]], sources: Iterable[str]) -> None:
        self._taken = {*sources, *(each.name for _, deeds in trace for deed in deeds for each in deed.right)}

    def fresh(self, name: str) -> str:
        """The name, with a number behind it where it is taken by a variable; the same for the same name."""
        number = 1
        free = name
        while free in self._taken:
            number += 1
            free = f"{name} ({number})"
        return free


class _Undone:
    """What undoes the deeds of one statement, as it is collected."""

    def __init__(self, statement: Statement, spares: _Spares) -> None:
        self.statement = statement
        self._spares = spares
        self.spare: list[str] = []
        """Names of copies that do not count."""
        self.first: dict[tuple[Operation, ...], list[Expanded]] = {}
        """What is done before, with results that are treated differently."""
        self.main: dict[tuple[Operation, ...], list[Expanded]] = {}
        self.last: dict[tuple[Operation, ...], list[Expanded]] = {}
        """What is done afterwards, with tensors that are treated differently."""
        self.added: list[Expanded] = []
        self._alike: dict[CompiledOps, list[Expanded] | None] = {}

    def drop_added(self, names: tuple[str, ...]) -> None:
        """Let go what was added, where the target had it."""
        self.added += [Expanded((name,), ()) for name in names]

    def drop(self, names: tuple[str, ...]) -> None:
        """Let results go that nothing is made of."""
        self.main.setdefault((), []).append(Expanded(names, ()))

    def take(self, deed: Deed, counts: Sequence[bool]) -> None:
        """Undo a deed; of what it took, some counts, and the rest are copies."""
        names = self._names(deed, counts)
        results = tuple([each.name for each in deed.right])
        ops = deed.ops
        if ops is None:
            if results != names:  # which would keep what is to be used up
                self.main.setdefault((), []).append(Expanded(results, names))
            return
        if ops not in self._alike:
            alike = ops.inverse.alike
            self._alike[ops] = None if alike is None else self.main.setdefault(alike, [])
        instances = self._alike[ops]
        if instances is not None:
            instances.append(Expanded(results, names))
        else:
            self._take_apart(ops.inverse, results, names)

    def _take_apart(self, inverse: InverseOps, results: tuple[str, ...], names: tuple[str, ...]) -> None:
        """Undo what treated tensors, or results, differently: each by itself, and between that the joint operation."""
        between = results
        if any(inverse.after):
            between = tuple([self._spares.fresh(f"result {place} of {names[0]}") for place in range(len(results))])
            for operations, result, part in zip(inverse.after, results, between, strict=True):
                self.first.setdefault(operations, []).append(Expanded((result,), (part,)))
        parts = names
        if any(inverse.before):
            parts = tuple([self._spares.fresh(f"part {place} of {results[0]}") for place in range(len(names))])
            for operations, part, name in zip(inverse.before, parts, names, strict=True):
                self.last.setdefault(operations, []).append(Expanded((part,), (name,)))
        joint = () if inverse.joint is None else (inverse.joint,)
        self.main.setdefault(joint, []).append(Expanded(between, parts))

    def _names(self, deed: Deed, counts: Sequence[bool]) -> tuple[str, ...]:
        """The names under which what a deed took is made again: copies that do not count get spare names."""
        names: list[str] = []
        for variable, counted in zip(deed.left, counts, strict=True):
            name = variable.name
            if not counted or name in names:
                name = self._spares.fresh(f"copy {len(self.spare)} of {name}")
                self.spare.append(name)
            names.append(name)
        return tuple(names)

    def tasks(self) -> list[Task]:
        """All of it, in order."""
        shown = back(self.statement)
        tasks = [
            Task(shown, tuple([Part(operations, tuple(each)) for operations, each in parts.items()]))
            for parts in (self.first, self.main, self.last)
            if parts
        ]
        if self.added:
            tasks.append(Task(back(self.statement, optional=True), (Part((), tuple(self.added)),)))
        if self.spare:
            tasks.append(_task(self.statement, [Expanded(tuple(self.spare), ())]))
        return tasks


def _undone(statement: Statement, deeds: Sequence[Deed], graph: _Graph, spares: _Spares) -> list[Task]:
    """What undoes the deeds of one statement; copies that do not count are dropped."""
    undone = _Undone(statement, spares)
    for deed in deeds:
        if deed.along:
            continue
        if not deed.left:
            undone.drop_added(tuple([variable.name for variable in deed.right]))
            continue
        counts = [graph.route.get(variable) is deed for variable in deed.left]
        if graph.usable(deed) and any(counts):
            undone.take(deed, counts)
        elif there := tuple([each.name for each in deed.right if graph.available(each)]):
            undone.drop(there)
    return undone.tasks()


def _copied(trace: Sequence[tuple[Statement, Sequence[Deed]]], graph: _Graph) -> Iterable[_Loss]:
    counted: set[Variable] = set()
    for statement, deeds in trace:
        for deed in deeds:
            for variable in deed.left:
                if deed.along or variable not in graph.copies or not graph.usable(deed):
                    continue
                if variable in graph.outputs:
                    yield _copy(statement, variable, variable.name)
                elif variable in counted:
                    yield _copy(statement, variable, graph.route[variable].right[0].name)
                counted.add(variable)


def _copy(statement: Statement, variable: Variable, first: str) -> _Loss:
    beside = "which comes out itself" if first == variable.name else f"beside what {first} has of it"
    return _Loss(statement, "copies", variable.name, f" {beside}: copies may differ later")


def _narrowed(trace: Sequence[tuple[Statement, Sequence[Deed]]], graph: _Graph) -> Iterable[_Loss]:
    for statement, deeds in trace:
        for deed in deeds:
            if deed.ops is None or deed.along or not deed.ops.narrowed:
                continue
            for variable in deed.left:
                if graph.route.get(variable) is deed:
                    source, to = deed.ops.narrowed[0]
                    rest = f" from {source} to {to}, which does not hold all its values"
                    yield _Loss(statement, "casts", variable.name, rest)


def _worded(losses: Iterable[_Loss]) -> tuple[str, ...]:
    """Losses in words, one for all that are alike, in the order of the statements."""
    alike: dict[tuple[int, int, str], list[_Loss]] = {}
    for loss in losses:
        place = loss.statement.place
        alike.setdefault((place.line, place.column, loss.what), []).append(loss)
    worded = []
    for (line, *_), many in sorted(alike.items()):
        first = min(many, key=lambda each: each.name)
        more = f" (and {len(many) - 1} more)" if len(many) > 1 else ""
        text = " ".join(first.statement.text.split())
        worded.append(f"line {line}, `{text}`, {first.what} {first.name}{more}{first.rest}")
    return tuple(worded)
