"""State of torch's optimizers under the names of parameters, where a file proves which number is which parameter.

    model       w (4, 3)   b (4,)   count (4,)          in the order of its state dict
    optimizer   group 0: number 0     exp_avg (4, 3)    group 1: number 1     exp_avg (4,)
    ->          0 is w; 1 is b or count, so nothing is proven, unless a group names its parameters

`optimizer.state_dict()` numbers the parameters in the order in which the program gave them. Names in the file say which
they are: of `named_parameters` in the groups, or of FSDP in the place of numbers. So do shapes that only one parameter
has. Else nothing is proven. Most programs give parameters in the order of the model: if shapes leave one way to place
all numbers so, its names are taken, and the contents say that this is a guess. Otherwise state keeps its numbers. Loads
ask the optimizer of their target, see `numbered_state`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.formats.strided import TensorPlace
from shardwise.errors import OptimizerError
from shardwise.plan.names import MASTER
from shardwise.plan.optimizer_entries import can_be_kept, can_be_of, flat_state, python_types
from shardwise.plan.saved_settings import GUESSED, IDLE, LISTED, NUMBERED, settings_to_json

_MAX_WAYS = 200_000
"""States of the search, over all tensors of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What of a model can be trained, in the order of its state dict."""

    shapes: Mapping[str, tuple[int, ...]]
    """By name; ties once."""
    ordered: bool
    """Whether the order is that of the model. Files of safetensors do not keep it."""

    @classmethod
    def of(cls, tensors: Mapping[str, TensorPlace], *, ordered: bool) -> "Parameters":
        """Of a state dict: its floats, without what torch's layers of running averages say are buffers."""
        buffers = {
            f"{module}.{key}".removeprefix(".")
            for module, _, last in (name.rpartition(".") for name in tensors)
            if last == "num_batches_tracked"
            for key in ("running_mean", "running_var")
        }
        shapes: dict[str, tuple[int, ...]] = {}
        seen = set()
        for name, place in tensors.items():
            tied = place in seen and 0 not in place.shape
            seen.add(place)
            if place.dtype.startswith(("float", "bfloat", "complex")) and not tied and name not in buffers:
                shapes[name] = place.shape
        return cls(shapes=shapes, ordered=ordered)


def is_optimizer(value: object) -> bool:
    """Whether a value is what `state_dict()` of an optimizer gives."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(each, dict) for each in value["state"].values())
        and all(isinstance(each, dict) and isinstance(each.get("params"), list) for each in value["param_groups"])
    )


@dataclass(slots=True, kw_only=True)
class NumberedOptimizer:
    """A `state_dict()` of an optimizer in a file, and what its numbers mean."""

    state: Mapping[Any, Mapping[Any, Any]]
    """Without containers: see `nested_state`."""
    groups: Sequence[Mapping[str, Any]]
    names: dict[Any, str] = field(default_factory=dict)
    """The parameter of each number, proven or guessed; empty where there is no guess."""
    reason: str = ""
    """Why nothing proves these names."""
    is_whole: bool = True
    """Whether all of the state can be kept."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "NumberedOptimizer":
        """Of what `is_optimizer`."""
        state = {number: flat_state(each) for number, each in value["state"].items()}
        return cls(state=state, groups=value["param_groups"])

    def owner(self, number: Any, path: str) -> str:
        """Under which name its state is stored: that of the parameter, else the number after the optimizer's path."""
        return self.names.get(number, f"{path}{number}")

    def note(self, path: str) -> str:
        """In words, what of its state is not proven or not kept; "" where all is."""
        what = f"the state of {path.rstrip('.') or 'the optimizer'}"
        if not self.reason:
            return ""
        if not self.is_whole:
            return f"{what} is incomplete: {self.reason}"
        if self.names:
            return f"{what} is taken to be in the order of the model, which is a guess: {self.reason}"
        return f"{what} keeps the numbers of its parameters (optimizer/{path}0/...): {self.reason}"

    def numbers(self) -> list[list[Any]]:
        """The numbers of each group; names, where the file has names in their place."""
        return [list(group["params"]) for group in self.groups]

    def settings(self) -> dict[str, Any]:
        """As `NumberedOptimizer.to_json`, with names for numbers. The file does not say the class: "kind" is empty."""
        # Without state a parameter was never updated: it was frozen, or had no gradient yet.
        held = [[each for each in group if each in self.state or not self.state] for group in self.numbers()]
        found = self._to_json([[self.names[each] for each in numbers] for numbers in held])
        for group, numbers, trained in zip(found["groups"], self.numbers(), held, strict=True):
            group |= {IDLE: names} if (names := [self.names[each] for each in numbers if each not in trained]) else {}
        return found

    def record(self, path: str) -> dict[str, Any]:
        """As `settings`, of all numbers under the names of their state: what a load needs to find the parameters."""
        owners = [[self.owner(each, path) for each in group] for group in self.numbers()]
        marks = {GUESSED: bool(self.names), LISTED: path.rstrip(".").rpartition(".")[2].isdigit()}
        return {**self._to_json(owners), **marks, "note": self.note(path)}

    def _to_json(self, parameters: Sequence[Sequence[str]]) -> dict[str, Any]:
        groups = [
            {"parameters": list(names), "settings": settings_to_json(group)}
            for names, group in zip(parameters, self.groups, strict=True)
        ]
        none = {str(key): True for state in self.state.values() for key, value in state.items() if value is None}
        plain = python_types(each for each in self.entries() if not isinstance(each[2], TensorPlace))
        return {"kind": "", "groups": groups, "plain": plain, "none": none}

    def entries(self) -> Iterator[tuple[Any, str, Any]]:
        """Its state: (number, key, tensor or Python number)."""
        for number, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, TensorPlace) or can_be_kept(value):
                    yield number, str(key), value


def numbered_settings(optimizers: Iterable[tuple[str, NumberedOptimizer]]) -> dict[str, Any]:
    """What settings say of optimizers whose names are not proven; (path, optimizer)."""
    records = [each.record(path) for path, each in optimizers if each.reason and each.is_whole]
    return {NUMBERED: records} if records else {}


def named_parameters(optimizers: Sequence[NumberedOptimizer], parameters: Parameters) -> None:
    """Find the names of the parameters of all optimizers of one model, and the reason why they are a guess, or none."""
    by_number = []
    for each in optimizers:
        each.reason = _unnameable(each)
        each.is_whole = not each.reason
        if each.reason:
            continue
        found = _said(each)
        if found is None:
            by_number.append(each)
        elif wrong := _misfit(each, found, parameters):
            each.reason = wrong
            # Where names stand in the place of numbers, there is no order that a target could share.
            each.is_whole = not any(isinstance(number, str) for group in each.numbers() for number in group)
        else:
            each.names = found
    if not by_number:
        return
    groups = [(each, group) for each in by_number for group in each.numbers()]
    taken = {name for each in optimizers for name in each.names.values()}
    left = {name: shape for name, shape in parameters.shapes.items() if name not in taken}
    orders = [[_shapes(each, number) for number in group] for each, group in groups]
    placed = _by_shapes(left, orders)
    reason = "" if placed is not None else _UNORDERED
    if placed is None and parameters.ordered:
        way = _only_way(left, orders)
        placed, reason = (None, way) if isinstance(way, str) else (way, _UNPROVEN)
    for each in by_number:
        # Parameters of one group without state are all alike.
        each.reason = "" if placed is not None and not each.state and len(each.groups) == 1 else reason
    if placed is not None:
        for (each, group), names in zip(groups, placed, strict=True):
            each.names |= dict(zip(group, names, strict=True))


def _unnameable(optimizer: NumberedOptimizer) -> str:
    """Why its state can have no names; "" where it can."""
    numbers = [number for group in optimizer.numbers() for number in group]
    if not all(isinstance(each, int | str) for each in numbers) or len(set(numbers)) < len(numbers):
        return "its groups do not count their parameters once each"
    if not optimizer.state.keys() <= set(numbers):
        return "it has state of parameters that are in no group"
    for number, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(key, str) or "/" in key or key == MASTER:
                return f"its state of parameter {number} has a key that fits into no name"
            if not (isinstance(value, TensorPlace | None) or can_be_kept(value)):
                return f"its {key} of parameter {number} is neither a tensor nor a number of 64 bits"
    try:
        python_types(each for each in optimizer.entries() if not isinstance(each[2], TensorPlace))
    except OptimizerError as error:
        return str(error)
    return ""


def _said(optimizer: NumberedOptimizer) -> dict[Any, str] | None:
    """The names that the file says; None where it has numbers only."""
    names: dict[Any, str] = {}
    for group in optimizer.groups:
        given = group.get("param_names", group["params"])
        if not isinstance(given, list) or len(given) != len(group["params"]):
            return None
        names |= dict(zip(group["params"], given, strict=True))
    return names if all(isinstance(each, str) for each in names.values()) else None


def _misfit(optimizer: NumberedOptimizer, names: Mapping[Any, str], parameters: Parameters) -> str:
    """What names in the file do not fit; "" where all do."""
    if len(set(names.values())) < len(names):
        return "it names a parameter twice"
    for number, name in names.items():
        if name not in parameters.shapes:
            return f"it names {name!r}, which is not in the model of the file"
        if not can_be_of(_shapes(optimizer, number), parameters.shapes[name]):
            return f"its state of {name!r} has none of that parameter's shape"
    return ""


def _shapes(optimizer: NumberedOptimizer, number: Any) -> frozenset[tuple[int, ...]]:
    """The shapes of its state of a parameter: one is the parameter's. Empty where it has none."""
    state = optimizer.state.get(number, {})
    return frozenset(value.shape for key, value in state.items() if isinstance(value, TensorPlace) and key != "step")


def _only_way(
    shapes: Mapping[str, tuple[int, ...]], orders: Sequence[Sequence[frozenset[tuple[int, ...]]]]
) -> list[list[str]] | str:
    """The names for each order, if there is one way only to place all orders in that of the names; else why not."""
    names = list(shapes)
    lengths = tuple(map(len, orders))
    total = sum(lengths)
    if total > len(names):
        return f"it has {total} parameters, and the model of the file has {len(names)} tensors that could be trained"
    # For each name, where the orders may be after it: how many ways lead there (2: several), and the order that took
    # the name on one of them.
    steps: list[dict[tuple[int, ...], tuple[int, int]]] = []
    at: dict[tuple[int, ...], tuple[int, int]] = {(0,) * len(orders): (1, -1)}
    num_states = 0
    for number, shape in enumerate(shapes.values()):
        following: dict[tuple[int, ...], tuple[int, int]] = {}
        for place, (ways, _) in at.items():
            for choice, after in _choices(place, orders, shape):
                # As many names must be left as there are parameters.
                if total - sum(after) <= len(names) - number - 1:
                    before = following.get(after, (0, choice))
                    following[after] = min(2, before[0] + ways), choice
        num_states += len(following)
        if num_states > _MAX_WAYS:
            return "there are too many ways to place its parameters in the order of the model"
        steps.append(following)
        at = following
    ways = at.get(lengths, (0, 0))[0]
    if ways != 1:
        how = "its shapes fit the model of the file in several ways" if ways else "its shapes do not fit that model"
        return f"{how}; a file that names the parameters has named_parameters() given to the optimizer"
    placed: list[list[str]] = [[] for _ in orders]
    place = lengths
    # Only one way leads to the end, so that each step on it has the one choice that was noted.
    for name, step in zip(reversed(names), reversed(steps), strict=True):
        choice = step[place][1]
        if choice >= 0:
            placed[choice].append(name)
            place = tuple(each - (at == choice) for at, each in enumerate(place))
    return [names[::-1] for names in placed]


_UNORDERED = (
    "safetensors files do not keep the order of the model, and its parameters do not all differ in shape. Name the "
    "parameters of the optimizer (named_parameters())"
)
_UNPROVEN = (
    "the file numbers the parameters in the order in which the optimizer got them, and does not say which that was. A "
    "file that names them has named_parameters() given to the optimizer"
)


def _by_shapes(
    shapes: Mapping[str, tuple[int, ...]], orders: Sequence[Sequence[frozenset[tuple[int, ...]]]]
) -> list[list[str]] | None:
    """The names for each order, if no two could change places; else None."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        names.setdefault(shape, []).append(name)
    kinds = {kind for order in orders for kind in order}
    fits = {kind: [each for shape, held in names.items() if can_be_of(kind, shape) for each in held] for kind in kinds}
    fitting = [[fits[kind] for kind in order] for order in orders]
    placed = [[each[0] for each in order if len(each) == 1] for order in fitting]
    used = [name for order in placed for name in order]
    return None if len(set(used)) < len(used) or len(used) < sum(map(len, orders)) else placed


def _choices(
    place: tuple[int, ...], orders: Sequence[Sequence[frozenset[tuple[int, ...]]]], shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """What may become of a name: -1, no order takes it, or the one that does; and where the orders are after it."""
    yield -1, place
    for choice, (at, order) in enumerate(zip(place, orders, strict=True)):
        if at < len(order) and can_be_of(order[at], shape):
            yield choice, (*place[:choice], at + 1, *place[choice + 1 :])
