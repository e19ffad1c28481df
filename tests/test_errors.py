"""Errors with many problems say all that fits, and how many more there are."""

import pytest

from shardwise.errors import CheckpointError, few_of


@pytest.mark.parametrize("number", [1, 2, 39, 40, 41, 42, 100])
def test_an_error_shows_forty_problems_and_counts_the_others(number: int) -> None:
    lines = str(CheckpointError(*(f"problem {at}" for at in range(number)))).splitlines()
    shown = [f"problem {at}" for at in range(min(number, 40))]
    if number > 1:
        shown = [f"{number} problems:", *(f"  - {each}" for each in shown)]
    assert lines == shown + [f"  - and {number - 40} more"] * (number > 40)


@pytest.mark.parametrize(("number", "shown"), [(1, "'a'"), (3, "'a', 'b', 'c'"), (4, "'a', 'b', 'c' and 1 more")])
def test_the_first_of_many_names_are_shown_and_the_others_counted(number: int, shown: str) -> None:
    assert few_of(list("abcdef"[:number])) == shown
