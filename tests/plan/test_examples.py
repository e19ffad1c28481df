"""The examples in the docstrings of the rooms of spaces, plans and routes do what they say."""

import doctest
from importlib import import_module

import pytest

MODULES = (
    *("space.boxes", "space.meshes", "space.moves", "space.pieces", "plan.names", "plan.schedules"),
    *("plan.tensor_rules", "routes.reshard"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    result = doctest.testmod(import_module(f"shardwise.{name}"))  # by name: `moves` is a function of its room too
    assert result.attempted > 0
    assert result.failed == 0
