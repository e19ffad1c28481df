"""Environment: the variables at one point of a rewrite, and the rules by which optimizer state goes with parameters.

An instance that takes parameters takes what the optimizer has for them, one key after the other: with the same boxes
where the state has the shape of the parameter, without casts. State without dims is one for all, and has to be equal in
all that are joined.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from shardwise.plan.names import is_state_name, split_state_name, state_name
from shardwise.rewrite.compiled_ops import compile_ops
from shardwise.rewrite.nodes import Node
from shardwise.rewrite.patterns import NameIndex, NamePattern
from shardwise.rewrite.statements import Statement
from shardwise.rewrite.verbs.operation import OPEN, Operation, OpsRefusal
from shardwise.rewrite.verbs.stack import Unstack

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
        """Whether `a -> a` makes it an output although it is read."""
        self.added = False
        """Whether `_ -> a` made it: it has no elements."""
        self.dropped: Statement | None = None
        """What dropped it."""

    # Figure 1. Variables of `a, b -> c, axis=0; a -> a; c -> d; _ -> e`. What nobody read comes out::
    #
    #     a   read by the first statement, kept by the second     comes out
    #     b   read                                                is used up
    #     c   read                                                is used up: a temporary
    #     d                                                       comes out
    #     e   added: no elements                                  the target keeps its value
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
        # The index and the keys have this name already: names are what they hold, not variables.
        if before is not None and before.dropped is None:
            return
        if self._index is not None:
            self._index.add(name)
        note_key(self.state_keys, name)

    def drop(self, variable: Variable, statement: Statement) -> None:
        """Let a variable go."""
        # The variable stays in the dict: a later statement that names it learns in which line it was dropped.
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
        # Plain names and instances need no index: an exact inverse consists of instances.
        if self._index is None:
            self._index = NameIndex(name for name, each in self.variables.items() if each.dropped is None)
        return self._index

    def find(self, pattern: NamePattern) -> list[tuple[str, tuple[str, ...], str]]:
        """Return the variables that a pattern matches: the unread ones; if there are none, those that were read.

        So a statement does not see what an earlier one used up, and yet two statements can read the same tensors.
        """
        variables = self.variables
        found = [match for match in self.index.find(pattern) if not variables[match[0]].added]
        # `layers.*.w -> all` after `layers.0.w -> first` means the layers that are left. If none are, it means a copy.
        live = [match for match in found if variables[match[0]].live]
        return live or found

    def nearest(self, pattern: NamePattern) -> str:
        """Say which variables were perhaps meant by a pattern that stands for none; empty where none were."""
        self._suggested += 1
        # A rewrite for another model misses everywhere. Twenty hints show that as well as thousands would.
        return self.index.nearest(pattern) if self._suggested <= _SUGGESTED else ""

    def beside(self, pattern: NamePattern, name: str, number: int) -> str:
        """A variable that begins like one that the star of a pattern stands for, but has this number; "" if none."""
        return self.index.beside(pattern, name, str(number))

    def count(self, name: str, statement: Statement) -> int | None:
        """How many tensors a statement makes of a variable, one for each index of a dim; None: not known."""
        node, operations = self.variables[name].node, statement.operations
        at = next((at for at, each in enumerate(operations) if isinstance(each, Unstack)), None)
        if node is None or at is None:
            return None
        # Casts change no shape, and a cast that is `recorded` would be refused: only the number of indices is asked
        # here.
        before = on_state(operations[:at], is_master=True)
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
        # difflib compares letter by letter. Among 100,000 names only those with the same last word are worth it.
        near = names if len(names) <= _COMPARED else [each for each in names if each.endswith(tail)][:_COMPARED]
        close = get_close_matches(name, near, n=3, cutoff=0.6)
        return f"there is no tensor {name}" + (f"; there is {' and '.join(close)}" if close else "")

    # What is not known because of findings

    # By skeleton, not by name: the statement that failed never said for which numbers it stands.
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


_SCALAR = "step"
"""The key of state without dims also of parameters without dims, whose other state has their shape."""


class Follow(NamedTuple):
    """What becomes of the state under one key: one value for all, or the same as of the parameters, or a refusal."""

    shared: bool = False
    undecided: bool = False
    """Whether its kind is not known."""
    refused: str = ""
    leaning: bool = False
    """Whether only parameters with dims tell what it is. Then what comes out has to tell it too, for the way back."""


def on_state(operations: tuple[Operation, ...], *, is_master: bool) -> tuple[Operation, ...]:
    """The effect of operations on the optimizer state of parameters, which has its own dtypes: without casts."""
    kept = [each.on_state(is_master=is_master) for each in operations]
    return tuple([each for each in kept if each is not None])


def keys_by_parameter(names: Iterable[str]) -> dict[str, dict[str, None]]:
    """Return the keys of the optimizer state of each parameter among `names`."""
    keys: dict[str, dict[str, None]] = {}
    for name in names:
        note_key(keys, name)
    return keys


def states_of(left: tuple[str, ...], key: str, variables: dict[str, Variable]) -> tuple[Variable | None, ...]:
    """The state under `key` of parameters; None for those that have none, or whose state a statement read by name."""
    found = [variables.get(state_name(name, key)) for name in left]
    # A statement that read the state by its own name has decided about it, and it does not go along any more.
    return tuple([None if each is None or each.dropped or each.reads else each for each in found])


def is_scalar(key: str, nodes: Mapping[str, Node]) -> bool | None:
    """Whether state under `key` is one value for a parameter, or has one per element, as parameters with dims tell.

    None where there is no such state, or of both kinds. Of parameters without dims both have no dims.
    """
    # AdamW's exp_avg has one number per element and step one per parameter. Only shapes tell which, and only where the
    # parameter has dims: () is the shape of both kinds otherwise.
    kinds = set()
    for name, node in nodes.items():
        split = split_state_name(name)
        if split is not None and split[1] == key:
            parameter = nodes.get(split[0])
            if parameter is not None and parameter.meta.shape and node.meta.shape in ((), parameter.meta.shape):
                kinds.add(node.meta.shape == ())
    return kinds.pop() if len(kinds) == 1 else None


def is_of_whole(key: str, nodes: Mapping[str, Node]) -> bool:
    """Whether state under `key` belongs to a parameter as a whole, as factors do, which a square one has in its shape.

    So it is where a parameter has it in another shape than its own, or in a list of the optimizer.
    """
    for name, node in nodes.items():
        split = split_state_name(name)
        if split is not None and split[1] == key and node.meta.shape:
            parameter = nodes.get(split[0])
            if "[" in key or "(" in key or (parameter is not None and parameter.meta.shape != node.meta.shape):
                return True
    return False


def undecided(name: str, *, back: bool = False) -> str:
    """Say that the kind of state of a parameter without dims is not known, and what to do; `back`: on the way back."""
    goes = "comes out" if back else "goes in"
    return (
        f"{name}: a parameter without dims {goes}. No parameter with dims {goes} to tell whether this state is one "
        f'value or one per element. Drop it by its name, in quotes (`"{name}" -> _`), or leave the parameter as it is'
    )


def follow(
    key: str,
    parameters: tuple[Node, ...],
    states: tuple[Node, ...],
    results: tuple[Node, ...],
    scalar: Callable[[str], bool | None],
    of_whole: Callable[[str], bool],
    plain: bool,
) -> Follow:
    """Decide what becomes of the states of parameters, which become `results`.

    `scalar`, `of_whole`: what `is_scalar` and `is_of_whole` say of a key; `plain`: the parameter gets another name and
    nothing else.
    """
    # Figure 2. What becomes of state, by shape, when `q` (4, 2) and `k` (2, 2) become `qk` (6, 2)::
    #
    #     exp_avg   (4, 2) and (2, 2)     as the parameters: joined to (6, 2)
    #     step      () and ()             one value for all: it must be equal in both
    #     row       (4,) and (2,)         neither: refused, for only a rename would fit
    shapes = {node.meta.shape for node in states}
    taken, made = {node.meta.shape for node in parameters}, {node.meta.shape for node in results}
    # Torch counts updates by one number per parameter. Shapes do not tell it from state of a parameter without dims.
    if key == _SCALAR and shapes == {()}:
        return Follow(shared=True)
    # A rename moves any state, whatever its shape: nothing has to be known about it.
    if plain or (shapes == taken == made == {()} and len(states) == len(results) == 1):
        return Follow(shared=shapes == {()})
    # What comes out without dims does not tell its kind to the way back; another parameter with dims has to.
    leaning = () in made
    if shapes == {()}:
        one = scalar(key) if () in taken else True
        if one is None:
            return Follow(undecided=True)
        if one:
            return Follow(shared=True, leaning=leaning)
    # Factored state, as Adafactor's, has no element for each element of the parameter, so boxes say nothing about it.
    for parameter, state in zip(parameters, states, strict=True):
        if parameter.meta.shape != state.meta.shape:
            shape = list(state.meta.shape)
            return Follow(
                refused=f"has shape {shape} and not the parameter's {list(parameter.meta.shape)}, so it can only be "
                "renamed with it. Drop it by its name, in quotes, or leave the parameter as it is"
            )
    if of_whole(key):
        return Follow(
            refused="belongs to the parameter as a whole, so it can only be renamed with it. Drop it by its name, in "
            "quotes, or leave the parameter as it is"
        )
    return Follow(leaning=leaning)
