"""Names for what a file of `torch.save` holds: the model's own names, optimizer state under them, and the rest.

    {"state_dict": {"w": T, "b": T},                            w, b
     "optimizer": {"state": {0: {"exp_avg": T}}, ...},          optimizer/w/exp_avg, or optimizer/0/exp_avg: see
     "rng": T,                                                  extra/rng                 `optimizer_states`
     "epoch": 3, "scheduler": {"last_epoch": 3}}                extra: {"epoch": 3, "scheduler": {"last_epoch": 3}}

The one dict of tensors in a file is the model, or the tensors at its top. Where there are several such dicts, names
have their paths before them: "ema.w". Classes decide nothing: which library wrote a file does not matter.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.checkpoint.contents import StoredTensor
from shardwise.checkpoint.formats.optimizer_states import (
    NumberedOptimizer,
    Parameters,
    is_optimizer,
    named_parameters,
    numbered_settings,
)
from shardwise.checkpoint.formats.strided import TensorPlace, stored_tensor
from shardwise.checkpoint.formats.torch_files.saved_values import ResolvedTensor, UnknownObject
from shardwise.checkpoint.stores import is_value, value_name
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.names import beside_name, is_beside_name, state_name
from shardwise.plan.saved_settings import PYTHON_DTYPES

_MAX_NODES = 1_000_000
"""Names in a file: of tensors, and of what they are in."""
_MAX_VALUES = 200_000
"""Values besides tensors under one key; more are left out."""
_MAX_KEYS = 1000
"""Keys with values besides tensors."""
_MAX_TEXT = 1 << 20
_TIMES_THE_FILE = 16
"""Tensors may share the bytes of a file, but not without end: readers make room for what names announce."""

_Path = tuple[Any, ...]


@dataclass(slots=True, kw_only=True)
class FoundState:
    """What files of `torch.save` hold, by name."""

    tensors: dict[str, tuple[str, TensorPlace]] = field(default_factory=dict)
    """The file and the place in it, by name."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of the same view of the same storage."""
    optimizers: list[tuple[str, str, NumberedOptimizer]] = field(default_factory=list)
    """Their paths, with a dot at the end unless there is one only; and their files."""
    values: dict[str, Any] = field(default_factory=dict)
    """All else, as JSON values."""
    file_sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the files."""
    value_sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of values that are in no file: see `stores.value_name`."""
    notes: list[str] = field(default_factory=list)
    """What was left out, and what keeps its number, in words."""

    def add(self, name: str, file: str, place: TensorPlace) -> None:
        """Add a tensor; raises CheckpointError where the name is taken."""
        if name in self.tensors or name in self.aliases:
            raise CheckpointError(f"it has two tensors {name!r}")
        self.tensors[name] = file, place

    def settings(self) -> dict[str, Any]:
        """The settings of a save that has this state: see `plan.saved_settings`."""
        named = [each.settings() for _, _, each in self.optimizers if each.names]
        numbered = numbered_settings((path, each) for path, _, each in self.optimizers)
        return {"ties": dict(self.aliases), "optimizers": named, **numbered} if named or numbered else {}

    def left_state(self) -> str:
        """See `Contents.left_state`."""
        return "; ".join(each.note(path) for path, _, each in self.optimizers if not each.is_whole)

    def name_optimizers(self, model: Parameters | None = None) -> None:
        """Give the state of all optimizers its names. `model`: its parameters, where these files do not have them."""
        model = model or Parameters.of(self._model(), ordered=True)
        named_parameters([each for _, _, each in self.optimizers], model)
        for path, file, optimizer in self.optimizers:
            if note := optimizer.note(path):
                self.notes.append(note)
            for number, key, value in optimizer.entries():
                self.add(state_name(optimizer.owner(number, path), key), *placed(value, file, self.value_sizes))
            settings = [item for group in optimizer.groups for item in group.items()]
            if lost := {str(key) for key, value in settings if isinstance(value, TensorPlace | UnknownObject)}:
                self.notes.append(
                    f"{few_of(sorted(lost))} among the settings of an optimizer: a tensor or another object, and "
                    "is not carried over; set it again"
                )
            state = [(f"{number}.{key}", each) for number, of in optimizer.state.items() for key, each in of.items()]
            if gone := [f"{path}{name}" for name, each in state if isinstance(each, UnknownObject)]:
                self.notes.append(f"{few_of(gone)} of the state of an optimizer left out: no plain tensors")

    def stored(self) -> dict[str, StoredTensor]:
        """The tensors as the contents of a checkpoint have them."""
        announced = sum(place.num_bytes for _, place in self.tensors.values())
        num_bytes = sum(self.file_sizes.values())
        if announced > _TIMES_THE_FILE * num_bytes:
            raise CheckpointError(
                f"its tensors have {announced:,} bytes together, in files of {num_bytes:,}: views of the "
                "same elements again and again. Save them contiguous"
            )
        tensors = {}
        for name, (file, place) in self.tensors.items():
            try:
                tensors[name] = stored_tensor(name, file, place)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {name}: {error}") from error
        return tensors

    def _model(self) -> dict[str, TensorPlace]:
        return {
            # Of each its own place, as no two are tied that are in no file.
            name: replace(place, start=-number) if is_value(file) else place
            for number, (name, (file, place)) in enumerate(self.tensors.items(), 1)
            if not is_beside_name(name)
        }


def placed(value: TensorPlace | ResolvedTensor | float, file: str, sizes: dict[str, int]) -> tuple[str, TensorPlace]:
    """File and place of a tensor. What is in no file is in the name of its own alone, whose size goes to `sizes`."""
    if isinstance(value, TensorPlace):
        return file, value
    if isinstance(value, ResolvedTensor):
        sizes[value_name(value.data)] = len(value.data)
        return value_name(value.data), value.place
    kind = type(value).__name__
    data = struct.pack({"bool": "?", "int": "<q", "float": "<d"}[kind], value)
    sizes[value_name(data)] = len(data)
    return value_name(data), TensorPlace(dtype=PYTHON_DTYPES[kind], shape=(), strides=(), start=0)


def find_state(value: object, file: str, *, next_to_model: bool = False) -> FoundState:
    """Find what a file holds that `read_file` has read. `next_to_model`: the file was saved next to that of the model.

    The optimizers are not named yet: see `name_optimizers`.
    """
    walk = _TensorSearch()
    if isinstance(value, UnknownObject) and not isinstance(value, ResolvedTensor):
        raise CheckpointError(
            value.hint
            or f"it holds a {value.kind[:_MAX_NAME]} as a whole, and no objects are made here. Load it with the "
            "program that made it, and save its state_dict()"
        )
    walk.visit((), value)
    found = FoundState(notes=walk.notes)
    models = [] if next_to_model else _models(walk)
    stem = f"{file.rpartition('.')[0]}." if next_to_model else ""
    inside = models[0] if len(models) == 1 else ()
    ties: dict[tuple[str, TensorPlace], str] = {}
    for path, held in walk.tensors.items():
        place = placed(held, file, found.value_sizes)
        # A file without a model has nothing that other tensors could be beside.
        if next_to_model or (models and not any(path[: len(each)] == each for each in models)):
            found.add(beside_name(stem + _dotted(path)), *place)
            continue
        name = _dotted(path[len(inside) :]) or "tensor"
        first = ties.setdefault(place, name)
        # Values alone tie nothing.
        if first == name or 0 in place[1].shape or is_value(place[0]):
            found.add(name, *place)
        else:
            found.aliases[name] = first
    several = len(walk.optimizers) > 1
    for path, optimizer in walk.optimizers.items():
        found.optimizers.append((f"{_dotted(path)}." if several else "", file, NumberedOptimizer.of(optimizer)))
    found.values = plain_values(value, found.notes) if isinstance(value, dict) else {}
    if len(models) > 1:
        names = ", ".join(_dotted(each) for each in models)
        found.notes.append(f"it has several dicts of tensors ({names}), so names begin with theirs")
    return found


class _TensorSearch:
    """All tensors and optimizers in a value, by path."""

    def __init__(self) -> None:
        self.tensors: dict[_Path, TensorPlace | ResolvedTensor] = {}
        self.optimizers: dict[_Path, Mapping[str, Any]] = {}
        self.dicts: dict[_Path, Mapping[Any, Any]] = {}
        """Dicts that have tensors right in them."""
        self.notes: list[str] = []
        self._left = _MAX_NODES
        self._kept: dict[int, bool] = {}

    def visit(self, path: _Path, value: Any) -> None:
        """Look at a value and at all in it."""
        # A pickle may name one list very often: what has no tensor is passed over, the limit is for what has one.
        if not self._holds_tensors(value):
            return
        self._left -= 1
        if self._left < 0:
            raise CheckpointError(f"it has more than {_MAX_NODES:,} values, which is no checkpoint")
        if isinstance(value, TensorPlace | ResolvedTensor):
            self.tensors[path] = value
        elif isinstance(value, UnknownObject):
            what = f"it is a {value.kind[:_MAX_NAME]}, and tensors in such objects are not read; save them in dicts"
            self.notes.append(f"{_dotted(path)} is left out: {value.hint or what}")
        elif is_optimizer(value):
            self.optimizers[path] = value
        elif isinstance(value, dict):
            if any(isinstance(each, TensorPlace | ResolvedTensor) for each in value.values()):
                self.dicts[path] = value
            for key, each in value.items():
                self.visit((*path, key), each)
        elif isinstance(value, list | tuple):
            for key, each in enumerate(value):
                self.visit((*path, key), each)

    def _holds_tensors(self, value: Any) -> bool:
        if isinstance(value, TensorPlace):
            return True
        if not isinstance(value, dict | list | tuple | UnknownObject):
            return False
        if id(value) not in self._kept:
            inside: Iterable[Any] = value.values() if isinstance(value, dict) else value  # type: ignore[assignment]
            if isinstance(value, UnknownObject):
                inside = (value.args, value.state, value.items)
            found = bool(isinstance(value, UnknownObject) and value.hint) or is_optimizer(value)
            self._kept[id(value)] = found or any(map(self._holds_tensors, inside))
        return self._kept[id(value)]


def _models(walk: _TensorSearch) -> list[_Path]:
    """The paths of the dicts that are state dicts of models."""
    outer = [path for path, value in walk.dicts.items() if _is_model(value)]
    # At the top, or in one dict of it: what is deeper belongs to what is around it, unless nothing else is there.
    near = [path for path in outer if len(path) == 1]
    if not near and () in outer:
        return [()]
    return near or outer


def _is_model(value: Mapping[Any, Any]) -> bool:
    """Whether a dict has tensors by name, and floats among them; random states have none."""
    places = (each.place if isinstance(each, ResolvedTensor) else each for each in value.values())
    return all(isinstance(key, str) for key in value) and any(
        isinstance(each, TensorPlace) and each.shape and each.dtype.startswith(("float", "bfloat", "complex"))
        for each in places
    )


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(str(each)[:_MAX_NAME] for each in path)


_MAX_NAME = 1024


def plain_values(value: Mapping[Any, Any], notes: list[str]) -> dict[str, Any]:
    """What of a dict is neither a tensor nor state of an optimizer, as JSON values; notes say what is left out."""
    kept: dict[str, Any] = {}
    for key, each in value.items():
        if len(kept) == _MAX_KEYS:
            notes.append(f"{key} and what follows are left out: it has more than {_MAX_KEYS} keys besides tensors")
            break
        budget = _Budget(notes, str(key)[:_MAX_NAME])
        try:
            found = budget.json(each)
        except OverflowError:
            notes.append(f"{budget.key} is left out: it has more than {_MAX_VALUES:,} values besides tensors")
            continue
        if found is not _NOTHING:
            kept[budget.key] = found
    return kept


_NOTHING = object()


class _Budget:
    """Makes JSON of one value; raises OverflowError where it has too many."""

    def __init__(self, notes: list[str], key: str) -> None:
        self.key = key
        self._notes = notes
        self._left = _MAX_VALUES

    def json(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OverflowError
        if isinstance(value, TensorPlace) or (isinstance(value, UnknownObject) and value.hint):
            return _NOTHING
        if isinstance(value, UnknownObject):
            fields = {"args": value.args, "state": value.state, "items": value.items}
            held = {key: self.json(each) for key, each in fields.items() if each}
            return {
                "class": value.kind[:_MAX_NAME],
                **{key: each for key, each in held.items() if each is not _NOTHING},
            }
        if isinstance(value, dict):
            return self._dict({"param_groups": value["param_groups"]} if is_optimizer(value) else value)
        if isinstance(value, list | tuple):
            made = [self.json(each) for each in value]
            # A list of tensors alone leaves nothing; in others a hole keeps the places of those that follow.
            if value and all(each is _NOTHING for each in made):
                return _NOTHING
            return [None if each is _NOTHING else each for each in made]
        return self._scalar(value)

    def _dict(self, value: Mapping[Any, Any]) -> Any:
        made = {str(key)[:_MAX_NAME]: self.json(each) for key, each in value.items()}
        kept = {key: each for key, each in made.items() if each is not _NOTHING}
        return kept if kept or not value else _NOTHING

    def _scalar(self, value: Any) -> Any:
        if isinstance(value, bytes):
            self._left -= len(value) // 16
            return {"bytes": value.hex()} if len(value) <= _MAX_TEXT else self._too_long(value)
        if type(value) is int and abs(value) >= 1 << 64:
            return {"int": hex(value)}
        if isinstance(value, str):
            self._left -= len(value) // 16
            return value if len(value) <= _MAX_TEXT else self._too_long(value)
        return value if isinstance(value, int | float | None) else repr(value)[:_MAX_NAME]

    def _too_long(self, value: Any) -> Any:
        self._notes.append(f"{self.key} has a {type(value).__name__} that is too long to keep, and is left out")
        return _NOTHING
