"""What a placed module does to objects that it is given (a cache of keys and values), as the other ranks learn it.

    rank of the layer's stage                                        another rank
    cache.layers[3].keys     [2, 4, 7, 8] -> [2, 4, 8, 8]            hollow, [2, 4, 7, 8] -> [2, 4, 8, 8]
    cache.layers[3].length   7 -> 8, a number or a small tensor      7 -> 8

A hollow tensor has a shape and no elements. So code between modules asks a cache for its length on any rank. What no
list of places says (an object that came in) the other ranks find out by running the module on fake tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from shardwise.comm.nested_values import is_plain
from shardwise.engine.pipeline.stage_tensor import Spec
from shardwise.engine.torch_private import FakeTensor, version_of

Place: TypeAlias = tuple[tuple[str, Any], ...]
"""The way from the objects: ("attribute", name), ("item", key or position), ..."""

Changes: TypeAlias = list[tuple[Place, Any]]
"""What is in a place now: a plain value, a small tensor, or the description of a tensor."""

_MAX_SMALL = 16
"""Elements of tensors that others get: counts and positions, by which code between modules decides."""


@dataclass(frozen=True, slots=True)
class SmallTensor:
    """A tensor with its elements, for ranks that do not run the module."""

    elements: Any
    dtype: torch.dtype
    on_host: bool

    def on(self, device: torch.device) -> torch.Tensor:
        """The tensor, for a rank with this device."""
        return torch.tensor(self.elements, dtype=self.dtype, device="cpu" if self.on_host else device)


class _HeldTensor(NamedTuple):
    """A tensor in its place."""

    tensor: torch.Tensor
    """Kept alive: another one must not get its id."""
    version: int


class ObjectContents:
    """What objects hold, at any depth, as it is now."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._leaves: dict[Place, Any] = {}
        self._seen: dict[int, Any] = {}
        """By id; kept alive: another object must not get it."""
        for at, each in enumerate(objects):
            self._walk((("item", at),), each)

    def _walk(self, place: Place, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._leaves[place] = _HeldTensor(value, version_of(value))
        elif is_plain(value):
            self._leaves[place] = value
        else:
            # By id: another object in the place is a change that no list of places says.
            self._leaves[place] = (type(value).__qualname__, id(value))
            if id(value) not in self._seen and not callable(value):
                self._seen[id(value)] = value
                for step, held in _parts_of(value):
                    self._walk((*place, step), held)

    def changes_since(self, before: "ObjectContents") -> Changes | None:
        """What differs; None where it is more than tensors and plain values in their places."""
        found: Changes = []
        if not before._leaves.keys() <= self._leaves.keys():
            return None
        for place, value in self._leaves.items():
            old = before._leaves.get(place)
            if isinstance(value, _HeldTensor):
                if not isinstance(old, _HeldTensor) or value.tensor is not old.tensor or value.version != old.version:
                    found.append((place, _described(value.tensor)))
            elif place not in before._leaves or type(value) is not type(old) or value != old:
                if not is_plain(value):
                    return None
                found.append((place, value))
        return found


def _described(tensor: torch.Tensor) -> SmallTensor | Spec:
    if tensor.numel() > _MAX_SMALL or isinstance(tensor, FakeTensor):
        return Spec.of(tensor)
    return SmallTensor(tensor.tolist(), tensor.dtype, tensor.device.type == "cpu")


def _parts_of(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, Mapping):
        yield from ((("item", key), held) for key, held in value.items() if is_plain(key))
    elif isinstance(value, list | tuple):
        yield from ((("item", at), held) for at, held in enumerate(value))
    else:
        yield from ((("attribute", name), held) for name, held in getattr(value, "__dict__", {}).items())


def put_changes(
    objects: Sequence[Any], changes: Changes, hollow: Callable[[Spec], torch.Tensor], device: torch.device
) -> bool:
    """Put into the objects what another rank has there; whether all places were found."""
    try:
        for place, value in changes:
            *way, (kind, key) = place
            holder: Any = objects
            for step, at in way:
                holder = holder[at] if step == "item" else vars(holder)[at]
            if isinstance(value, Spec):
                value = hollow(value)
            elif isinstance(value, SmallTensor):
                value = value.on(device)
            elif isinstance(value, torch.device) and value.type == device.type:
                value = device
            if kind == "attribute":
                vars(holder)[key] = value
            else:
                holder[key] = value
    except (LookupError, TypeError):  # these objects are not those that the other rank has
        return False
    return True
