"""Few cases of many parameters that have every combination of any few of them."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*values: Sequence[Any], strength: int = 3) -> list[tuple[Any, ...]]:
    """Choices of one of `values` each, such that any `strength` of the parameters take every combination in one.

    Greedy: each time the case that has most of what is still missing. What only one certain combination of more
    parameters than `strength` shows is not among them for sure: `list(product(*values))` has it.
    """
    everything = list(product(*(range(len(each)) for each in values)))
    places = list(combinations(range(len(values)), min(strength, len(values))))

    def within(case: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        return {(at, tuple(case[place] for place in at)) for at in places}

    missing = {each for case in everything for each in within(case)}
    chosen = []
    while missing:
        best = max(everything, key=lambda case: len(within(case) & missing))
        missing -= within(best)
        chosen.append(best)
    return [tuple(each[at] for each, at in zip(values, case, strict=True)) for case in chosen]


def pairwise(*values: Sequence[Any]) -> list[Any]:
    """All choices for `parametrize`: those that have every pair in one, and the others for `make stress`."""
    chosen = covering(*values, strength=2)
    return [each if each in chosen else pytest.param(*each, marks=pytest.mark.stress) for each in product(*values)]
