"""What stages of a pipeline tell each other of nested values, and where in the program these are.

`packed` and `unpacked` write them as bytes, for what only the owner of a stage can announce: JSON, in which nothing can
be called. `user_site` names the line of the program for the errors about them.

    None, True, 3, 0.5, "text"             themselves
    (1, TensorSlot(number=0))              ["tuple", [1, ["slot", 0]]]
    a ModelOutput, dataclass, named tuple  ["mapping", [module, name], items, attributes]

Every rank runs the same program, so a class that one has made an object of is imported on all. The receiver looks it up
among what it has imported, and fills an empty object: neither constructors nor setters are called.
"""

import dataclasses
import enum
import json
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence, Set
from functools import partial
from pathlib import Path
from types import EllipsisType, MemberDescriptorType, MethodType
from typing import Any

import torch

from shardwise.comm.nested_values import ContainerSlot, ObjectSlot, TensorSlot, is_plain, transform
from shardwise.errors import MismatchError, ModelError, in_words

_OURS = str(Path(__file__).parents[2])


def user_site() -> str:
    """The innermost line of code that belongs neither to shardwise nor to torch: "file.py:12, in forward"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_OURS) and module.partition(".")[0] not in ("torch", "contextlib", "threading", "copy"):
            return f"{name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside of any file"


def outermost_method(owner: object) -> str:
    """The name of the first method of `owner` in the calls that lead here; empty where there is none."""
    frame = sys._getframe(1)
    name = ""
    while frame is not None:
        if frame.f_locals.get("self") is owner:
            name = frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return name


class Opaque:
    """Stands, on other ranks, for an object of a class that shardwise cannot look into."""

    def __init__(self, class_name: str) -> None:
        self.__class_name__ = class_name  # under no name that an object of the user has

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # what copying looks for
            raise AttributeError(attribute)
        raise self.__refusal(repr(attribute))

    def __iter__(self) -> Any:
        raise self.__refusal("its contents")

    def __getitem__(self, key: Any) -> Any:
        raise self.__refusal(f"item {key!r}")

    def __len__(self) -> int:
        raise self.__refusal("the length")

    def __refusal(self, what: str) -> ModelError:
        return ModelError(
            f"{what} of a {self.__class_name__} that a placed module gave is used outside of it ({user_site()}). Only "
            "the rank of that module's stage has the object; return its tensors in a tuple, list, dict or dataclass"
        )


# Bools are among them, as ints. Numbers and texts that a module gives may be others in each call, with equal inputs.
_NUMBERS_AND_TEXTS = (int, float, complex, str)


def numbers_and_texts_in(value: Any) -> list[Any]:
    """The numbers and texts of a nested value, in the order of the walk."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, _NUMBERS_AND_TEXTS):
            found.append(leaf)
        return leaf

    transform(value, note)
    return found


def with_numbers_and_texts(value: Any, leaves: Iterable[Any]) -> Any:
    """The nested value with other numbers and texts."""
    following = iter(leaves)
    return transform(value, lambda leaf: next(following) if isinstance(leaf, _NUMBERS_AND_TEXTS) else leaf)


def token_of(leaf: Any) -> Hashable:
    """A value for a leaf that is no tensor: equal for leaves that lead to equal shapes of outputs."""
    if isinstance(leaf, slice):
        return (slice, token_of(leaf.start), token_of(leaf.stop), token_of(leaf.step))
    if is_plain(leaf) or isinstance(leaf, range):
        return (type(leaf), comparable(leaf))
    if isinstance(leaf, Mapping):
        return (type(leaf), *((token_of(key), token_of(each)) for key, each in leaf.items()))
    if isinstance(leaf, Set):
        return (type(leaf), frozenset(map(token_of, leaf)))
    # By itself: two functions may do different things under one name. A new lambda in each call is tried each time.
    if isinstance(leaf, MethodType):
        return (MethodType, token_of(leaf.__func__), _Itself(leaf.__self__))
    if callable(leaf):
        return (type(leaf), _Itself(leaf))
    return (type(leaf),)


def comparable(value: Any) -> Any:
    """A plain value as a part of a key: one that is not a number equals itself."""
    return value if value == value else repr(value)


class _Itself:
    """An object as a key: equal to itself alone, also after it is gone and another one has its id."""

    # Not kept alive, where that can be: a lambda of a forward may hold activations, and keys stay.
    __slots__ = ("_hash", "_held")

    def __init__(self, held: object) -> None:
        self._hash = id(held)
        try:
            self._held: Callable[[], object] = weakref.ref(held)
        except TypeError:
            self._held = lambda: held

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        own = self._held()
        return isinstance(other, _Itself) and own is not None and own is other._held()


def state_text(value: Any) -> str:
    """What an object of any class holds, at any depth, in words that are alike on all ranks; of tensors the shapes."""
    seen: dict[int, int] = {}

    def words(part: Any) -> str:
        if isinstance(part, torch.Tensor):
            return f"{part.dtype}{list(part.shape)}"
        if is_plain(part) and not isinstance(part, type):
            return part.type if isinstance(part, torch.device) else repr(part)
        if callable(part) or id(part) in seen:  # an object that holds itself, or is held twice
            return f"{type(part).__qualname__} {seen.get(id(part), '')}"
        seen[id(part)] = len(seen)
        if isinstance(part, Sequence):
            return f"[{', '.join(map(words, part))}]"
        held = part if isinstance(part, Mapping) else getattr(part, "__dict__", {})
        return f"{type(part).__qualname__}{[f'{key!r}: {words(each)}' for key, each in held.items()]}"

    return words(value)


# json writes integers in decimal, which Python refuses beyond 4300 digits; hexadecimal has no limit.
_LARGEST_NUMBER = 1 << 63

_FACTORIES = (list, dict, set, tuple, int, float, str, bool)
"""The factories that a defaultdict may have for missing keys: nothing else is called."""


def packed(value: Any) -> torch.Tensor:
    """A nested value as bytes, for `unpacked` on a rank of the same program.

    Raises ModelError for what is no container, number, text or other plain value.
    """
    return torch.frombuffer(bytearray(json.dumps(_written(value)).encode()), dtype=torch.uint8)


def unpacked(content: torch.Tensor) -> Any:
    """The nested value that was written as these bytes. Raises MismatchError for any other bytes."""
    try:
        return _read(json.loads(content.numpy().tobytes()))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise MismatchError(
            f"an announcement between the stages of a pipeline cannot be read ({in_words(error)}). Run the same "
            "program on every rank, with the same versions of its libraries"
        ) from error


_NAMES_OF_SLOTS: Mapping[type, str] = {TensorSlot: "slot", ObjectSlot: "object", ContainerSlot: "container"}

# Writing --------------------------------------------------------------------------------------------------------------


def _written(value: Any) -> Any:
    """The value as JSON has it."""
    kind = type(value)
    if isinstance(value, enum.Enum) and value.name in kind.__members__:
        return ["member", _class(kind), value.name]
    match value:
        case None | bool():
            return value
        case int():
            return int(value) if abs(value) < _LARGEST_NUMBER else ["int", hex(value)]
        case float() | str():
            return float(value) if isinstance(value, float) else str(value)
        case TensorSlot() | ObjectSlot() | ContainerSlot():
            return [_NAMES_OF_SLOTS[kind], value.number]
        case tuple() | list():
            items = [_written(each) for each in value]
            return [kind.__name__, items] if kind in (tuple, list) else _of_class("sequence", value, items)
        case dict():
            return ["dict", _pairs(value)] if kind is dict else _of_class("mapping", value, _pairs(value))
    if isinstance(value, MutableMapping) or dataclasses.is_dataclass(kind):
        return _of_class("record", value)
    return _written_constant(value)


def _written_constant(value: Any) -> Any:
    match value:
        case complex():
            return ["complex", value.real, value.imag]
        case bytes():
            return ["bytes", value.hex()]
        case slice():
            return ["slice", *map(_written, (value.start, value.stop, value.step))]
        case torch.device():
            return ["device", str(value)]
        case torch.dtype() | torch.layout() | torch.memory_format():
            return [type(value).__name__, str(value).removeprefix("torch.")]
        case type():
            return ["class", _class(value)]
        case Opaque():
            return ["opaque", value.__class_name__]
        case EllipsisType():
            return ["ellipsis"]
    raise ModelError(
        f"a placed module gives a {type(value).__name__} inside of a container, which cannot be announced to other "
        "stages. Return tensors, numbers and texts in a tuple, list, dict or dataclass"
    )


def _pairs(mapping: Mapping[Any, Any]) -> list[Any]:
    return [[_written(key), _written(value)] for key, value in mapping.items()]


def _of_class(way: str, value: Any, *items: Any) -> list[Any]:
    """A container of another class, with its attributes besides the items."""
    held = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        held |= {
            each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)
        }
    if isinstance(value, defaultdict):
        held["default_factory"] = value.default_factory
    return [way, _class(type(value)), *items, _pairs(held)]


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
        # Not `getattr`: it would run properties and `__getattr__` of modules that import on demand.
        found = vars(found)[part]
    if not isinstance(found, type):
        raise TypeError(f"{module}.{name} is no class")
    return found


def _read_slot(kind: Callable[[int], Any], number: Any) -> Any:
    return kind(int(number))


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
    if not dataclasses.is_dataclass(kind) and not issubclass(kind, MutableMapping):
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
    if not issubclass(kind, enum.Enum):
        raise TypeError(f"{kind.__name__} is no enumeration")
    return kind.__members__[name]


def _read_of_torch(kind: type, name: str) -> Any:
    found = vars(torch)[name]
    if not isinstance(found, kind):
        raise TypeError(f"torch.{name} is no {kind.__name__}")
    return found


_READERS: Mapping[str, Callable[..., Any]] = {
    "tuple": lambda items: tuple(_read(each) for each in items),
    "list": lambda items: [_read(each) for each in items],
    "dict": lambda items: dict(_read_pairs(items)),
    "sequence": _read_sequence,
    "mapping": _read_mapping,
    "record": _read_record,
    **{name: partial(_read_slot, kind) for kind, name in _NAMES_OF_SLOTS.items()},
    "opaque": lambda name: Opaque(str(name)),
    "member": _read_member,
    "class": _imported,
    "int": lambda digits: int(digits, 16),
    "complex": complex,
    "bytes": bytes.fromhex,
    "slice": lambda *ends: slice(*map(_read, ends)),
    "device": lambda name: torch.device(name),
    "ellipsis": lambda: ...,
    **{kind.__name__: partial(_read_of_torch, kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
}
