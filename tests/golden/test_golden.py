"""Plans decide what they decided before, and their texts parse back."""

import pytest

from shardwise.plan import Ownership, Plan
from tests.golden.cases import FOLDER, PLANS, ownership_of, path_of, text_of


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_decides_what_the_golden_text_says(case: str) -> None:
    assert text_of(case) == path_of(case).read_text(encoding="ascii"), "`make golden` writes the texts anew"


@pytest.mark.parametrize("case", PLANS)
def test_golden_texts_parse_back(case: str) -> None:
    plan, ownership, _ = path_of(case).read_text(encoding="ascii").split("\n\n")
    assert Plan.parse(plan) == PLANS[case]
    assert Ownership.parse(ownership) == ownership_of(PLANS[case])


def test_every_golden_text_has_a_case() -> None:
    assert sorted(FOLDER.glob("*.txt")) == sorted(map(path_of, PLANS))
