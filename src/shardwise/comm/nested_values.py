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


def transform(value: Any, fn: Callable[[Any], Any], *, fresh: bool = False) -> Any:
    """`value` with `fn` applied to everything that is no container; the same object where nothing changed.

    Containers are tuples (named ones too), lists, dicts and other mutable mappings, and dataclasses.
    fresh: a write to a container of the result is no write to one of `value`.
    """
    kind = type(value)
    if kind is TensorSlot or kind is ObjectSlot or isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        items = [transform(each, fn, fresh=fresh) for each in value]
        is_fresh = fresh and isinstance(value, list)
        if not is_fresh and all(new is old for new, old in zip(items, value, strict=True)):
            return value
        # A named tuple may look at its items when it is made (packed sequences do).
        return tuple.__new__(kind, items) if hasattr(value, "_fields") else kind(items)
    if kind is dict:
        made = {key: transform(each, fn, fresh=fresh) for key, each in value.items()}
        # The same object where nothing changed: programs compare what they gave with what they got by `is`.
        return made if fresh or any(map(is_not, made.values(), value.values())) else value
    if not is_container(value):
        return fn(value)
    contents = contents_of(value)
    changed = {key: new for key, old in contents.items() if (new := transform(old, fn, fresh=fresh)) is not old}
    if not changed and not fresh:
        return value
    filled = _copied(value)
    for key, new in changed.items():
        put_into(filled, key, new)
    return filled


def _copied(container: Any) -> Any:
    """A new container with the class and the attributes (of a ModelOutput, say), whose constructor is unknown."""
    # A mapping may keep its items in an attribute, which a shallow copy would share: a dict has them then.
    is_other = isinstance(container, MutableMapping) and not isinstance(container, dict)
    return dict(container) if is_other and not hasattr(type(container), "__copy__") else copy.copy(container)


def containers_in(values: Iterable[Any]) -> list[Any]:
    """The containers that can be written to, the outer before the inner ones."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple):
            found += containers_in(value)
        elif isinstance(value, list | MutableMapping) or _is_dataclass(value):
            found += [value, *containers_in(contents_of(value).values())]
    return found


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


def filled(value: Any, tensors: Sequence[Any], objects: Sequence[Any], *, fresh: bool = False) -> Any:
    """A nested value with tensors and objects in their slots; `fresh`: see `transform`."""

    def put(leaf: Any) -> Any:
        if type(leaf) is TensorSlot:
            return tensors[leaf.number]
        return objects[leaf.number] if type(leaf) is ObjectSlot else leaf

    return transform(value, put, fresh=fresh)


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
    return dataclasses.is_dataclass(value) and not isinstance(value, type | TensorSlot | ObjectSlot)


_PLAIN = (
    *(int, float, complex, str, bytes, type(None), type, enum.Enum, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a value that tells all about itself."""
    return isinstance(leaf, _PLAIN)
