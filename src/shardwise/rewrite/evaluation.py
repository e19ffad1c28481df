"""Evaluation: statements carried out on variables, from the sources to the outputs. Nothing but names and metas move.

All instances of a statement read before any of them writes. Who reads a variable uses it up; what nobody read comes out
in the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardwise.rewrite.deeds import Deed, Task
from shardwise.rewrite.degrees import Fusings, Laid
from shardwise.rewrite.environment import Environment, Variable
from shardwise.rewrite.expansion import Expanded, expand
from shardwise.rewrite.findings import SHOWN, Finding
from shardwise.rewrite.instances import Carrying
from shardwise.rewrite.kernels import Degrees, Kernel, Refusal
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Node
from shardwise.rewrite.operations import work_out
from shardwise.rewrite.patterns import NameIndex, NamePattern
from shardwise.rewrite.planes import is_scalar, keys_by_parameter
from shardwise.rewrite.statements import Operation, Statement

__all__ = ["Evaluation", "evaluate"]


@dataclass(slots=True)
class Evaluation:
    """What came of tasks."""

    environment: Environment
    outputs: dict[str, Node]
    """What comes out, in the order of the names."""
    added: frozenset[str]
    """Names that keep what they have in the target."""
    trace: list[list[Deed]]
    """What each task did."""
    agree: list[tuple[Node, ...]]
    """Tensors without dims of which the first stands for all."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What may be wrong, and what was counted."""
    leaning: list[tuple[str, bool, Finding]] = field(default_factory=list)
    """Optimizer state whose kind only parameters with dims tell: key, kind, and what to say if none come out."""

    def undecided(self) -> list[Finding]:
        """One finding for each key of optimizer state that the way back could not tell the kind of."""
        first = {key: (scalar, finding) for key, scalar, finding in reversed(self.leaning)}
        return [finding for key, (scalar, finding) in first.items() if is_scalar(key, self.outputs) is not scalar]


def evaluate(
    tasks: Iterable[Task],
    nodes: Mapping[str, Node],
    wanted: Mapping[str, TensorMeta] | None = None,
    added: Iterable[str] = (),
    *,
    laid: Laid = MappingProxyType({}),
    fusings: Fusings | None = None,
) -> Evaluation:
    """Carry tasks out on variables that stand for `nodes`.

    `wanted` are the tensors of the target, None where it is not known. They say what stars and placeholders on the
    right stand for, and which variables come out although they were read. Whether the outputs are what the target wants
    is another question. `added` are variables without elements. `laid` are the degrees that layouts tell; `fusings`
    notes all that have degrees.
    """
    evaluator = _Evaluator(Environment(nodes.items(), added), wanted, laid, fusings)
    for number, task in enumerate(tasks):
        evaluator.task = number
        evaluator.carry_out(task)
    return evaluator.result()


class _Evaluator:
    """Carries tasks out, one after the other."""

    def __init__(
        self,
        environment: Environment,
        wanted: Mapping[str, TensorMeta] | None,
        laid: Laid,
        fusings: Fusings | None,
    ) -> None:
        self.environment = environment
        self.laid = laid
        self.fusings = fusings
        self.task = 0
        """The number of the one that is being carried out."""
        self.wanted: Mapping[str, TensorMeta] = wanted or {}
        self.wanted_keys = keys_by_parameter(self.wanted)
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.agree: list[tuple[Node, ...]] = []
        self.trace: list[list[Deed]] = []
        self._wanted_index = None if wanted is None else NameIndex(wanted)
        self.leaning: list[tuple[str, bool, Finding]] = []
        self._scalar: dict[str, bool | None] = {}
        self._kernels: dict[object, Kernel | Refusal] = {}
        self._held: list[object] = []
        """Keeps alive what the keys of `_kernels` tell apart by id."""

    def carry_out(self, task: Task) -> None:
        """Carry one task out, or find what is wrong with it."""
        statement = task.statement
        deeds: list[Deed] = []
        self.trace.append(deeds)
        if self.environment.hides and any(self.environment.hidden(NamePattern(name)) for name in statement.left):
            self._hide(statement)
            return
        todo: list[tuple[tuple[Operation, ...], Sequence[Expanded]]] = []
        findings: list[Finding] = []
        for part in task.parts:
            if part.instances is None:
                made, wrong = expand(statement, self.environment, self._wanted_index, self.notes)
                todo.append((part.operations, made))
            else:
                there, wrong = self._there(statement, part.instances)
                todo.append((part.operations, there))
            findings += wrong
        if findings:
            self.findings.extend(findings)
            self._hide(statement)
        else:
            Carrying(self, statement, deeds).carry_out(todo)

    def _there(self, statement: Statement, instances: Sequence[Expanded]) -> tuple[Sequence[Expanded], list[Finding]]:
        """Instances, and what is wrong where something that they read is not there."""
        exists = self.environment.exists
        if statement.optional:
            return [each for each in instances if all(map(exists, each.left))], []
        absent = [(name, each) for each in instances for name in each.left if not exists(name)]
        findings = [
            Finding.of(statement, self.environment.absence(name), expansion=[str(each)])
            for name, each in absent[:SHOWN]
        ]
        if len(absent) > SHOWN:
            more = f"{len(absent) - SHOWN} more tensors that this needs are not there either"
            findings.append(Finding.of(statement, more))
        return instances, findings

    def _hide(self, statement: Statement) -> None:
        """What a statement would have written is not known: nothing more is found about it."""
        for name in statement.right:
            if name.plain is not None:
                self.environment.assign(Variable(name.plain, None))
            else:
                self.environment.hide(NamePattern(name))

    def scalar(self, key: str) -> bool | None:
        """Whether optimizer state is one value for a parameter, as far as the sources tell."""
        if key not in self._scalar:
            nodes = {name: each.node for name, each in self.environment.first.items() if each.node is not None}
            self._scalar[key] = is_scalar(key, nodes)
        return self._scalar[key]

    def kernel(
        self,
        operations: tuple[Operation, ...],
        transposed: tuple[bool, ...] | None,
        metas: tuple[TensorMeta, ...],
        num_results: int,
        degrees: Degrees,
    ) -> Kernel | Refusal:
        """What operations do to tensors of these metas: worked out once."""
        key = (id(operations), transposed, metas, num_results, degrees)
        found = self._kernels.get(key)
        if found is None:
            self._held.append(operations)
            found = work_out(operations, transposed or (False,) * len(metas), metas, num_results, degrees)
            self._kernels[key] = found
        return found

    def result(self) -> Evaluation:
        """What came of the tasks."""
        outputs = {}
        added = set()
        wanted = self.wanted
        for name, variable in self.environment.variables.items():
            if variable.dropped is not None:
                continue
            if variable.added:
                added.add(name)
            elif variable.node is not None and (variable.live or name in wanted):
                outputs[name] = variable.node
        return Evaluation(
            self.environment,
            outputs,
            frozenset(added),
            self.trace,
            self.agree,
            self.findings,
            self.notes,
            self.leaning,
        )
