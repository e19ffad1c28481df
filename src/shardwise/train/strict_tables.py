"""Tables of a configuration that take no key and no type that they do not name, and their faults in words."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from shardwise.plan.specs import unknown_setting


# `strict`: "3" or true for a whole number is a slip, which pydantic would else take for 3 or 1.
class Table(BaseModel):
    """One table of the file: no key it does not know, no value of another type."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


SomeTable = TypeVar("SomeTable", bound=Table)


def read_table(kind: type[SomeTable], name: str, tables: Mapping[str, Any], problems: list[str]) -> SomeTable | None:
    """The table of this name, or None when something in it, which is then among `problems`, does not hold."""
    given = tables.get(name, {})
    if not isinstance(given, dict):
        problems.append(f"{name}: {given!r} is not a table of settings; write [{name}]")
        return None
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors():
            found.setdefault(".".join([name, *map(str, _place(given, detail))]), []).append(detail)
        # Of a key that takes several types pydantic has an error for each. Where a table is given for it, what is wrong
        # inside of that says all.
        problems += [
            _explained(kind, key, details)
            for key, details in found.items()
            if not any(other.startswith(f"{key}.") for other in found)
        ]
        return None


def _place(given: Any, detail: ErrorDetails) -> list[int | str]:
    """Where a fault is. Pydantic puts the type between, where a key takes several: ("clip", "float")."""
    place: list[int | str] = []
    for at in detail["loc"]:
        is_there = at in given if isinstance(given, Mapping) else isinstance(given, list) and isinstance(at, int)
        if is_there:
            given = given[at]
        if is_there or detail["type"] == "missing":
            place.append(at)
    return place


def _explained(kind: type[Table], key: str, details: Sequence[ErrorDetails]) -> str:
    detail = details[0]
    if detail["type"] == "extra_forbidden":
        place, inner = key.rpartition(".")[0], table_at(kind, detail["loc"][:-1])
        return unknown_setting(key, [f"{place}.{each}" for each in inner.model_fields])
    if detail["type"] == "missing":
        wanted = table_at(kind, detail["loc"][:-1]).model_fields[str(detail["loc"][-1])].description or ""
        return f"{key}: missing; {' '.join(wanted.split())}"
    # Pydantic speaks of "input" and of types of its own; the message is to say what the key takes.
    needed = [
        each["msg"].removeprefix("Input should be ").replace("a valid integer", "a whole number").replace("valid ", "")
        for each in details
    ]
    return f"{key}: {detail['input']!r} given; it must be {' or '.join(dict.fromkeys(needed))}"


def table_at(kind: type[Table], place: Sequence[int | str]) -> type[Table]:
    """The table at a place in another one; its own class, where the last table is."""
    for name in place:
        field = None if isinstance(name, int) else kind.model_fields.get(name)
        found = () if field is None else (field.annotation, *get_args(field.annotation))
        kind = next((each for each in found if isinstance(each, type) and issubclass(each, Table)), kind)
    return kind
