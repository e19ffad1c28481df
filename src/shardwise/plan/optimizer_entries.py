"""Which entries of optimizer state a checkpoint has for live parameters, and what they become here.

The state of a parameter is stored as `optimizer/<parameter>/<key>`; `optimizer/<parameter>/master` is its master, which
is no state, and neither is `weight_average`. For a parameter w of shape (4, 3), bfloat16 when saved and float32 here,
under AdamW:

    optimizer/w/exp_avg   bfloat16 (4, 3)   along: cut like w; follows w: becomes float32
    optimizer/w/step      float32 ()        not along: whole for everyone who has a part of w; stays float32
    optimizer/w/ratio     float32 (4,)      not along (its shape is not w's); its dtype was not w's: stays float32

State inside lists, tuples and dicts has keys that say where each value was:

    state["GG"] = [t, []]               GG[0]                   GG[1]=[]        an empty list
    state["expr"] = ("ab,bc", t)        expr(0)="ab,bc"         expr(1)
    state["buffers"] = {"a": t, 2: t}   buffers{"a"}            buffers{2}

What stands behind `=` is in the key itself, which holds `True`: a text, an empty container, or None in a container.
So a checkpoint needs no other record of the structure, and each parameter has its own.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from shardwise.errors import CheckpointError, OptimizerError
from shardwise.plan.names import MASTER, WEIGHT_KEYS, split_state_name, state_name
from shardwise.plan.saved_settings import (
    PYTHON_DTYPES,
    NamedOptimizer,
    OptimizerGroup,
    TakeOver,
    plan_take_over,
    shared_to_json,
    stored_names,
    stored_ties,
)
from shardwise.space import Piece

_OPENING: dict[Any, str] = {list: "[", tuple: "(", dict: "{"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MADE = {"[": list, "(": tuple}
_EMPTY: dict[str, Any] = {"[]": list, "()": tuple, "{}": dict}
_SPECIAL = str.maketrans({each: f"%{ord(each):02X}" for each in "%[({="})
_KEYS = (str, int, float)
_MOST_DEEP = 16


def flat_state(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """State of one parameter without containers: values by key; keys that are no strings stay as they are."""
    found: dict[Any, Any] = {}
    for key, value in entries.items():
        found.update(flat_value(key, value))
    return found


def flat_once(entries: Mapping[Any, Any], given: set[int]) -> dict[Any, Any]:
    """`flat_state` without values that were given before: an optimizer may give many parameters one tensor of state.

    given: ids of values, to which those of the result come.
    """
    found = {key: value for key, value in flat_state(entries).items() if id(value) not in given}
    given.update(map(id, found.values()))
    return found


def flat_value(key: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """What is under one key: (key, value)."""
    if isinstance(key, str):
        yield from _walk(key.translate(_SPECIAL), value, 0)
    else:
        yield key, value


def _walk(key: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    kind = tuple if type(value).__name__ == "Size" else type(value)
    opening = _OPENING.get(kind)
    if kind is str or (value is None and depth):
        yield f"{key}={_text(value)}", True
    # What is left as it is, is refused in words by `python_type`.
    elif opening is None or depth == _MOST_DEEP or (kind is dict and any(type(at) not in _KEYS for at in value)):
        yield key, value
    elif not value:
        yield f"{key}={opening}{_CLOSING[opening]}", True
    else:
        for at, each in value.items() if kind is dict else enumerate(value):
            yield from _walk(f"{key}{opening}{_text(at)}{_CLOSING[opening]}", each, depth + 1)


def _text(value: Any) -> str:
    # A slash would divide the name of the parameter from the key.
    return json.dumps(value).replace("/", r"\u002f")


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter with its containers, from what `flat_state` gives.

    Raises CheckpointError for keys that do not fit together.
    """
    found: dict[str, Any] = {}
    for key, value in flat.items():
        steps = list(_steps(key)) if any(mark in key for mark in "[({=%") else [("", key)]
        held: Any = found
        for (mark, place), (following, inside) in zip(steps, [*steps[1:], ("", value)], strict=True):
            if mark == "=":
                break
            inner = inside if following in ("", "=") else _Container(following)
            old = held.setdefault(place, inner)
            if old is not inner and getattr(old, "opening", "") != getattr(inner, "opening", None):
                raise CheckpointError(f"the optimizer's state {key!r} does not fit the other keys of its parameter")
            held = old
    return {key: _made(key, value) for key, value in found.items()}


class _Container(dict[Any, Any]):
    """A list, tuple or dict that is not complete yet."""

    def __init__(self, opening: str) -> None:
        super().__init__()
        self.opening = opening


def _made(key: str, value: Any) -> Any:
    if not isinstance(value, _Container):
        return value
    items = {at: _made(key, each) for at, each in value.items()}
    if value.opening == "{":
        return items
    if set(items) != set(range(len(items))):
        raise CheckpointError(f"the optimizer's state {key!r} has the items {sorted(items)}; some are missing")
    return _MADE[value.opening](items[at] for at in range(len(items)))


def _steps(key: str) -> Iterator[tuple[str, Any]]:
    """The way to a value: its key, then the kind of each container and the place in it, or `=` and the value."""
    at = min((found for mark in "[({=" if (found := key.find(mark)) >= 0), default=len(key))
    yield "", unquote(key[:at])
    try:
        while at < len(key):
            mark = key[at]
            if mark == "=":
                text = key[at + 1 :]
                yield "=", _EMPTY[text]() if text in _EMPTY else json.loads(text)
                return
            place, end = json.JSONDecoder().raw_decode(key, at + 1)
            if key[end] != _CLOSING[mark] or type(place) not in (_KEYS if mark == "{" else (int,)):
                raise ValueError(key)
            yield mark, place
            at = end + 1
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"the optimizer's state has the key {key!r:.100}, which no save of this library writes"
        ) from error


# Shapes decide what is cut along with a parameter. A scalar parameter has the shape of its `step`, which would look
# like a moment.
NEVER_ALONG = frozenset({"step"})
"""Keys that count updates: one number, though a parameter may have one element."""


def values_of(
    kind: str, state: Mapping[Any, Mapping[Any, Any]], name_of: Mapping[Any, str]
) -> Iterator[tuple[str, str, Any]]:
    """The state of a live optimizer as (name of the parameter, key, value), without containers: see `nested_state`.

    Raises OptimizerError for state of an object that `name_of` does not have, and for keys that fit into no name.
    """
    for parameter, entries in state.items():
        if (name := name_of.get(parameter)) is None:
            if not hasattr(parameter, "shape"):  # for all parameters: `shared_to_json`
                continue
            raise OptimizerError(
                f"{kind} has state for a parameter of shape {list(parameter.shape)}, which it did not get at first; a "
                "checkpoint names state by the model's parameters"
            )
        for key, value in entries.items():
            # A slash would make the name ambiguous (see `split_state_name`), and masters have their names already.
            if not isinstance(key, str) or "/" in key or key in WEIGHT_KEYS:
                raise OptimizerError(
                    f"the optimizer's state of {name!r} has the key {key!r}. A checkpoint names it "
                    f"optimizer/{name}/<key>: give keys that are strings without / and not "
                    + " or ".join(map(repr, sorted(WEIGHT_KEYS)))
                )
            for path, each in flat_value(key, value):
                yield name, path, each


def named_optimizer(
    optimizer: Any,
    parameters: Sequence[tuple[str, ...]],
    *,
    made: frozenset[str] = frozenset(),
    values: Iterable[tuple[str, str, Any]] = (),
) -> NamedOptimizer:
    """A live optimizer as a checkpoint sees it.

    parameters: for each group the names of those that it trains. made: settings that its steps put into groups. values:
    its state as (name of the parameter, key, value).
    """
    # Numbers and None are no tensors: a checkpoint keeps which they were, so that a load gives back a float where a
    # float was.
    python = [each for each in values if not hasattr(each[2], "new_tensor")]
    kind = type(optimizer).__name__
    groups = zip(parameters, optimizer.param_groups, strict=True)
    return NamedOptimizer(
        kind=kind,
        groups=tuple(OptimizerGroup(parameters=names, settings=group) for names, group in groups),
        plain=python_types(each for each in python if each[2] is not None),
        none=frozenset(key for _, key, value in python if value is None),
        made=made,
        shared=shared_to_json(kind, optimizer.state),
    )


def can_be_kept(value: object) -> bool:
    """Whether a value is one of Python that a tensor can hold."""
    # By the type's name: a bool is an int for isinstance, and comes back as what it was.
    return type(value).__name__ in PYTHON_DTYPES and not (type(value) is int and not -(1 << 63) <= value < 1 << 63)


def python_type(parameter: str, key: str, value: object) -> str:
    """The name of the type of a Python value in an optimizer's state; raises OptimizerError unless it can be kept."""
    name = type(value).__name__
    if not can_be_kept(value):
        raise OptimizerError(
            f"the optimizer's state {key!r} of {parameter!r} is {value!r:.80} ({name}); a checkpoint keeps "
            "tensors, bool, int64, float, str, None, and lists, tuples and dicts of them"
        )
    return name


def python_types(values: Iterable[tuple[str, str, Any]]) -> dict[str, str]:
    """For each key the name of the type of its values, which are Python's: (name of the parameter, key, value).

    Raises OptimizerError where parameters have values of several types.
    """
    types: dict[str, str] = {}
    for parameter, key, value in values:
        name = python_type(parameter, key, value)
        if types.setdefault(key, name) != name:
            raise OptimizerError(
                f"the optimizer's state {key!r} is of type {name} for {parameter!r}, and of type {types[key]} for "
                "others; a checkpoint keeps one type for a key"
            )
    return types


def has_updated(state: Mapping[str, Any]) -> bool:
    """Whether a parameter with this state was updated."""
    # State is not enough: Adagrad before torch 2.12 makes it in its constructor, with step 0. Others note there which
    # parameters they update in which way.
    step = state.get("step")
    return any(type(each) not in (bool, str) for each in state.values()) and (step is None or bool(step != 0))


def has_own_form(optimizer: object) -> bool:
    """Whether the class of an optimizer reads files in its own way, as those of bitsandbytes do."""
    owner = next(each for each in type(optimizer).__mro__ if "load_state_dict" in vars(each))
    return owner.__module__ != "torch.optim.optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveParameter:
    """A parameter that an optimizer trains here."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The dtype in which the optimizer updates it."""
    has_state: bool
    """Whether it was updated already: whether its optimizer has state that would be lost."""
    whole_keys: frozenset[str] = NEVER_ALONG
    """Keys of state that is not cut along with the parameter, whatever its shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedParameter:
    """A parameter at its place in a group of a live optimizer, where torch counts it."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    """False: it is frozen at present."""


def can_be_of(state: Collection[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this shape can have state of these shapes."""
    # Factored state (Adafactor) has the sizes of some dims, and no more elements than the parameter.
    return shape in state or all(
        each == tuple(1 if size == 1 else full for size, full in zip(each, shape, strict=True))
        if len(each) == len(shape)
        else len(each) < len(shape) and {*each} <= {*shape, 1}
        for each in state
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerEntry:
    """An entry of optimizer state that a live parameter takes over."""

    key: str
    whole: Piece
    """All of it, under the live parameter's name and in the dtype that it is to have here."""
    along: bool
    """Whether it has a number for each element of the parameter, and is cut like it."""
    python: str | None
    """The name of the type, where the optimizer holds it as a Python value."""

    def on_host(self, group: Mapping[str, Any]) -> bool:
        """Whether torch keeps it in the host's memory, given the settings of its group."""
        return self.python is not None or (self.key == "step" and not (group.get("capturable") or group.get("fused")))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRestoration:
    """What live optimizers take over from a checkpoint."""

    over: TakeOver
    entries: Mapping[str, tuple[OptimizerEntry, ...]]
    """For each live parameter its state; nothing for one that has none in the checkpoint, or none that fits."""
    replaces_state: bool
    """Whether these entries are all the state there is afterwards; else the live state stays as it is."""
    findings: tuple[str, ...]
    """What does not fit."""

    def replaces_state_of(self, name: str) -> bool:
        """Whether its entries are all the state that a live parameter has afterwards; else its state stays as it is."""
        return self.replaces_state and name not in self.over.added

    @property
    def is_of_a_file(self) -> bool:
        """Whether some state has the form of `state_dict()`, which a few optimizers turn into another one."""
        return any(not self.over.source[name][1].kind for name in self.entries if name in self.over.source)

    def state_of(self, name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a live parameter, from the tensors of its entries; Python values as such, None where it was."""
        known = self.over.source.get(name)
        state: dict[str, Any] = dict.fromkeys(known[1].none if known is not None and tensors else ())
        flat: dict[str, Any] = {}
        for entry in self.entries.get(name, ()):
            tensor = tensors[entry.key]
            flat[entry.key] = tensor if entry.python is None else tensor.item()
        return state | nested_state(flat)


def plan_optimizers(
    live: Sequence[NamedOptimizer],
    parameters: Sequence[LiveParameter],
    ties: Mapping[str, str],
    *,
    stored: Mapping[str, Piece],
    settings: Mapping[str, Any],
) -> OptimizerRestoration:
    """Find what a checkpoint has for live optimizers.

    parameters: those whose state is held here, which may be some of those in the groups. ties: other names of live
    parameters, alias -> name. stored: every tensor of the checkpoint as one piece. Raises CheckpointError for settings
    that are not understood.
    """
    # Under the names of the save, which may call a tied parameter otherwise than the live model does.
    over = plan_take_over(live, ties, settings)
    by_parameter = _entries_by_parameter(stored)
    then = stored_names([each.name for each in parameters], ties, by_parameter, stored_ties(settings))
    entries = {
        each.name: tuple(_entries(each, by_parameter[then[each.name]], _held(stored, then[each.name]), over))
        for each in parameters
        # State of another kind of optimizer is left; where nothing says which optimizer it was, shapes must do.
        if each.name in then and (each.name in over.source or not over.has_groups)
    }
    findings = list(over.findings)
    # Plain weights into an optimizer that has updated: its moments would go on from the values that are overwritten.
    knows_optimizers = over.has_groups or bool(by_parameter)
    if not knows_optimizers and any(each.has_state for each in parameters):
        findings.append(
            "the checkpoint has no optimizer state, and the optimizer has updated already; load before the first "
            "update, or keep its state"
        )
    return OptimizerRestoration(
        over=over,
        entries={name: each for name, each in entries.items() if each},
        replaces_state=knows_optimizers,
        findings=tuple(findings),
    )


def names_without_elements(
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, str],
    *,
    stored: Mapping[str, Piece],
    settings: Mapping[str, Any],
) -> frozenset[str]:
    """Names of live tensors without elements that a checkpoint has in the same shape, and its names of all they have.

    There is nothing to read for them, and their dtype does not matter.
    """
    empty = [name for name, shape in shapes.items() if 0 in shape]
    then = stored_names(empty, ties, stored, stored_ties(settings))
    there = {name: then[name] for name in empty if name in then and stored[then[name]].global_shape == shapes[name]}
    if not there:
        return frozenset()
    by_parameter = _entries_by_parameter(stored)
    entries = {piece.name for name in there.values() for piece in by_parameter.get(name, {}).values()}
    return frozenset({*there, *there.values(), *entries})


def _entries_by_parameter(stored: Mapping[str, Piece]) -> dict[str, dict[str, Piece]]:
    """For each parameter, by its name in the checkpoint, its state by key; masters and averages are no state."""
    found: dict[str, dict[str, Piece]] = {}
    for name, piece in stored.items():
        split = split_state_name(name)
        if split is not None and split[1] not in WEIGHT_KEYS:
            found.setdefault(split[0], {})[split[1]] = piece
    return found


def _held(stored: Mapping[str, Piece], then: str) -> Piece | None:
    """A parameter of the checkpoint as its optimizer had it."""
    return stored.get(state_name(then, MASTER)) or stored.get(then)


def _entries(
    live: LiveParameter, found: Mapping[str, Piece], held: Piece | None, over: TakeOver
) -> Iterator[OptimizerEntry]:
    if held is not None and held.global_shape != live.shape:
        return  # whoever loads refuses the parameter itself
    plain = over.source[live.name][1].plain if live.name in over.source else {}
    for key, piece in found.items():
        python = plain.get(key)
        # "plain" holds for a key and all parameters. A tensor of another shape or dtype under this key was a tensor.
        if piece.global_shape or PYTHON_DTYPES.get(python or "") != piece.dtype:
            python = None
        along = python is None and piece.global_shape == live.shape and key not in live.whole_keys
        # Optimizers make moments in the parameter's dtype (zeros_like) and need them in the dtype that it has now. A
        # scalar of that dtype by chance (`step` is float32) was not made so, and stays.
        follows = held is not None and piece.dtype == held.dtype and (along or bool(piece.global_shape))
        whole = Piece(
            name=state_name(live.name, key),
            dtype=live.dtype if follows else piece.dtype,
            global_shape=piece.global_shape,
        )
        yield OptimizerEntry(key=key, whole=whole, along=along, python=python)
