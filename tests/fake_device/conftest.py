"""Of each test that another room lends, one case of three runs on the fake device; `make stress` runs all.

Its own room tries every case on the CPU. Here the device has to change no bit, whatever the test does on it.
"""

from collections import Counter

import pytest

_LENT = "fake_device/test_training.py::"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if _LENT in name:
            if seen[name] % 3:
                item.add_marker("stress")
            seen[name] += 1
