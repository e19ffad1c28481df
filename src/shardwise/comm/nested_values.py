"""Values inside tuples, lists, dicts and dataclasses: batches, and the arguments and results of modules and operations.

`transform` is the one walk over them. Tensors and objects may be taken out, with numbered slots in their place.

    {"x": t, "more": (u, 3)}     leaves, by name     x: t    more.0: u    more.1: 3
"""

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from operator import is_not
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stands for the tensor with this number, in the order of the walk."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectSlot:
    """Stands for the object with this number: no tensor, no container and no plain value (a cache, say)."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class ContainerSlot:
    """Stands for the container with this number among those that a walk has come by (`SeenContainers`)."""

    number: int


class SeenContainers:
    """The containers of walks that can be written to, and what they gave: one that comes again gives the same.

    They are numbered in the order in which the walks leave them.
    """

    def __init__(self, known: Iterable[Any] = (), *, gives_slots: bool = False) -> None:
        """known: containers that come before all others, and give themselves. gives_slots: a container that comes again
        gives a slot."""
        self.made: list[Any] = []
        self._gives_slots = gives_slots
        self._numbers: dict[int, tuple[int, Any]] = {}
        """By id, with the container itself: while it is kept alive, no other one can get its id."""
        for each in known:
            self.note(each, each)

    def note(self, container: Any, made: Any) -> None:
        """A walk leaves a container, which gave this."""
        self._numbers[id(container)] = len(self.made), container
        self.made.append(made)

    def again(self, container: Any) -> Any:
        """What a container gives that has been seen; None for any other."""
        if (found := self._numbers.get(id(container))) is None:
            return None
        return ContainerSlot(found[0]) if self._gives_slots else self.made[found[0]]


def transform(value: Any, fn: Callable[[Any], Any], *, fresh: bool = False, seen: SeenContainers | None = None) -> Any:
    """`value` with `fn` applied to everything that is no container; the same object where nothing changed.

    Containers are tuples (named ones too), lists, dicts and other mutable mappings, and dataclasses.
    fresh: a write to a container of the result is no write to one of `value`.
    seen: containers that were transformed before. None: one that is in several places gives one for each.
    """
    kind = type(value)
    if kind in _SLOTS or isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple):
        items = [transform(each, fn, fresh=fresh, seen=seen) for each in value]
        return rebuilt(value, items) if any(map(is_not, items, value)) else value
    if not is_container(value):
        return fn(value)
    if seen is not None and (again := seen.again(value)) is not None:
        return again
    contents = contents_of(value)
    items = [transform(each, fn, fresh=fresh, seen=seen) for each in contents.values()]
    # The same object where nothing changed: programs compare what they gave with what they got by `is`.
    made = rebuilt(value, items) if fresh or any(map(is_not, items, contents.values())) else value
    if seen is not None:
        seen.note(value, made)
    return made


def rebuilt(container: Any, items: Sequence[Any]) -> Any:
    """A new container of the same class and keys, with these items in the order of `contents_of`."""
    kind = type(container)
    if isinstance(container, tuple | list):
        # A named tuple may look at its items when it is made (packed sequences do).
        return tuple.__new__(kind, items) if hasattr(container, "_fields") else kind(items)
    contents = contents_of(container)
    if kind is dict:
        return dict(zip(contents, items, strict=True))
    made = _copied(container)
    for (key, old), new in zip(contents.items(), items, strict=True):
        if new is not old:
            put_into(made, key, new)
    return made


def _copied(container: Any) -> Any:
    """A new container with the class and the attributes (of a ModelOutput, say), whose constructor is unknown."""
    # A mapping may keep its items in an attribute, which a shallow copy would share: a dict has them then.
    is_other = isinstance(container, MutableMapping) and not isinstance(container, dict)
    return dict(container) if is_other and not hasattr(type(container), "__copy__") else copy.copy(container)


def is_container(value: Any) -> bool:
    """Whether `transform` looks into it."""
    return isinstance(value, tuple | list | MutableMapping) or _is_dataclass(value)


def field_names(value: Any) -> Sequence[str]:
    """The names of the fields of a dataclass or a named tuple; none for any other value."""
    if _is_dataclass(value):
        return [spec.name for spec in dataclasses.fields(value)]
    names: Sequence[str] = getattr(value, "_fields", ()) if isinstance(value, tuple) else ()
    return names


def contents_of(container: Any) -> dict[Any, Any]:
    """The contents of a container, by position, key or field."""
    if isinstance(container, tuple | list):
        return dict(enumerate(container))
    if isinstance(container, MutableMapping):
        return dict(container.items())  # as the class gives them
    return {spec.name: getattr(container, spec.name, None) for spec in dataclasses.fields(container)}


def named_leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Everything that is no container, in the order of the walk, with the keys that lead there: "inputs.0"."""
    # Tensors first, which most values are: what else it may be takes longer to find out.
    if type(value) is not dict and (isinstance(value, torch.Tensor) or not is_container(value)):
        return [(name, value)]
    found: list[tuple[str, Any]] = []
    for key, each in (value if type(value) is dict else contents_of(value)).items():
        inner = f"{name}.{key}" if name else str(key)
        if isinstance(each, torch.Tensor):
            found.append((inner, each))
        else:
            found += named_leaves(each, inner)
    return found


def put_into(container: Any, key: Any, value: Any) -> None:
    """Write the item that `contents_of` gives under `key`, or add it."""
    if isinstance(container, list):
        container[key : key + 1] = [value]
    elif isinstance(container, MutableMapping):
        container[key] = value
    else:
        object.__setattr__(container, key, value)  # a frozen one too


def filled(
    value: Any,
    tensors: Sequence[Any],
    objects: Sequence[Any],
    *,
    fresh: bool = False,
    seen: SeenContainers | None = None,
) -> Any:
    """A nested value with tensors, objects and containers in their slots; `fresh` and `seen`: see `transform`."""

    def put(leaf: Any) -> Any:
        if type(leaf) is TensorSlot:
            return tensors[leaf.number]
        if type(leaf) is ContainerSlot and seen is not None:
            return seen.made[leaf.number]
        return objects[leaf.number] if type(leaf) is ObjectSlot else leaf

    return transform(value, put, fresh=fresh, seen=seen)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in the order of the walk."""
    found: list[torch.Tensor] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    transform(value, note)
    return found


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value) not in _SLOTS


_SLOTS = frozenset({TensorSlot, ObjectSlot, ContainerSlot})
_PLAIN = (
    *(int, float, complex, str, bytes, type(None), type, enum.Enum, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a value that tells all about itself."""
    return isinstance(leaf, _PLAIN)
