"""The examples in the docstrings of the space room do what they say."""

import doctest
from importlib import import_module

import pytest


# By name: `moves` is a function of the room too.
@pytest.mark.parametrize("name", ["boxes", "meshes", "moves", "pieces"])
def test_examples_run(name: str) -> None:
    result = doctest.testmod(import_module(f"shardwise.space.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
