"""Optimizer state inside lists, tuples and dicts, under keys that say where each value was.

    state["GG"] = [t, []]               GG[0]                   GG[1]=[]        an empty list
    state["expr"] = ("ab,bc", t)        expr(0)="ab,bc"         expr(1)
    state["buffers"] = {"a": t, 2: t}   buffers{"a"}            buffers{2}

What stands behind `=` is in the key itself, which holds `True`: a text, an empty container, or None in a container.
So a checkpoint needs no other record of the structure, and each parameter has its own.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from shardwise.errors import CheckpointError

_OPENING: dict[Any, str] = {list: "[", tuple: "(", dict: "{"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MADE = {"[": list, "(": tuple}
_EMPTY: dict[str, Any] = {"[]": list, "()": tuple, "{}": dict}
_SPECIAL = str.maketrans({each: f"%{ord(each):02X}" for each in "%[({="})
_KEYS = (str, int, float)
_MOST_DEEP = 16


def flat_state(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """State of one parameter without containers: values by key; keys that are no strings stay as they are."""
    found: dict[Any, Any] = {}
    for key, value in entries.items():
        found.update(flat_value(key, value))
    return found


def flat_once(entries: Mapping[Any, Any], given: set[int]) -> dict[Any, Any]:
    """`flat_state` without values that were given before: an optimizer may give many parameters one tensor of state.

    given: ids of values, to which those of the result come.
    """
    found = {key: value for key, value in flat_state(entries).items() if id(value) not in given}
    given.update(map(id, found.values()))
    return found


def flat_value(key: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """What is under one key: (key, value)."""
    if isinstance(key, str):
        yield from _walk(key.translate(_SPECIAL), value, 0)
    else:
        yield key, value


def _walk(key: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    kind = tuple if type(value).__name__ == "Size" else type(value)
    opening = _OPENING.get(kind)
    if kind is str or (value is None and depth):
        yield f"{key}={_text(value)}", True
    # What is left as it is, is refused in words by `python_type`.
    elif opening is None or depth == _MOST_DEEP or (kind is dict and any(type(at) not in _KEYS for at in value)):
        yield key, value
    elif not value:
        yield f"{key}={opening}{_CLOSING[opening]}", True
    else:
        for at, each in value.items() if kind is dict else enumerate(value):
            yield from _walk(f"{key}{opening}{_text(at)}{_CLOSING[opening]}", each, depth + 1)


def _text(value: Any) -> str:
    # A slash would divide the name of the parameter from the key.
    return json.dumps(value).replace("/", r"\u002f")


def nested_state(flat: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter with its containers, from what `flat_state` gives.

    Raises CheckpointError for keys that do not fit together.
    """
    found: dict[str, Any] = {}
    for key, value in flat.items():
        steps = list(_steps(key)) if any(mark in key for mark in "[({=%") else [("", key)]
        held: Any = found
        for (mark, place), (following, inside) in zip(steps, [*steps[1:], ("", value)], strict=True):
            if mark == "=":
                break
            inner = inside if following in ("", "=") else _Container(following)
            old = held.setdefault(place, inner)
            if old is not inner and getattr(old, "opening", "") != getattr(inner, "opening", None):
                raise CheckpointError(f"the optimizer's state {key!r} does not fit the other keys of its parameter")
            held = old
    return {key: _made(key, value) for key, value in found.items()}


class _Container(dict[Any, Any]):
    """A list, tuple or dict that is not complete yet."""

    def __init__(self, opening: str) -> None:
        super().__init__()
        self.opening = opening


def _made(key: str, value: Any) -> Any:
    if not isinstance(value, _Container):
        return value
    items = {at: _made(key, each) for at, each in value.items()}
    if value.opening == "{":
        return items
    if set(items) != set(range(len(items))):
        raise CheckpointError(f"the optimizer's state {key!r} has the items {sorted(items)}; some are missing")
    return _MADE[value.opening](items[at] for at in range(len(items)))


def _steps(key: str) -> Iterator[tuple[str, Any]]:
    """The way to a value: its key, then the kind of each container and the place in it, or `=` and the value."""
    at = min((found for mark in "[({=" if (found := key.find(mark)) >= 0), default=len(key))
    yield "", unquote(key[:at])
    try:
        while at < len(key):
            mark = key[at]
            if mark == "=":
                text = key[at + 1 :]
                yield "=", _EMPTY[text]() if text in _EMPTY else json.loads(text)
                return
            place, end = json.JSONDecoder().raw_decode(key, at + 1)
            if key[end] != _CLOSING[mark] or type(place) not in (_KEYS if mark == "{" else (int,)):
                raise ValueError(key)
            yield mark, place
            at = end + 1
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"the optimizer's state has the key {key!r:.100}, which no save of this library writes"
        ) from error
