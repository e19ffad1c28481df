"""State of training in folders of `torch.distributed.checkpoint`: weights and moments under the model's own names.

A state dict is saved flat, and the metadata keeps the path of each name. So a folder with an optimizer in it, nested or
flattened (`flatten_optimizer_state_dict`), says which state belongs to which parameter:

    model.w                    ("model", "w")                            w
    optim.state.w.exp_avg      ("optim", "state", "w", "exp_avg")        optimizer/w/exp_avg
    optimizer.state.w.exp_avg  ("optimizer", "state.w.exp_avg")          the same, as torchtitan has it
    optim.param_groups.0.lr    ("optim", "param_groups", 0, "lr")        settings of the optimizer

What is nested is a value as in a file of `torch.save`, and the rules for those are followed: state with numbers keeps
them. Where the folder names a parameter that it lacks, names stay as they are in it. So they do where several dicts
hold tensors and no optimizer.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.contents import StoredTensor
from shardwise.checkpoint.formats.optimizer_states import numbered_settings
from shardwise.checkpoint.formats.state_dicts import find_state
from shardwise.checkpoint.formats.strided import TensorPlace, stored_tensor
from shardwise.checkpoint.stores import is_value
from shardwise.errors import CheckpointError
from shardwise.plan.names import beside_name
from shardwise.space.boxes import row_major_strides

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value in a state dict of dicts and lists."""

_STATE, _GROUPS = "state", "param_groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNames:
    """A folder of training, under the model's names."""

    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    """All else, nested as it was saved."""
    notes: tuple[str, ...]
    value_sizes: Mapping[str, int]
    """See `FoundState.value_sizes`."""


def training_names(
    tensors: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    objects: Mapping[str, Any],
    paths: Mapping[str, KeyPath],
) -> TrainingNames | None:
    """Name the tensors of a folder by its model; None where nothing says which dict that is.

    aliases: other names of tensors. objects: values that are no tensors, and the numbers of
        settings that were saved as tensors. paths: of the names, where the folder has them.
    """
    places = {name: _stand_in(number, each) for number, (name, each) in enumerate(tensors.items())}
    values: dict[str, Any] = {**places, **objects, **{alias: places[name] for alias, name in aliases.items()}}
    saved = _SavedOptimizers(paths.values())
    rest: dict[Any, Any] = {}
    beside: dict[str, StoredTensor] = {}
    # Where weights are at the top, as torchtitan has them, dicts of tensors are none of the model's.
    at_top = any(len(paths.get(name, (name,))) == 1 and tensors[name].shape for name in tensors)
    try:
        for name, value in values.items():
            path = paths.get(name, (name,))
            if saved.take(path, value):
                continue
            if at_top and len(path) > 1 and name in tensors:
                beside[beside_name(name)] = tensors[name].renamed(beside_name(name))
            else:
                _put(rest, path, value)
        for root, optimizer in saved.optimizers.items():
            for key, value in optimizer.value().items():
                _put(rest, (*root, key), value)
        found = find_state(rest, "")
    except (CheckpointError, AttributeError, TypeError, KeyError):
        return None  # it is nested otherwise than torch's state dicts
    found.name_optimizers()
    # Weights alone have names of a model where all are in one dict, which is not the outermost.
    dicts = {paths.get(name, (name,))[:-1] for name in places}
    is_model = bool(found.optimizers) or (len(dicts) == 1 and dicts != {()})
    if not is_model or not all(each.is_whole for *_, each in found.optimizers):
        return None
    stored = list(tensors.values())
    # Groups that are names alone say nothing of how they are updated.
    named = [
        each.settings()
        for *_, each in found.optimizers
        if each.names and any(group.keys() != {"params"} for group in each.groups)
    ]
    numbered = numbered_settings((path, each) for path, _, each in found.optimizers)
    return TrainingNames(
        tensors={
            name: stored_tensor(name, file, place) if is_value(file) else stored[place.start].renamed(name)
            for name, (file, place) in found.tensors.items()
        }
        | beside,
        value_sizes=found.value_sizes,
        aliases=found.aliases,
        settings={"ties": dict(found.aliases), "optimizers": named, **numbered} if named or numbered else {},
        values=found.values,
        notes=tuple(found.notes),
    )


def is_setting(path: KeyPath) -> bool:
    """Whether a value is in the groups of an optimizer."""
    return _GROUPS in path or str(path[-1]).startswith(f"{_GROUPS}.")


def _stand_in(number: int, tensor: StoredTensor) -> TensorPlace:
    """What stands for a tensor in a nested value: its number in the place of bytes of a file."""
    shape = tensor.shape
    return TensorPlace(dtype=tensor.dtype, shape=shape, strides=row_major_strides(shape), start=number)


def _put(nested: dict[Any, Any], path: KeyPath, value: Any) -> None:
    *outer, last = path
    for key in outer:
        nested = nested.setdefault(key, {})
    if last in nested:
        raise KeyError(last)
    nested[last] = value


class _SavedOptimizers:
    """The parts of optimizers in a folder, by the path of each optimizer."""

    def __init__(self, paths: Iterable[KeyPath]) -> None:
        self.optimizers: defaultdict[KeyPath, _SavedOptimizer] = defaultdict(_SavedOptimizer)
        # A module of a model may be called "state", but none has groups as well.
        self._flattened = {path[:-1] for path in paths if len(path) > 1 and str(path[-1]).startswith(f"{_GROUPS}.")}

    def take(self, path: KeyPath, value: Any) -> bool:
        """Take a value over if it belongs to an optimizer."""
        last = path[-1]
        if len(path) > 3 and path[-3] == _STATE:
            self.optimizers[path[:-3]].state.setdefault(str(path[-2]), {})[str(last)] = value
        elif len(path) > 3 and path[-3] == _GROUPS and isinstance(path[-2], int):
            self.optimizers[path[:-3]].groups.setdefault(path[-2], {})[str(last)] = value
        elif path[:-1] in self._flattened and str(last).startswith((f"{_STATE}.", f"{_GROUPS}.")):
            kind, _, rest = str(last).partition(".")
            parameter, _, key = rest.rpartition(".")
            optimizer = self.optimizers[path[:-1]]
            (optimizer.state if kind == _STATE else optimizer.settings).setdefault(parameter, {})[key] = value
        else:
            return False
        return True


@dataclass(slots=True)
class _SavedOptimizer:
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By parameter and key."""
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those of the flattened form: by parameter, the settings of its group."""

    def value(self) -> dict[str, Any]:
        """As `state_dict()` of an optimizer has it, with names in the place of numbers."""
        groups = [self.groups[number] for number in sorted(self.groups)]
        # Keys of dicts are texts in names, and groups have numbers.
        numbers = {str(each): each for group in groups for each in group.get("params", ())}
        state = {numbers.get(parameter, parameter): each for parameter, each in self.state.items()}
        if not groups:
            # Parameters with the same settings are a group: the flattened form does not say more.
            alike: dict[str, dict[str, Any]] = {}
            for parameter, settings in self.settings.items():
                key = json.dumps(settings, sort_keys=True, default=repr)
                alike.setdefault(key, {**settings, "params": []})["params"].append(parameter)
            groups = list(alike.values())
        return {_STATE: state, _GROUPS: groups}
