"""Plans decide what they decided before, and parse back from their texts."""

import re

import pytest

from shardwise.plan import Plan
from tests.golden.cases import FOLDER, PLANS, path_of, text_of
from tests.golden.surfaces import TEXTS


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_decides_what_the_golden_text_says(case: str) -> None:
    assert text_of(case) == path_of(case).read_text(encoding="ascii"), "`make golden` writes the texts anew"


@pytest.mark.parametrize("case", PLANS)
def test_plans_parse_back_from_golden_texts(case: str) -> None:
    plan, _, _ = path_of(case).read_text(encoding="ascii").split("\n\n")
    assert Plan.parse(plan) == PLANS[case]


@pytest.mark.parametrize("name", TEXTS)
def test_what_users_hold_on_to_is_what_the_golden_text_says(name: str) -> None:
    assert TEXTS[name]() == path_of(name).read_text(encoding="utf-8"), "`make golden` writes the texts anew"


def test_every_golden_text_has_a_case() -> None:
    assert sorted(FOLDER.glob("*.txt")) == sorted(map(path_of, [*PLANS, *TEXTS]))


def test_every_file_of_messages_has_a_table() -> None:
    names = [
        name
        for each in FOLDER.parent.rglob("test_*.py")
        for name in re.findall(r"""\bRefusals\(\s*["']([\w.]+)["']""", each.read_text(encoding="utf-8"))
    ]
    assert sorted(names) == sorted(each.stem for each in (FOLDER / "refusals").glob("*.json"))
