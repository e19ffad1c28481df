"""Evaluation: statements carried out on variables, from the sources to the outputs. Nothing but names and metas move.

All instances of a statement read before any of them writes. A read uses a variable up; unread variables come out in the
end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from types import MappingProxyType

from shardwise.plan.names import WEIGHT_KEYS, is_state_name, state_name
from shardwise.rewrite.compiled_ops import CompiledOps, compile_ops
from shardwise.rewrite.degrees import Fusings, KnownDegrees, fused_in
from shardwise.rewrite.environment import (
    Environment,
    Variable,
    follow,
    is_of_whole,
    is_scalar,
    keys_by_parameter,
    on_state,
    states_of,
    undecided,
)
from shardwise.rewrite.expansion import AppliedInstance, Expanded, StatementTask, expand
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Node, apply_ops
from shardwise.rewrite.patterns import NameIndex, NamePattern
from shardwise.rewrite.statements import SHOWN, Statement, StatementFinding
from shardwise.rewrite.verbs.fused import Fused
from shardwise.rewrite.verbs.operation import OPEN, Degrees, Operation, OpsRefusal


@dataclass(slots=True)
class Evaluation:
    """What came of tasks."""

    environment: Environment
    outputs: dict[str, Node] = field(default_factory=dict)
    """What comes out, in the order of the names."""
    added: frozenset[str] = frozenset()
    """Names that keep what they have in the target."""
    trace: list[list[AppliedInstance]] = field(default_factory=list)
    """What each task did."""
    agree: list[tuple[Node, ...]] = field(default_factory=list)
    """Tensors without dims; the first stands for all."""
    findings: list[StatementFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What may be wrong, and what was counted."""
    leaning: list[tuple[str, bool, StatementFinding]] = field(default_factory=list)
    """Optimizer state whose kind only parameters with dims tell: key, kind, and what to say if none come out."""

    def undecided(self) -> list[StatementFinding]:
        """One finding for each key of optimizer state that the way back could not tell the kind of."""
        # One parameter without dims among many would give a finding for each of its statements. One for each key is
        # enough.
        first = {key: (scalar, finding) for key, scalar, finding in reversed(self.leaning)}
        return [finding for key, (scalar, finding) in first.items() if is_scalar(key, self.outputs) is not scalar]


def evaluate(
    tasks: Iterable[StatementTask],
    nodes: Mapping[str, Node],
    wanted: Mapping[str, TensorMeta] | None = None,
    added: Iterable[str] = (),
    *,
    degrees: KnownDegrees = MappingProxyType({}),
    fusings: Fusings | None = None,
    is_proof: bool = False,
) -> Evaluation:
    """Carry tasks out on variables that stand for `nodes`.

    `wanted` are the tensors of the target, None where it is not known. They say what stars and placeholders on the
    right stand for, and which variables come out although they were read. Whether the outputs are what the target wants
    is another question. `added` are variables without elements. `degrees` are those that layouts tell; `fusings`
    notes all that have degrees. `is_proof`: what comes out is compared and never read, so that what was quantised may
    be dequantised again.
    """
    evaluator = _TaskEvaluator(Environment(nodes.items(), added), wanted, degrees, fusings, is_proof=is_proof)
    for number, task in enumerate(tasks):
        evaluator.task = number
        evaluator.carry_out(task)
    return evaluator.result()


class _TaskEvaluator:
    """Carries tasks out, one after the other."""

    def __init__(
        self,
        environment: Environment,
        wanted: Mapping[str, TensorMeta] | None,
        degrees: KnownDegrees,
        fusings: Fusings | None,
        *,
        is_proof: bool,
    ) -> None:
        self.environment = environment
        self.done = Evaluation(environment)
        self.degrees = degrees
        self.fusings = fusings
        self.is_proof = is_proof
        self.task = 0
        """The number of the one that is being carried out."""
        self.wanted: Mapping[str, TensorMeta] = wanted or {}
        self.wanted_keys = keys_by_parameter(self.wanted)
        self._wanted_index = None if wanted is None else NameIndex(wanted)

        def sources() -> dict[str, Node]:
            return {name: each.node for name, each in environment.first.items() if each.node is not None}

        # Of a key of optimizer state, as far as the sources tell. Asked for each parameter, and answered by a walk over
        # all sources.
        self.scalar = cache(lambda key: is_scalar(key, sources()))
        self.of_whole = cache(lambda key: is_of_whole(key, sources()))
        # Figure 1 of `compiled_ops.py` shows what is kept: one entry for each statement and shape, not for each layer.
        self._compiled: dict[object, CompiledOps | OpsRefusal] = {}
        self._held: list[object] = []
        """Keeps alive what the keys of `_compiled` tell apart by id."""

    def carry_out(self, task: StatementTask) -> None:
        """Carry one task out, or find what is wrong with it."""
        statement = task.statement
        applied_instances: list[AppliedInstance] = []
        # Before anything can fail: the trace has an entry for every task, since others pair the two.
        self.done.trace.append(applied_instances)
        # What reads the outputs of a statement that is wrong would only repeat the finding under other names.
        if self.environment.hides and any(self.environment.hidden(NamePattern(name)) for name in statement.left):
            self._hide(statement)
            return
        todo: list[tuple[tuple[Operation, ...], Sequence[Expanded]]] = []
        findings: list[StatementFinding] = []
        for group in task.groups:
            # As it was written: the names that there are decide. Otherwise this undoes something, and its instances are
            # known.
            if group.instances is None:
                made, wrong = expand(statement, self.environment, self._wanted_index, self.done.notes)
                todo.append((group.operations, made))
            else:
                there, wrong = self._there(statement, group.instances)
                todo.append((group.operations, there))
            findings += wrong
        # All or nothing: half of the instances of a statement would leave variables that later statements misread.
        if findings:
            self.done.findings.extend(findings)
            self._hide(statement)
        else:
            _Carrying(self, statement, applied_instances).carry_out(todo)

    def _there(
        self, statement: Statement, instances: Sequence[Expanded]
    ) -> tuple[Sequence[Expanded], list[StatementFinding]]:
        """Instances, and what is wrong where something that they read is not there."""
        exists = self.environment.exists
        # Undoing what was added: the target may never have had it.
        if statement.optional:
            return [each for each in instances if all(map(exists, each.left))], []
        absent = [(name, each) for each in instances for name in each.left if not exists(name)]
        findings = [
            StatementFinding.of(statement, self.environment.absence(name), expansion=[str(each)])
            for name, each in absent[:SHOWN]
        ]
        if len(absent) > SHOWN:
            more = f"{len(absent) - SHOWN} more tensors that this needs are not there either"
            findings.append(StatementFinding.of(statement, more))
        return instances, findings

    def _hide(self, statement: Statement) -> None:
        """What a statement would have written is not known: nothing more is found about it."""
        for name in statement.right:
            # A variable without a node: statements that read it pass on silently.
            if name.plain is not None:
                self.environment.assign(Variable(name.plain, None))
            else:
                self.environment.hide(NamePattern(name))

    def compiled(
        self,
        operations: tuple[Operation, ...],
        transposed: tuple[bool, ...] | None,
        metas: tuple[TensorMeta, ...],
        num_results: int,
        degrees: Degrees,
    ) -> CompiledOps | OpsRefusal:
        """What operations do to tensors of these metas: worked out once."""
        # Every instance asks. By identity, because to hash a tuple of dataclasses each time takes longer than the rest.
        key = (id(operations), transposed, metas, num_results, degrees)
        found = self._compiled.get(key)
        if found is None:
            self._held.append(operations)
            found = compile_ops(operations, transposed or (False,) * len(metas), metas, num_results, degrees)
            self._compiled[key] = found
        return found

    def result(self) -> Evaluation:
        """What came of the tasks."""
        added = set()
        wanted = self.wanted
        for name, variable in self.environment.variables.items():
            if variable.dropped is not None:
                continue
            if variable.added:
                added.add(name)
            # A target that wants a tensor gets it even if statements read it, since `a -> b` does not say that `a`
            # goes.
            elif variable.node is not None and (variable.live or name in wanted):
                self.done.outputs[name] = variable.node
        self.done.added = frozenset(added)
        return self.done


def _rescaling_fault(ops: CompiledOps, nodes: Sequence[Node], read: Sequence[Variable]) -> str:
    """Why operations do not fit tensors that have scales; empty where they do."""
    # A scale is of a block of elements where they are stored. Nothing else knows which elements these are.
    for variable, node in zip(read, nodes, strict=True):
        if node.form.quantised is not None:
            return f"{variable.name} is quantised: it can have another name, but nothing more is done with it"
        if ops.rescaling is not None and not ops.rescaling.quantises and not node.form.is_source:
            return (
                f"{variable.name} is no stored tensor, but made by a statement: dequantise what is stored, and do the "
                "rest with the result"
            )
    return ""


class _Carrying:
    """One task that is being carried out: all its instances read first, then all write."""

    def __init__(
        self, evaluator: _TaskEvaluator, statement: Statement, applied_instances: list[AppliedInstance]
    ) -> None:
        self._evaluator = evaluator
        self._variables = evaluator.environment.variables
        self._statement = statement
        self._operations: tuple[Operation, ...] = ()
        self._along: tuple[Operation, ...] = ()
        """What is done with the state that is looked at."""
        self._on_state: dict[bool, tuple[Operation, ...]] = {True: (), False: ()}
        """What is done with masters, and with other state."""
        self._fused: Fused | None = None
        """The operation that lays tensors out for ranks."""
        self._applied = applied_instances
        self._writings: list[Variable] = []
        """What is written when all have read."""
        self._writers: list[Expanded] = []
        """Which instance writes each."""
        self._wrong: dict[str, list[tuple[str, Expanded]]] = {}
        """Findings that are alike: messages and instances."""

    def carry_out(self, parts: Iterable[tuple[tuple[Operation, ...], Iterable[Expanded]]]) -> None:
        """Carry instances out, all of whose left names are there, each with the operations that apply to it."""
        for operations, instances in parts:
            self._operations = operations
            self._on_state = {is_master: on_state(operations, is_master=is_master) for is_master in (True, False)}
            self._fused = fused_in(operations)
            self._carry_out(instances)
        # All have read what was there before the statement, so that `layers.$L -> layers.$L+1` shifts every layer once.
        self._write()
        self._report()

    def _carry_out(self, instances: Iterable[Expanded]) -> None:
        keys = self._evaluator.environment.state_keys
        variables = self._variables
        for expanded in instances:
            left, right, _ = expanded
            # `_ -> b`: nothing is read, and no element is made.
            if not left:
                self._add(expanded)
                continue
            read = tuple([variables[name] for name in left])
            degrees, made = self._take(expanded, read)
            # A statement that names optimizer state itself says all about it: nothing goes along.
            if keys and not any(map(is_state_name, right)):
                for key in {key: None for name in left if name in keys for key in keys[name]}:
                    self._take_along(expanded, read, key, degrees, made)

    # Reading

    def _add(self, expanded: Expanded) -> None:
        for name in expanded.right:
            # A parameter that keeps its value keeps its optimizer state too.
            added = [Variable(name, None)]
            self._applied.append(AppliedInstance((), (added[0],), None, False))
            states = [state_name(name, key) for key in self._evaluator.wanted_keys.get(name, ())]
            added += [Variable(each, None) for each in states]
            for variable in added:
                variable.added = True
                self._writings.append(variable)
                self._writers.append(expanded)

    def _take(self, expanded: Expanded, read: tuple[Variable, ...]) -> tuple[Degrees, tuple[Node, ...]]:
        """Carry the operations out on the tensors. Return the degrees that this needed, and what is made of them."""
        left, right, transposed = expanded
        degrees = OPEN if self._fused is None else self._fused.degrees
        made: tuple[Node, ...] = ()
        if not right:
            self._drop(read)
        # `a -> a` is not a read: it says that `a` comes out although other statements read it.
        elif left == right and not self._operations and transposed is None:
            for variable in read:
                variable.kept = True
        else:
            # Reads are counted even where the node is unknown: the variable is used up, and not reported as left over.
            nodes = self._read(expanded, read)
            for variable in read:
                variable.reads += 1
            if nodes is None:
                self._write_unknown(expanded, right)
                return degrees, made
            # By task and instance, for the same fused statement may meet layers that are cut differently.
            if self._fused is not None:
                degrees = self._evaluator.degrees.get((self._evaluator.task, expanded), degrees)
            made = self._compute(expanded, read, right, nodes, degrees, along=False)
        return degrees, made

    def _drop(self, read: Sequence[Variable]) -> None:
        for variable in read:
            # Two instances of a statement may drop one variable, such as a tensor that both name.
            if variable.dropped is None:
                self._evaluator.environment.drop(variable, self._statement)

    def _read(self, expanded: Expanded, read: Sequence[Variable]) -> tuple[Node, ...] | None:
        """The nodes of variables that are read; None where one is not known."""
        nodes = []
        for variable in read:
            if variable.node is not None:
                nodes.append(variable.node)
            elif variable.added:
                self._refuse(
                    f"{variable.name} is added by `_ -> {variable.name}` and has no elements to read", expanded
                )
        return tuple(nodes) if len(nodes) == len(read) else None

    def _compute(
        self,
        expanded: Expanded,
        read: tuple[Variable, ...],
        right: Sequence[str],
        nodes: tuple[Node, ...],
        degrees: Degrees,
        *,
        along: bool,
    ) -> tuple[Node, ...]:
        """Write what the operations make of nodes, and return it; nothing where they do not fit."""
        operations = self._along if along else self._operations
        # A rename passes the node itself on. So a proof sees at a glance that nothing happened on the way.
        if not operations and expanded.transposed is None and len(nodes) == len(right) == 1:
            self._do(expanded, read, right, nodes, None, along)
            return nodes
        metas = tuple([node.meta for node in nodes])
        ops = self._evaluator.compiled(operations, expanded.transposed, metas, len(right), degrees)
        if isinstance(ops, OpsRefusal):
            self._refuse(ops.of([variable.name for variable in read]), expanded, alike=ops.text)
            self._write_unknown(expanded, right)
            return ()
        if not self._evaluator.is_proof and (fault := _rescaling_fault(ops, nodes, read)):
            self._refuse(fault, expanded, alike="scales")
            self._write_unknown(expanded, right)
            return ()
        # The first of two passes (see degrees.py): what is made goes on as a source of its own, which can be followed.
        fusings = self._evaluator.fusings
        if fusings is not None and self._fused is not None:
            before, after = ops.halves
            key = None if along else (self._evaluator.task, expanded)
            made = apply_ops(after, fusings.take(key, ops, apply_ops(before, nodes)))
        else:
            made = apply_ops(ops, nodes)
        self._do(expanded, read, right, made, None if ops.does_nothing else ops, along)
        return made

    def _do(
        self,
        expanded: Expanded,
        read: tuple[Variable, ...],
        right: Sequence[str],
        nodes: Sequence[Node],
        ops: CompiledOps | None,
        along: bool,
    ) -> None:
        written = tuple([Variable(name, node) for name, node in zip(right, nodes, strict=True)])
        # Variables, not names: a name may be assigned again, and the way back has to know which one was meant.
        self._applied.append(AppliedInstance(read, written, ops, along))
        self._writings += written
        self._writers += [expanded] * len(written)

    def _write_unknown(self, expanded: Expanded, right: Sequence[str]) -> None:
        for name in right:
            self._writings.append(Variable(name, None))
            self._writers.append(expanded)

    # Optimizer state

    def _take_along(
        self,
        expanded: Expanded,
        parameters: Sequence[Variable],
        key: str,
        degrees: Degrees,
        made: tuple[Node, ...],
    ) -> None:
        """Do the operations of the parameters on the state under one key; `made` are the parameters' results."""
        left, right, transposed = expanded
        self._along = self._on_state[key in WEIGHT_KEYS]
        found = states_of(left, key, self._variables)
        states = tuple([each for each in found if each is not None])
        if not states:
            return
        if not right:
            self._drop(states)
            return
        if left == right and not self._operations and transposed is None:
            for variable in states:
                variable.kept = True
            return
        tensors = tuple([each.node for each in parameters if each.node is not None])
        for variable in states:
            variable.along += 1
        if any(each.rescales for each in self._operations):
            self._refuse(
                f"{states[0].name}: the state of an optimizer goes with no parameter that is quantised or dequantised. "
                f'Drop it by its name, in quotes (`"{states[0].name}" -> _`)',
                expanded,
                alike=f"quantised {key}",
            )
            return
        # Joining q with k needs both moments: none can be made up for a parameter that has no state.
        if len(states) < len(left):
            lacking = left[found.index(None)]
            states_at = found.index(states[0])
            self._refuse(
                f"the optimizer has {key} for {left[states_at]}, but not for {lacking}",
                expanded,
                alike=key,
            )
        elif all(each.node is not None for each in states) and len(tensors) == len(left):
            self._follow(expanded, key, states, tensors, degrees, made)
            return
        self._write_unknown(expanded, [state_name(name, key) for name in right])

    def _follow(
        self,
        expanded: Expanded,
        key: str,
        states: tuple[Variable, ...],
        tensors: tuple[Node, ...],
        degrees: Degrees,
        made: tuple[Node, ...],
    ) -> None:
        """Decide what becomes of the state that all parameters have, and write it."""
        left, right, transposed = expanded
        names = [state_name(name, key) for name in right]
        nodes = tuple([each.node for each in states if each.node is not None])
        plain = not self._along and transposed is None and len(left) == len(right) == 1
        what = follow(key, tensors, nodes, made, self._evaluator.scalar, self._evaluator.of_whole, plain)
        name = states[0].name
        if what.leaning:
            doubt = StatementFinding.of(self._statement, undecided(name, back=True), expansion=[str(expanded)])
            self._evaluator.done.leaning.append((key, what.shared, doubt))
        if what.shared:
            # One step count stands for all parameters that are joined. That they agree is checked when values are read.
            if len(nodes) > 1:
                self._evaluator.done.agree.append(nodes)
            self._do(expanded, states, names, nodes[:1] * len(names), None, True)
        elif what.undecided:
            self._refuse(undecided(name), expanded, alike=f"undecided {key}")
            self._write_unknown(expanded, names)
        elif what.refused:
            self._refuse(f"{name} {what.refused}", expanded, alike=what.refused)
            self._write_unknown(expanded, names)
        else:
            self._compute(expanded, states, names, nodes, degrees, along=True)

    # Writing

    def _write(self) -> None:
        environment, variables = self._evaluator.environment, self._variables
        written: dict[str, Expanded] = {}
        for variable, expanded in zip(self._writings, self._writers, strict=True):
            name = variable.name
            before = variables.get(name)
            if before is not None:
                # Two layers that write one name: the second would win, whichever that is.
                if name in written:
                    self._refuse(
                        f"{name} is written by more than one instance: {written[name]}; {expanded}",
                        expanded,
                        alike=name,
                    )
                # `a -> b` while `b` is there and unread loses `b` without saying so. A swap over a temporary reads each
                # before.
                elif before.dropped is None and not (before.reads or before.along):
                    self._refuse_overwriting(before, variable, expanded)
            written[name] = expanded
            environment.assign(variable)

    def _refuse_overwriting(self, before: Variable, variable: Variable, expanded: Expanded) -> None:
        name = variable.name
        if before.added or variable.added:
            if before.node is not None or before.added:
                self._refuse(f"{name} exists already, and cannot be added or assigned too", expanded, alike="added")
            return
        if before.node is not None:
            elements = prod(before.node.meta.shape)
            self._refuse(
                f"{name} exists already and no statement has read it: its {elements} elements would be lost. Read it "
                f"before, or drop it by `{name} -> _`",
                expanded,
                alike=f"overwritten{elements}",
            )

    # Findings

    def _refuse(self, message: str, expanded: Expanded, *, alike: str = "") -> None:
        # The same mistake in 61 layers is one finding with three examples.
        self._wrong.setdefault(alike or message, []).append((message, expanded))

    def _report(self) -> None:
        for many in self._wrong.values():
            chain = [str(expanded) for _, expanded in many[:SHOWN]]
            if len(many) > SHOWN:
                chain.append(f"and {len(many) - SHOWN} more like these")
            self._evaluator.done.findings.append(StatementFinding.of(self._statement, many[0][0], expansion=chain))
