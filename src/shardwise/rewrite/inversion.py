"""Inversion of what was done: the exact way back, instance by instance, and what is lost on it.

What a rewrite did is a graph of variables and applied instances. A variable can be made again when it comes out, or
when an instance that read it can be undone; that takes all outputs of the instance. Where several instances read it
there are copies, and those might differ later: the first one counts, and that it does is a loss.

Figure 1. `a` is joined with `b`, and copied. It can be made again of `ab` and of `c`; of `ab` counts::

    there               graph              back, last statement first
    a, b -> ab          a, b --> ab        c -> _               the copy is dropped: a loss
    a -> c              a -----> c         ab -> a, b

The proof at the end of the file checks this library, not its user: a failure is our fault.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.names import split_state_name
from shardwise.rewrite.compiled_ops import CompiledOps, InverseOps, apply_steps
from shardwise.rewrite.environment import Variable
from shardwise.rewrite.evaluation import evaluate
from shardwise.rewrite.expansion import AppliedInstance, Expanded, InstanceGroup, StatementTask
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Node
from shardwise.rewrite.statements import Statement
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.operation import Operation
from shardwise.rewrite.verbs.quantise import ANEW


class Undoing(NamedTuple):
    """The way back."""

    tasks: tuple[StatementTask, ...]
    losses: tuple[str, ...]
    """What does not come back as it was, in words."""
    lost: frozenset[str]
    """Sources that cannot be made again at all."""
    notes: tuple[str, ...]
    """What is cropped, in words."""


_CROPS = "crops"


class _Loss(NamedTuple):
    """Something that does not come back, and through which statement."""

    statement: Statement
    what: str
    name: str
    rest: str = ""


class _Graph:
    """Which variables can be made again, and how."""

    def __init__(
        self, trace: Sequence[tuple[Statement, Sequence[AppliedInstance]]], outputs: Collection[Variable]
    ) -> None:
        self.outputs = frozenset(outputs)
        self.route: dict[Variable, AppliedInstance] = {}
        """The instance whose undoing makes a variable again, if any does."""
        self.copies: set[Variable] = set()
        """Variables that could be made again by the undoing of some instance; also those that come out."""
        self.blocked: dict[Variable, Variable] = {}
        """Why a variable cannot be made again: which one of those that were made of it cannot."""
        # From the end: whether an instance can be undone depends on what became of the variables that it wrote.
        for _, applied_instances in reversed(trace):
            for applied in reversed(applied_instances):
                self._add(applied)

    def available(self, variable: Variable) -> bool:
        """Whether a variable can be made again."""
        return variable in self.outputs or variable in self.route

    def usable(self, applied: AppliedInstance) -> bool:
        """Whether an instance can be undone. What stands for all can be taken from any."""
        # One value without dims was written for all results, so any result that is left gives it back.
        if applied.ops is None and applied.along:
            return any(map(self.available, applied.right))
        return all(map(self.available, applied.right))

    def _add(self, applied: AppliedInstance) -> None:
        if not applied.left:
            return
        if self.usable(applied):
            # Both sources of a join come back together, or neither does.
            for variable in reversed(applied.left):
                self.copies.add(variable)
                if variable not in self.outputs:
                    self.route[variable] = applied  # of several the first, since the last come first here
        else:
            missing = next(each for each in applied.right if not self.available(each))
            for variable in applied.left:
                self.blocked.setdefault(variable, missing)

    def dropping(self, statement: Statement, name: str, source: Variable) -> _Loss:
        """What to say of a source that cannot be made again, since `statement` drops something."""
        if source.dropped is not None or name not in self._coming_out:
            return _Loss(statement, "drops", name)
        if name in self._dropped:
            return _Loss(statement, "drops a part of", name, ", and nothing of it comes back")
        rest = ", and nothing of it comes back: joined tensors split again only as a whole"
        return _Loss(statement, "drops a part of a tensor that was joined with", name, rest)

    @cached_property
    def _coming_out(self) -> frozenset[str]:
        """The sources with elements that come out."""
        return frozenset().union(*[each.node.used for each in self.outputs if each.node is not None])

    @cached_property
    def _dropped(self) -> frozenset[str]:
        """The sources with elements that are dropped somewhere."""
        dropped = {each for each in self.blocked.values() if each.dropped is not None}
        return frozenset().union(*[each.node.used for each in dropped if each.node is not None])

    def dropped_by(self, variable: Variable) -> Statement:
        """The statement that prevents making a variable again."""
        while variable.dropped is None:
            variable = self.blocked[variable]
        return variable.dropped


def undo(
    trace: Sequence[tuple[Statement, Sequence[AppliedInstance]]],
    sources: Mapping[str, Variable],
    outputs: Mapping[str, Variable],
    aliases: Mapping[str, str],
) -> Undoing:
    """Return the way back from outputs to sources.

    `trace` are the statements with what each did, `aliases` those sources that are other names of sources.
    """
    graph = _Graph(trace, outputs.values())
    # Losses are gathered as the way back is found: `lossy="allow"` takes the same way and only accepts them.
    changed = list(_changed(trace, graph))
    losses = [*_copied(trace, graph), *(loss for loss, is_loss in changed if is_loss)]
    spares = _Spares(trace, sources)
    tasks = [
        task
        for statement, applied_instances in reversed(trace)
        for task in _undone(statement, applied_instances, graph, spares)
    ]
    # Tied sources are one tensor with two names. Where one name comes back, it can be copied to the other.
    survivors: dict[str, str] = {}
    for name, variable in sources.items():
        if graph.available(variable):
            survivors.setdefault(aliases.get(name, name), name)
    gone = [name for name, each in sources.items() if not graph.available(each) and name not in aliases]
    lost = {name for name in gone if name not in survivors}
    for name in gone:
        statement = graph.dropped_by(sources[name])
        if name in survivors:
            tasks.append(_task(statement, Expanded((survivors[name],), (name,))))
        # `_ -> name`: the target keeps what it has under the name, as the rewrite back has nothing to put there.
        elif not _follows(name, lost):
            losses.append(graph.dropping(statement, name, sources[name]))
            tasks.append(_task(statement, Expanded((), (name,))))
    lost.update([name for name in sources if _follows(name, lost)])
    notes = _worded(loss for loss, _ in changed if loss.what == _CROPS)
    return Undoing(tuple(tasks), _worded(losses), frozenset(lost), notes)


def _follows(name: str, lost: Collection[str]) -> bool:
    """Whether this is the optimizer state of a parameter that is lost, which is lost with it."""
    split = split_state_name(name)
    return split is not None and split[0] in lost


def _task(statement: Statement, instance: Expanded) -> StatementTask:
    return StatementTask(back(statement), (InstanceGroup((), (instance,)),))


def back(statement: Statement, *, optional: bool = False) -> Statement:
    """Return the statement that findings show when what undoes `statement` goes wrong."""
    text = f"(inverse of) {statement.text}"
    return Statement(statement.right, statement.left, (), optional, statement.place, text)


class _Spares:
    """Names for what is in between on the way back: none that a variable has."""

    def __init__(self, trace: Sequence[tuple[Statement, Sequence[AppliedInstance]]], sources: Iterable[str]) -> None:
        self._taken = {
            *sources,
            *(each.name for _, applied_instances in trace for applied in applied_instances for each in applied.right),
        }

    def fresh(self, name: str) -> str:
        """The name, with a number behind it where it is taken by a variable; the same for the same name."""
        number = 1
        free = name
        while free in self._taken:
            number += 1
            free = f"{name} ({number})"
        return free


class _Undone:
    """What undoes the instances of one statement, as it is collected."""

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
        """What was added is let go, where the target had it."""
        self._alike: dict[CompiledOps, list[Expanded] | None] = {}

    def drop(self, names: tuple[str, ...]) -> None:
        """Let results go that nothing is made of."""
        self.main.setdefault((), []).append(Expanded(names, ()))

    def take(self, applied: AppliedInstance, counts: Sequence[bool]) -> None:
        """Undo an instance; of what it took, some counts, and the rest are copies."""
        names = self._names(applied, counts)
        results = tuple([each.name for each in applied.right])
        ops = applied.ops
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
        """Undo the steps that treated tensors, or results, differently, and between them joins and splits."""
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
        join_or_split = () if inverse.join_or_split is None else (inverse.join_or_split,)
        self.main.setdefault(join_or_split, []).append(Expanded(between, parts))

    def _names(self, applied: AppliedInstance, counts: Sequence[bool]) -> tuple[str, ...]:
        """The names under which what an instance took is made again: copies that do not count get spare names."""
        # A statement writes one variable once. So a copy that does not count gets a name of its own, and is dropped at
        # the end.
        names: list[str] = []
        for variable, counted in zip(applied.left, counts, strict=True):
            name = variable.name
            if not counted or name in names:
                name = self._spares.fresh(f"copy {len(self.spare)} of {name}")
                self.spare.append(name)
            names.append(name)
        return tuple(names)

    def tasks(self) -> list[StatementTask]:
        """All of it, in order."""
        shown = back(self.statement)
        tasks = [
            StatementTask(shown, tuple([InstanceGroup(operations, tuple(each)) for operations, each in parts.items()]))
            for parts in (self.first, self.main, self.last)
            if parts
        ]
        if self.added:
            tasks.append(StatementTask(back(self.statement, optional=True), (InstanceGroup((), tuple(self.added)),)))
        if self.spare:
            tasks.append(_task(self.statement, Expanded(tuple(self.spare), ())))
        return tasks


def _undone(
    statement: Statement, applied_instances: Sequence[AppliedInstance], graph: _Graph, spares: _Spares
) -> list[StatementTask]:
    """What undoes the instances of one statement; copies that do not count are dropped."""
    undone = _Undone(statement, spares)
    for applied in applied_instances:
        # On the way back optimizer state goes along with its parameter again: no statement has to say so.
        if applied.along:
            continue
        if not applied.left:
            undone.added += [Expanded((variable.name,), ()) for variable in applied.right]
            continue
        # Of several instances that read a variable the first makes it again. The others make copies.
        counts = [graph.route.get(variable) is applied for variable in applied.left]
        if graph.usable(applied) and any(counts):
            undone.take(applied, counts)
        elif there := tuple([each.name for each in applied.right if graph.available(each)]):
            undone.drop(there)
    return undone.tasks()


def _copied(trace: Sequence[tuple[Statement, Sequence[AppliedInstance]]], graph: _Graph) -> Iterable[_Loss]:
    counted: set[Variable] = set()
    for statement, applied_instances in trace:
        for applied in applied_instances:
            for variable in applied.left:
                if applied.along or variable not in graph.copies or not graph.usable(applied):
                    continue
                if variable in graph.outputs:
                    yield _copy(statement, variable, variable.name)
                elif variable in counted:
                    yield _copy(statement, variable, graph.route[variable].right[0].name)
                counted.add(variable)


def _copy(statement: Statement, variable: Variable, first: str) -> _Loss:
    beside = "which comes out itself" if first == variable.name else f"next to the part of it in {first}"
    return _Loss(statement, "copies", variable.name, f" {beside}: copies may differ later")


def _changed(
    trace: Sequence[tuple[Statement, Sequence[AppliedInstance]]], graph: _Graph
) -> Iterable[tuple[_Loss, bool]]:
    """What casts, scales and crops take away, and whether it is a loss.

    A crop is none where the text says what the elements are.
    """
    for statement, applied_instances in trace:
        for applied in applied_instances:
            ops = applied.ops
            if ops is None or applied.along:
                continue
            for variable in applied.left:
                if graph.route.get(variable) is not applied:
                    continue
                for source, to in ops.narrowed[:1]:
                    rest = f" from {source} to {to}, which does not hold all its values"
                    yield _Loss(statement, "casts", variable.name, rest), True
                if ops.rescaling is not None and variable is applied.left[0]:
                    what = "quantises" if ops.rescaling.quantises else "dequantises"
                    yield _Loss(statement, what, variable.name, f": {ANEW}"), True
                for first in ops.cropped[:1]:
                    what = "no fill= says what the elements are that go, and the way back fills them with 0"
                    if first.fill is not None:
                        what = f"the way back fills them with {first.fill}, whatever the elements were"
                    yield _Loss(statement, _CROPS, variable.name, f" from {first}: {what}"), first.fill is None


def _worded(losses: Iterable[_Loss]) -> tuple[str, ...]:
    """Losses in words, one for all that are alike, in the order of the statements."""
    alike: dict[tuple[int, int, str], list[_Loss]] = {}
    for loss in losses:
        place = loss.statement.place
        alike.setdefault((place.line, place.column, loss.what), []).append(loss)
    worded = []
    for (line, *_), many in sorted(alike.items()):
        # One line for each statement and kind of loss: the same cast in 32 layers is one loss to decide on.
        first = min(many, key=lambda each: each.name)
        more = f" (and {len(many) - 1} more)" if len(many) > 1 else ""
        text = " ".join(first.statement.text.split())
        worded.append(f"line {line}, `{text}`, {first.what} {first.name}{more}{first.rest}")
    return tuple(worded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That of what came out the sources can be made again."""

    sources: Mapping[str, Node]
    outputs: Mapping[str, Node]
    agree: Sequence[tuple[Node, ...]]
    """Nodes; any of them stands for all."""
    lost: Collection[str]
    """Sources that need not come back."""
    aliases: Mapping[str, str]
    """Other names of sources."""
    crops: bool
    """Whether elements were cropped: what comes back in their place is padding."""

    def failing(self, tasks: Iterable[StatementTask]) -> list[str]:
        """The sources that tasks, carried out on the outputs, do not give back, or what else is wrong."""
        # The way back runs through the same evaluator as the way there, on the very nodes that came out.
        returned = evaluate(tasks, self.outputs, is_proof=True)
        if returned.findings:
            return [str(returned.findings[0])]
        standing = _standing(self.agree)
        back = returned.outputs
        return [
            name
            for name, node in self.sources.items()
            if name not in self.lost and not _same(back.get(name), node, standing, self)
        ]


def prove(claim: Claim, applied_instances: Iterable[AppliedInstance], tasks: Iterable[StatementTask]) -> None:
    """Carry out the tasks that undo instances. Raises AssertionError naming the sources that do not come back."""
    # A statement with 100,000 instances has few operations, and so few proofs.
    proved: set[CompiledOps] = set()
    for applied in applied_instances:
        # Figure 2. A proof has two halves, and neither looks at an element::
        #
        #     operations   a, b --steps--> c --undo--> a, b     on fresh sources, once for each shape
        #     the whole    sources --tasks--> outputs --undoing.tasks--> sources, name by name
        #
        # The first shows that steps are undone. The second shows that the right names meet the right steps.
        if applied.ops is not None and applied.ops not in proved:
            proved.add(applied.ops)
            _prove_ops(applied.ops, [variable.node.meta for variable in applied.left if variable.node is not None])
    wrong = claim.failing(tasks)
    assert not wrong, f"the inverse of a rewrite does not give back {', '.join(wrong[:10])} ({len(wrong)} findings)"


def gives_back(claim: Claim, statements: Iterable[Statement]) -> bool:
    """Whether statements, carried out on the outputs, give each source as it was."""
    return not claim.failing([StatementTask.of(each) for each in statements])


def _prove_ops(ops: CompiledOps, metas: Sequence[TensorMeta]) -> None:
    """Carry operations and what undoes them out on tensors of these metas."""
    # Views are compared, not nodes: `apply_ops` would hand the same nodes back and so prove itself.
    values = [ViewedTensor.source(str(place), meta) for place, meta in enumerate(metas)]
    returned = apply_steps(ops.undo, apply_steps(ops.steps, values))
    same = all(
        back.dtype == value.dtype and _bare(value).same_elements(_bare(back), but_fills=bool(ops.cropped))
        for back, value in zip(returned, values, strict=True)
    )
    assert same, f"the inverse of {ops.steps} does not lead back"


def _standing(agree: Sequence[tuple[Node, ...]]) -> dict[Node, Node]:
    """For each node that another stands for: one that stands for all of its group."""
    standing: dict[Node, Node] = {}

    def head(node: Node) -> Node:
        while node in standing:
            node = standing[node]
        return node

    for group in agree:
        first = head(group[0])
        for node in group[1:]:
            other = head(node)
            if other is not first:
                standing[other] = first
    return {node: head(node) for node in standing}


def _same(returned: Node | None, node: Node, standing: Mapping[Node, Node], claim: Claim) -> bool:
    """Whether a source came back."""
    if returned is None:
        return False
    # The common case, by identity. Values are compared only where a way back took other steps than the way there.
    if returned is node or standing.get(returned, returned) is standing.get(node, node):
        return True
    # Casts are left out: what they lose is a loss that was reported, and not a fault of the way back.
    one, other = (_bare(each.value_under(claim.aliases)) for each in (returned, node))
    return returned.meta.dtype == node.meta.dtype and other.same_elements(one, but_fills=claim.crops)


def _bare(value: ViewedTensor) -> ViewedTensor:
    """A tensor as elements alone: without dtypes, which casts led through, and without views that have no elements."""
    views = [view._replace(dtypes=()) for view in value.views if 0 not in view.shape]
    return ViewedTensor(value.shape, "", tuple(views))
