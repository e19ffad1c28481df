"""The examples in the docstrings of the space room do what they say."""

import doctest
from types import ModuleType

import pytest

from shardwise.space import boxes, meshes, moves, pieces


@pytest.mark.parametrize("module", [boxes, meshes, moves, pieces], ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
