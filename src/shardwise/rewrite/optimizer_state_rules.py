"""Rules of optimizer state: it goes where its parameter goes.

An instance that takes parameters takes what the optimizer has for them, one key after the other: with the same boxes
where the state has the shape of the parameter, without casts; state without dims is one for all, and has to be equal in
all that are joined.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from shardwise.plan.names import split_state_name, state_name
from shardwise.rewrite.environment import Variable, note_key
from shardwise.rewrite.nodes import Node
from shardwise.rewrite.statements import Cast, StatementOperation

__all__ = ["Follow", "follow", "is_scalar", "keys_by_parameter", "states_of", "undecided", "without_casts"]

_SCALAR = "step"
"""The key of state without dims also of parameters without dims, whose other state has their shape."""


class Follow(NamedTuple):
    """What becomes of the state under one key: one value for all, or the same as of the parameters, or a refusal."""

    shared: bool = False
    undecided: bool = False
    """Whether nobody can tell what it is."""
    refused: str = ""
    leaning: bool = False
    """Whether only parameters with dims tell what it is; then what comes out has to tell it too, for the way back."""


def without_casts(operations: tuple[StatementOperation, ...]) -> tuple[StatementOperation, ...]:
    """What operations on parameters do to their optimizer state, which has dtypes of its own."""
    return tuple([each for each in operations if not isinstance(each, Cast)])


def keys_by_parameter(names: Iterable[str]) -> dict[str, dict[str, None]]:
    """Return the keys of the optimizer state of each parameter among `names`."""
    keys: dict[str, dict[str, None]] = {}
    for name in names:
        note_key(keys, name)
    return keys


def states_of(left: tuple[str, ...], key: str, variables: dict[str, Variable]) -> tuple[Variable | None, ...]:
    """The state under `key` of parameters; None for those that have none, or whose state a statement read by name."""
    found = [variables.get(state_name(name, key)) for name in left]
    return tuple([None if each is None or each.dropped or each.reads else each for each in found])


def is_scalar(key: str, nodes: Mapping[str, Node]) -> bool | None:
    """Whether state under `key` is one value for a parameter, or has one per element, as parameters with dims tell.

    None where there is no such state, or of both kinds. Of parameters without dims both have no dims.
    """
    kinds = set()
    for name, node in nodes.items():
        split = split_state_name(name)
        if split is not None and split[1] == key:
            parameter = nodes.get(split[0])
            if parameter is not None and parameter.meta.shape and node.meta.shape in ((), parameter.meta.shape):
                kinds.add(node.meta.shape == ())
    return kinds.pop() if len(kinds) == 1 else None


def undecided(name: str, *, back: bool = False) -> str:
    """Say that nobody can tell what state of a parameter without dims is, and what to do; `back`: on the way back."""
    goes = "comes out" if back else "goes in"
    return (
        f"{name}: a parameter without dims {goes}, and no parameter with dims that {goes} tells whether this state is "
        f'one value for a parameter or has one per element; drop it by its name, in quotes (`"{name}" -> _`), or leave '
        "the parameter as it is"
    )


def follow(
    key: str,
    parameters: tuple[Node, ...],
    states: tuple[Node, ...],
    results: tuple[Node, ...],
    scalar: Callable[[str], bool | None],
    plain: bool,
) -> Follow:
    """Decide what becomes of the states of parameters, which become `results`.

    `scalar` is what `is_scalar` says of a key; `plain`: the parameter gets another name and nothing else.
    """
    shapes = {node.meta.shape for node in states}
    taken, made = {node.meta.shape for node in parameters}, {node.meta.shape for node in results}
    # Torch counts updates by one number per parameter. Shapes do not tell it from state of a parameter without dims.
    if key == _SCALAR and shapes == {()}:
        return Follow(shared=True)
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
    for parameter, state in zip(parameters, states, strict=True):
        if parameter.meta.shape != state.meta.shape:
            shape = list(state.meta.shape)
            return Follow(
                refused=f"has shape {shape} and not the parameter's {list(parameter.meta.shape)}, so that it can only "
                f"be renamed with it: drop it by its name, in quotes, or leave the parameter as it is"
            )
    return Follow(leaning=leaning)
