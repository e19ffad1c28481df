"""Values inside tuples, lists, dicts and dataclasses: what modules and operations take and give."""

import copy
import dataclasses
import enum
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the tensor with this number, in the order of the walk."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectSlot:
    """Stands for the object with this number: what is no tensor, no container and no plain value (a cache, say)."""

    number: int


_PLAIN = (
    *(int, float, complex, str, bytes, type(None), type, enum.Enum, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def transform(value: Any, fn: Callable[[Any], Any]) -> Any:
    """`value` with `fn` applied to everything that is no container; the same object where nothing changed.

    Containers are tuples (named ones too), lists, dicts and other mutable mappings, and dataclasses.
    """
    kind = type(value)
    if kind is Slot or kind is ObjectSlot or isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        items = [transform(each, fn) for each in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, MutableMapping):
        changed = {key: new for key, old in value.items() if (new := transform(old, fn)) is not old}
        if not changed:
            return value
        filled = copy.copy(value)
        for key, new in changed.items():
            filled[key] = new
        return filled
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _transform_dataclass(value, fn)
    return fn(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in the order of the walk."""
    found: list[torch.Tensor] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    transform(value, note)
    return found


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is a value that tells all about itself."""
    return isinstance(leaf, _PLAIN)


def token_of(leaf: Any) -> Hashable:
    """What a leaf that is no tensor means to the shapes that come out of a call."""
    if isinstance(leaf, slice):
        return (slice, token_of(leaf.start), token_of(leaf.stop), token_of(leaf.step))
    if is_plain(leaf):
        return (type(leaf), leaf)
    if callable(leaf):
        return (type(leaf), id(leaf))
    return (type(leaf),)


def _transform_dataclass(value: Any, fn: Callable[[Any], Any]) -> Any:
    changed = {}
    for spec in dataclasses.fields(value):
        old = getattr(value, spec.name, None)
        if (new := transform(old, fn)) is not old:
            changed[spec.name] = new
    if not changed:
        return value
    filled = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(filled, name, new)  # a frozen one too
    return filled
