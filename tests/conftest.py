"""What all tests share."""

import os

# Before torch is loaded, here and in every process that a test starts: models are so small that a second thread only
# waits for the first, ranks are threads of which each would start a team, and other threads could give other bits.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from tests.tiers import slow_tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = slow_tests()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
