"""The list of durations names tests that are there: a renamed one would slip into `make test` without a word."""

import re
from pathlib import Path

from tests.tiers import slow_tests

ROOT = Path(__file__).parents[1]


def test_every_slow_test_of_the_list_is_in_its_file() -> None:
    functions = [test.split("::") for test in slow_tests()]
    assert functions
    missing = [
        (file, name)
        for file, name in functions
        # Its own, or one that it imports by a line of this name.
        if not (ROOT / file).exists()
        or not re.search(rf"def {name}\(|^ +{name},$|import {name}$", (ROOT / file).read_text(encoding="utf-8"), re.M)
    ]
    assert missing == [], "record again: tests/tiers.py says how"
