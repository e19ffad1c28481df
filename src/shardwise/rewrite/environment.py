"""Environment: the variables that there are at one point of a rewrite, and what became of them."""

from collections.abc import Iterable
from difflib import get_close_matches

from shardwise.plan.names import is_state_name, split_state_name
from shardwise.rewrite.compiled_ops import OPEN, OpsRefusal, compile_ops
from shardwise.rewrite.nodes import Node
from shardwise.rewrite.patterns import NameIndex, NamePattern
from shardwise.rewrite.statements import Cast, Statement, Unstack

__all__ = ["Environment", "Variable", "note_key"]

_COMPARED = 4000
"""Names among which one that was perhaps meant is looked for."""

_SUGGESTED = 20
"""Findings that suggest a name: finding one in a large model takes a while."""


class Variable:
    """A name and what it stands for, from one assignment to the next."""

    __slots__ = ("added", "along", "dropped", "kept", "name", "node", "reads")

    def __init__(self, name: str, node: Node | None) -> None:
        self.name = name
        self.node = node
        """None: not known, because of a finding; or `added`."""
        self.reads = 0
        """How often statements read it by its name."""
        self.along = 0
        """How often it was read since it is the optimizer state of what was read."""
        self.kept = False
        """Whether `a -> a` says that it is to be an output although it is read."""
        self.added = False
        """Whether `_ -> a` made it: it has no elements."""
        self.dropped: Statement | None = None
        """What dropped it."""

    @property
    def live(self) -> bool:
        """Whether it would be an output if nothing followed."""
        return self.dropped is None and not self.added and (self.kept or not (self.reads or self.along))


def note_key(keys: dict[str, dict[str, None]], name: str) -> None:
    """Note the key of a tensor that is optimizer state, for its parameter; others have none."""
    if is_state_name(name) and (split := split_state_name(name)) is not None:
        keys.setdefault(split[0], {})[split[1]] = None


class Environment:
    """Variables by name; found by pattern; and the optimizer state of each parameter."""

    def __init__(self, nodes: Iterable[tuple[str, Node]], added: Iterable[str] = ()) -> None:
        self.variables: dict[str, Variable] = {}
        self.state_keys: dict[str, dict[str, None]] = {}
        """Parameter -> keys of its optimizer state that there were."""
        self._index: NameIndex | None = None
        self._suggested = 0
        self._hidden: set[str] = set()
        for name, node in nodes:
            self.assign(Variable(name, node))
        self.first = dict(self.variables)
        """The variables that it had in the beginning and that have elements."""
        for name in added:
            variable = Variable(name, None)
            variable.added = True
            self.assign(variable)

    def assign(self, variable: Variable) -> None:
        """Put a variable in the place of what has its name."""
        name = variable.name
        before = self.variables.get(name)
        self.variables[name] = variable
        if before is not None and before.dropped is None:
            return
        if self._index is not None:
            self._index.add(name)
        note_key(self.state_keys, name)

    def drop(self, variable: Variable, statement: Statement) -> None:
        """Let a variable go."""
        variable.dropped = statement
        if self._index is not None:
            self._index.remove(variable.name)

    # What expansion asks

    def exists(self, name: str) -> bool:
        """Whether a statement can read a variable of this name."""
        variable = self.variables.get(name)
        return variable is not None and variable.dropped is None

    @property
    def index(self) -> NameIndex:
        """The names that there are."""
        if self._index is None:
            self._index = NameIndex(name for name, each in self.variables.items() if each.dropped is None)
        return self._index

    def find(self, pattern: NamePattern) -> list[tuple[str, tuple[str, ...], str]]:
        """Return what a pattern stands for: variables that nobody read; where there are none, those that were read.

        So a statement does not see what an earlier one used up, and yet two statements can read the same tensors.
        """
        variables = self.variables
        found = [match for match in self.index.find(pattern) if not variables[match[0]].added]
        live = [match for match in found if variables[match[0]].live]
        return live or found

    def nearest(self, pattern: NamePattern) -> str:
        """Say which variables were perhaps meant by a pattern that stands for none; empty where none were."""
        self._suggested += 1
        return self.index.nearest(pattern) if self._suggested <= _SUGGESTED else ""

    def count(self, name: str, statement: Statement) -> int | None:
        """How many tensors a statement makes of a variable, one for each index of a dim; None: not known."""
        node, operations = self.variables[name].node, statement.operations
        at = next((at for at, each in enumerate(operations) if isinstance(each, Unstack)), None)
        if node is None or at is None:
            return None
        before = tuple([each for each in operations[:at] if not isinstance(each, Cast)])
        unstack, ops = operations[at], compile_ops(before, (statement.left[0].transposed,), (node.meta,), 1, OPEN)
        if isinstance(ops, OpsRefusal) or not isinstance(unstack, Unstack):
            return None
        shape = ops.results[0].shape
        return shape[unstack.axis] if -len(shape) <= unstack.axis < len(shape) else None

    def absence(self, name: str) -> str:
        """Say that there is no variable of this name, and which was perhaps meant."""
        variable = self.variables.get(name)
        if variable is not None and variable.dropped is not None:
            return f"{name} was dropped in line {variable.dropped.place.line}"
        self._suggested += 1
        if self._suggested > _SUGGESTED:
            return f"there is no tensor {name}"
        tail = name.rpartition(".")[2]
        names = [each for each, variable in self.variables.items() if variable.dropped is None]
        near = names if len(names) <= _COMPARED else [each for each in names if each.endswith(tail)][:_COMPARED]
        close = get_close_matches(name, near, n=3, cutoff=0.6)
        return f"there is no tensor {name}" + (f"; there is {' and '.join(close)}" if close else "")

    # What is not known because of findings

    def hide(self, pattern: NamePattern) -> None:
        """Remember that names like these might have been there, had nothing been wrong."""
        self._hidden.add(pattern.skeleton)

    @property
    def hides(self) -> bool:
        """Whether something is hidden."""
        return bool(self._hidden)

    def hidden(self, pattern: NamePattern) -> bool:
        """Whether names like these might have been there."""
        return pattern.skeleton in self._hidden
