"""What the owner of a stage announces, as bytes: nested values in JSON, in which nothing can be called.

    None, True, 3, 0.5, "text"             themselves
    (1, Slot(number=0))                    ["tuple", [1, ["slot", 0]]]
    a ModelOutput, dataclass, named tuple  ["mapping", [module, name], items, attributes]

Every rank runs the same program, so a class that one has made an object of is imported on all. The receiver looks it up
among what it has imported, and fills an empty object: neither constructors nor setters are called.
"""

import json
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import MemberDescriptorType
from typing import Any

import torch

from shardwise.engine.pipeline.nested import ObjectSlot, Opaque, TensorSlot
from shardwise.errors import MismatchError, ModelError, in_words

_LARGEST_NUMBER = 1 << 63

_OF_TORCH: Mapping[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}

_FACTORIES = (list, dict, set, tuple, int, float, str, bool)
"""What a defaultdict may have for missing keys: nothing else is called."""


def packed(value: Any) -> torch.Tensor:
    """A nested value as bytes, for `unpacked` on a rank of the same program.

    Raises ModelError for what is no container, number, text or other plain value.
    """
    return torch.frombuffer(bytearray(json.dumps(_written(value)).encode()), dtype=torch.uint8)


def unpacked(content: torch.Tensor) -> Any:
    """The nested value of which these are the bytes. Raises MismatchError for any other bytes."""
    try:
        return _read(json.loads(content.numpy().tobytes()))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise MismatchError(
            f"an announcement between the stages of a pipeline cannot be read ({in_words(error)}); every "
            "rank has to run the same program, with the same versions of its libraries"
        ) from error


# Writing --------------------------------------------------------------------------------------------------------------


def _written(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, Enum) and value.name in type(value).__members__:
        return ["member", _class(type(value)), value.name]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _LARGEST_NUMBER else ["int", hex(value)]
    if isinstance(value, float | str):
        return float(value) if isinstance(value, float) else str(value)
    if isinstance(value, tuple | list | MutableMapping) or is_dataclass(type(value)):
        return _written_container(value)
    return _written_constant(value)


def _written_constant(value: Any) -> Any:
    for name, kind in _OF_TORCH.items():
        if isinstance(value, kind):
            return [name, str(value).removeprefix("torch.")]
    match value:
        case complex():
            return ["complex", value.real, value.imag]
        case bytes():
            return ["bytes", value.hex()]
        case slice():
            return ["slice", *map(_written, (value.start, value.stop, value.step))]
        case torch.device():
            return ["device", str(value)]
        case type():
            return ["class", _class(value)]
        case Opaque():
            return ["opaque", value.__class_name__]
    if value is ...:
        return ["ellipsis"]
    raise ModelError(
        f"a placed module gives a {type(value).__name__} inside of a container, which cannot be announced to other "
        "stages; return tensors, numbers and texts in a tuple, list, dict or dataclass"
    )


def _written_container(value: Any) -> Any:
    kind = type(value)
    if kind is TensorSlot or kind is ObjectSlot:
        return ["slot" if kind is TensorSlot else "object", value.number]
    if isinstance(value, tuple | list):
        items = [_written(each) for each in value]
        if kind in (tuple, list):
            return [kind.__name__, items]
        return ["sequence", _class(kind), items, _attributes(value)]
    if kind is dict:
        return ["dict", _pairs(value)]
    if isinstance(value, dict):
        return ["mapping", _class(kind), _pairs(value), _attributes(value)]
    return ["record", _class(kind), _attributes(value)]


def _pairs(mapping: Mapping[Any, Any]) -> list[Any]:
    return [[_written(key), _written(value)] for key, value in mapping.items()]


def _attributes(value: Any) -> list[Any]:
    """What an object has beside the items of its base."""
    held = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):
        held |= {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
    if isinstance(value, defaultdict):
        held["default_factory"] = value.default_factory
    return _pairs(held)


def _class(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]


# Reading --------------------------------------------------------------------------------------------------------------


def _read(written: Any) -> Any:
    """The value that is written as this."""
    if not isinstance(written, list):
        if isinstance(written, dict):
            raise ValueError("an object of JSON")
        return written
    kind, *rest = written
    return _READERS[kind](*rest)


def _imported(written: Any) -> type:
    """A class that this process has already; nothing is imported."""
    module, name = written
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = vars(found)[part]
    if not isinstance(found, type):
        raise TypeError(f"{module}.{name} is no class")
    return found


def _read_pairs(written: Any) -> list[tuple[Any, Any]]:
    return [(_read(key), _read(value)) for key, value in written]


def _read_sequence(written: Any, items: Any, attributes: Any) -> Any:
    kind: Any = _imported(written)
    values = [_read(each) for each in items]
    if issubclass(kind, list):
        made: Any = list.__new__(kind)
        list.extend(made, values)
        return _with_attributes(made, attributes)
    if kind is torch.Size or kind.__module__ == "torch.return_types":
        return kind(values)  # their own constructors only look at the number of items
    return _with_attributes(tuple.__new__(kind, values), attributes)


def _read_mapping(written: Any, items: Any, attributes: Any) -> Any:
    kind: Any = _imported(written)
    base: Any = next((each for each in (OrderedDict, defaultdict, dict) if issubclass(kind, each)), None)
    if base is None:
        raise TypeError(f"{kind.__name__} is no dict")
    made: Any = base.__new__(kind)
    for key, value in _read_pairs(items):
        base.__setitem__(made, key, value)
    return _with_attributes(made, attributes)


def _read_record(written: Any, attributes: Any) -> Any:
    kind = _imported(written)
    if not is_dataclass(kind) and not issubclass(kind, MutableMapping):
        raise TypeError(f"{kind.__name__} is no container")
    return _with_attributes(object.__new__(kind), attributes)


def _with_attributes(made: Any, attributes: Any) -> Any:
    for name, value in _read_pairs(attributes):
        slot = next((vars(each)[name] for each in type(made).__mro__ if name in vars(each)), None)
        if isinstance(made, defaultdict) and name == "default_factory":
            if value is not None and value not in _FACTORIES:
                raise ValueError("a default factory")
            made.default_factory = value
        elif isinstance(slot, MemberDescriptorType):
            slot.__set__(made, value)
        else:
            vars(made)[str(name)] = value
    return made


def _read_member(written: Any, name: str) -> Any:
    kind = _imported(written)
    if not issubclass(kind, Enum):
        raise TypeError(f"{kind.__name__} is no enumeration")
    return kind.__members__[name]


def _read_of_torch(kind: str) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        found = vars(torch)[name]
        if not isinstance(found, _OF_TORCH[kind]):
            raise TypeError(f"torch.{name} is no {kind}")
        return found

    return read


_READERS: Mapping[str, Callable[..., Any]] = {
    "tuple": lambda items: tuple(_read(each) for each in items),
    "list": lambda items: [_read(each) for each in items],
    "dict": lambda items: dict(_read_pairs(items)),
    "sequence": _read_sequence,
    "mapping": _read_mapping,
    "record": _read_record,
    "slot": lambda number: TensorSlot(int(number)),
    "object": lambda number: ObjectSlot(int(number)),
    "opaque": lambda name: Opaque(str(name)),
    "member": _read_member,
    "class": _imported,
    "int": lambda digits: int(digits, 16),
    "complex": complex,
    "bytes": bytes.fromhex,
    "slice": lambda *ends: slice(*map(_read, ends)),
    "device": lambda name: torch.device(name),
    "ellipsis": lambda: ...,
    **{kind: _read_of_torch(kind) for kind in _OF_TORCH},
}
