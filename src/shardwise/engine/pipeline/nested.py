"""Values inside tuples, lists, dicts and dataclasses: what modules and operations take and give."""

import copy
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from typing import Any

import torch

from shardwise.engine.pipeline.sites import user_site
from shardwise.errors import ModelError


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stands for the tensor with this number, in the order of the walk."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectSlot:
    """Stands for the object with this number: what is no tensor, no container and no plain value (a cache, say)."""

    number: int


class Opaque:
    """Stands, on other ranks, for an object of a class that shardwise cannot look into."""

    def __init__(self, class_name: str) -> None:
        self.__class_name__ = class_name  # under no name that an object of the user has

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # what copying looks for
            raise AttributeError(attribute)
        raise self.__refusal(repr(attribute))

    def __iter__(self) -> Any:
        raise self.__refusal("what is in it")

    def __getitem__(self, key: Any) -> Any:
        raise self.__refusal(f"item {key!r}")

    def __len__(self) -> int:
        raise self.__refusal("the length")

    def __refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{what} of a {self.__class_name__} that a placed module gave is used outside of it ({user_site()}); only "
            "the rank of that module's stage has the object; return its tensors in a tuple, list, dict or dataclass"
        )


_PLAIN = (
    *(int, float, complex, str, bytes, type(None), type, enum.Enum, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

_TOLD = (int, float, complex, str)


def transform(value: Any, fn: Callable[[Any], Any], *, fresh: bool = False) -> Any:
    """`value` with `fn` applied to everything that is no container; the same object where nothing changed.

    Containers are tuples (named ones too), lists, dicts and other mutable mappings, and dataclasses.
    fresh: whoever writes to a container of the result does not write to one of `value`.
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
    if isinstance(value, MutableMapping):
        changed = {key: new for key, old in value.items() if (new := transform(old, fn, fresh=fresh)) is not old}
        if not changed and not fresh:
            return value
        filled = copy.copy(value)
        for key, new in changed.items():
            filled[key] = new
        return filled
    if _is_dataclass(value):
        return _transform_dataclass(value, fn, fresh=fresh)
    return fn(value)


def containers_in(values: Iterable[Any]) -> list[Any]:
    """The containers that can be written to, the outer before the inner ones."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, tuple):
            found += containers_in(value)
        elif isinstance(value, list | MutableMapping) or _is_dataclass(value):
            found += [value, *containers_in(contents_of(value).values())]
    return found


def contents_of(container: Any) -> dict[Any, Any]:
    """What a container holds, by position, key or field."""
    if isinstance(container, list):
        return dict(enumerate(container))
    if isinstance(container, MutableMapping):
        return dict(container)
    return {spec.name: getattr(container, spec.name, None) for spec in dataclasses.fields(container)}


def put_into(container: Any, key: Any, value: Any) -> None:
    """Write what `contents_of` gives under `key`, or add it."""
    if isinstance(container, list):
        container[key : key + 1] = [value]
    elif isinstance(container, MutableMapping):
        container[key] = value
    else:
        object.__setattr__(container, key, value)


def told_in(value: Any) -> list[Any]:
    """The numbers and texts of a nested value, in the order of the walk."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, _TOLD):
            found.append(leaf)
        return leaf

    transform(value, note)
    return found


def with_told(value: Any, told: Iterable[Any]) -> Any:
    """The nested value with other numbers and texts."""
    following = iter(told)
    return transform(value, lambda leaf: next(following) if isinstance(leaf, _TOLD) else leaf)


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


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type | TensorSlot | ObjectSlot)


def _transform_dataclass(value: Any, fn: Callable[[Any], Any], *, fresh: bool) -> Any:
    changed = {}
    for spec in dataclasses.fields(value):
        old = getattr(value, spec.name, None)
        if (new := transform(old, fn, fresh=fresh)) is not old:
            changed[spec.name] = new
    if not changed and not fresh:
        return value
    filled = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(filled, name, new)  # a frozen one too
    return filled
