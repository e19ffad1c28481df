"""State of torch's optimizers under the names of parameters, where a file proves which number is which parameter.

    model       w (4, 3)   b (4,)   count (4,)          in the order of its state dict
    optimizer   group 0: number 0     exp_avg (4, 3)    group 1: number 1     exp_avg (4,)
    ->          0 is w; 1 is b or count, so nothing is proven, unless a group names its parameters

`optimizer.state_dict()` numbers the parameters in the order of the groups, and each group has them in the order of the
model. If shapes leave one way only to place all numbers in this order, that way is taken. Otherwise state keeps its
numbers. Names in the file go before numbers: of `named_parameters` in the groups, or of FSDP in the place of numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.foreign.strided import TensorPlace
from shardwise.plan.names import MASTER
from shardwise.plan.saved_settings import settings_to_json

__all__ = ["NumberedOptimizer", "Parameters", "is_optimizer", "named_parameters"]

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
    groups: Sequence[Mapping[str, Any]]
    names: dict[Any, str] = field(default_factory=dict)
    """The parameter of each number; empty where nothing proves it."""
    reason: str = ""
    """Why nothing does."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "NumberedOptimizer":
        """Of what `is_optimizer`."""
        return cls(state=value["state"], groups=value["param_groups"])

    def numbers(self) -> list[list[Any]]:
        """The numbers of each group; names, where the file has names in their place."""
        return [list(group["params"]) for group in self.groups]

    def settings(self) -> dict[str, Any]:
        """As `NumberedOptimizer.to_json`, with names for numbers. The file does not say the class: "kind" is empty."""
        # Without state a parameter was never updated: it was frozen, if others have some.
        held = [[each for each in group if each in self.state or not self.state] for group in self.numbers()]
        groups = [
            {"parameters": [self.names[each] for each in numbers], "settings": settings_to_json(group)}
            for numbers, group in zip(held, self.groups, strict=True)
        ]
        none = {str(key): True for state in self.state.values() for key, value in state.items() if value is None}
        return {"kind": "", "groups": groups, "plain": {}, "none": none}

    def entries(self) -> Iterator[tuple[Any, str, TensorPlace]]:
        """Its state: (number, key, tensor)."""
        for number, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, TensorPlace):
                    yield number, str(key), value


def named_parameters(optimizers: Sequence[NumberedOptimizer], parameters: Parameters) -> None:
    """Find the names of the parameters of all optimizers of one model, or the reason why they stay numbers."""
    by_number = []
    for each in optimizers:
        each.reason = _unnameable(each)
        if each.reason:
            continue
        found = _said(each)
        if found is None:
            by_number.append(each)
        elif wrong := _misfit(each, found, parameters):
            each.reason = wrong
        else:
            each.names = found
    if not by_number:
        return
    groups = [(each, group) for each in by_number for group in each.numbers()]
    taken = {name for each in optimizers for name in each.names.values()}
    left = {name: shape for name, shape in parameters.shapes.items() if name not in taken}
    orders = [[_shapes(each, number) for number in group] for each, group in groups]
    placed = _only_way(left, orders) if parameters.ordered else _by_shapes(left, orders)
    for each in by_number:
        if isinstance(placed, str):
            each.reason = placed
    if not isinstance(placed, str):
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
            if isinstance(value, int | float):
                return (
                    f"its {key} of parameter {number} is a Python number, as torch before 1.12 wrote it; load and "
                    "save it once with a newer torch"
                )
            if not isinstance(value, TensorPlace | None):
                return f"its {key} of parameter {number} is neither a tensor nor a number"
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
        shapes = _shapes(optimizer, number)
        if shapes and parameters.shapes[name] not in shapes:
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


def _by_shapes(
    shapes: Mapping[str, tuple[int, ...]], orders: Sequence[Sequence[frozenset[tuple[int, ...]]]]
) -> list[list[str]] | str:
    """The names for each order, if no two could change places; else why not."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        names.setdefault(shape, []).append(name)
    fitting = [
        [[each for shape in sorted(kinds) for each in names.get(shape, ())] for kinds in each] for each in orders
    ]
    placed = [[each[0] for each in order if len(each) == 1] for order in fitting]
    used = [name for order in placed for name in order]
    if len(set(used)) < len(used) or len(used) < sum(map(len, orders)):
        return (
            "safetensors files do not keep the order of the model, and its parameters do not all differ in shape. Save "
            "the model with torch.save (safe_serialization=False), or name the parameters of the optimizer"
        )
    return placed


def _choices(
    place: tuple[int, ...], orders: Sequence[Sequence[frozenset[tuple[int, ...]]]], shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """What may become of a name: -1, no order takes it, or the one that does; and where the orders are after it."""
    yield -1, place
    for choice, (at, order) in enumerate(zip(place, orders, strict=True)):
        if at < len(order) and (not order[at] or shape in order[at]):
            yield choice, (*place[:choice], at + 1, *place[choice + 1 :])
