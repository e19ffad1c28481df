"""Extra values: what a user saves beside the tensors, as JSON that gives back exactly what it was given.

JSON has objects with strings as keys only. Other dicts, such as the `milestones` of a MultiStepLR (a Counter of whole
numbers), are written as {"shardwise": "Counter", "items": [[3, 1], [5, 2]]}.
"""

import json
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from shardwise.errors import CheckpointError

__all__ = ["packed", "unpacked"]

_KIND, _ITEMS = "shardwise", "items"

_KINDS: Mapping[str, type[dict[Any, Any]]] = MappingProxyType({"dict": dict, "Counter": Counter})

_SCALARS = (str, int, float, bool, type(None))


def packed(value: Any, what: str) -> Any:
    """`value` as JSON values. Raises CheckpointError, which names every place, for what would not come back as it is.

    Tuples come back as lists, and dicts of other kinds than Counter as dicts.
    """
    problems: list[str] = []
    try:
        result = _packed(value, what, problems)
        if not problems:
            json.dumps(result)
    except (RecursionError, TypeError, ValueError) as error:
        problems = [f"{what} cannot be written as JSON: {error}"]
    if problems:
        raise CheckpointError(*problems)
    return result


def unpacked(value: Any) -> Any:
    """What `packed` was given. Raises CheckpointError for what it has never given."""
    try:
        return _unpacked(value)
    except RecursionError as error:
        raise CheckpointError(f"extra is nested too deeply: {error}") from error


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {_KIND, _ITEMS} and _are_items(value):
        items = {key: _unpacked(each) for key, each in value[_ITEMS]}
        return items if value[_KIND] == "dict" else _KINDS[value[_KIND]](items)
    return {key: _unpacked(each) for key, each in value.items()}


def _are_items(value: Mapping[str, Any]) -> bool:
    """Whether an object is a dict that `packed` has written, and not one that another program gave these keys."""
    kind, items = value[_KIND], value[_ITEMS]
    return (
        isinstance(kind, str)
        and kind in _KINDS
        and isinstance(items, list)
        and all(isinstance(each, list) and len(each) == 2 and isinstance(each[0], _SCALARS) for each in items)
    )


def _packed(value: Any, place: str, problems: list[str]) -> Any:
    if isinstance(value, list | tuple):
        return [_packed(each, f"{place}[{at}]", problems) for at, each in enumerate(value)]
    if isinstance(value, dict):
        if strange := [key for key in value if type(key) not in _SCALARS]:
            problems += [
                f"{place} has the key {key!r}, a {type(key).__name__}; give keys that are strings, numbers or None"
                for key in strange
            ]
        items = [[key, _packed(each, f"{place}[{key!r}]", problems)] for key, each in value.items()]
        kind = "Counter" if isinstance(value, Counter) else "dict"
        plain = kind == "dict" and value.keys() != {_KIND, _ITEMS} and all(isinstance(key, str) for key in value)
        return dict(items) if plain else {_KIND: kind, _ITEMS: items}
    if type(value) not in _SCALARS:
        hint = "give JSON values"
        if isinstance(value, torch.Tensor):
            hint = "save tensors as part of the state" + (", or give the number: item()" if value.dim() == 0 else "")
        problems.append(f"{place} is a {type(value).__name__}, which JSON cannot hold; {hint}")
    return value
