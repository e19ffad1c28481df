"""The examples in the docstrings of the rooms of plans and routes do what they say."""

import doctest
from types import ModuleType

import pytest

from shardwise.plan import names, schedules, tensor_rules
from shardwise.routes import reshard


@pytest.mark.parametrize("module", [names, reshard, schedules, tensor_rules], ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
