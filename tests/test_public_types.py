"""What the type checkers of users see of the public names; what these accept and refuse is in typed_programs.py."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw


def functions_of(value: Any) -> Iterator[Any]:
    """The public functions of ours in a public name."""
    if inspect.isclass(value):
        for kind in value.__mro__:
            for name, member in vars(kind).items() if kind.__module__.startswith("shardwise") else ():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                is_ours = inspect.isfunction(function) and function.__module__.startswith("shardwise")
                if is_ours and (name == "__init__" or not name.startswith("_")):
                    yield function
    elif inspect.isfunction(value):
        yield value


@pytest.mark.parametrize("room", [sw, sw.checkpoint], ids=lambda room: room.__name__)
def test_parameters_and_results_of_all_public_names_have_types(room: Any) -> None:
    assert (Path(sw.__file__).parent / "py.typed").exists()
    functions = {each for name in room.__all__ for each in functions_of(getattr(room, name))}
    assert len(functions) > 40
    for function in functions:
        signature = inspect.signature(function)
        given = [each for each in signature.parameters.values() if each.name not in ("self", "cls", "_cls")]
        lacking = [each.name for each in given if each.annotation is each.empty]
        # The __init__ of a dataclass says nothing of its result, and always gives none.
        has_result = function.__name__ == "__init__" or signature.return_annotation is not signature.empty
        assert (function.__qualname__, lacking, has_result) == (function.__qualname__, [], True)
