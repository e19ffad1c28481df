"""Patterns and their index: what is found is what trying every pattern on every name finds."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.rewrite.patterns import NameIndex, NamePattern, shifted
from shardwise.rewrite.statements import Name, NamePart, Placeholder, Star, TextPlace
from tests.properties import tried

texts: st.SearchStrategy[NamePart] = st.sampled_from(["a", ".", "b1", "1", "w_", "0", "e."])


placeholders: st.SearchStrategy[NamePart] = st.sampled_from(
    [Placeholder("L"), Placeholder("E"), Placeholder("L", 1), Placeholder("E", -1), Star()]
)


def _valid(parts: list[NamePart]) -> bool:
    stars = sum(isinstance(part, Star) for part in parts)
    text = "".join(part if isinstance(part, str) else "\1" for part in parts)
    return stars <= 1 and not re.search("\1[0-9]*\1", text)


patterns: st.SearchStrategy[list[NamePart]] = st.lists(texts | placeholders, min_size=1, max_size=5).filter(_valid)


names = st.lists(st.sampled_from(["a", ".", "b", "1", "0", "10", "w_", "e.", "007"]), min_size=1, max_size=6).map(
    "".join
)


def name_of(*parts: NamePart) -> Name:
    return Name(parts, False, TextPlace(1, 1, 1))


def _plainly(parts: list[NamePart], name: str) -> dict[str, str] | None:
    """By a regular expression: what placeholders stand for in a name; None where the pattern does not match."""
    expression = "".join(re.escape(part) if isinstance(part, str) else "([0-9]+)" for part in parts)
    match = re.fullmatch(expression, name)
    if match is None:
        return None
    found: dict[str, str] = {}
    for part, digits in zip([part for part in parts if not isinstance(part, str)], match.groups(), strict=True):
        key, shift = (part.name, part.shift) if isinstance(part, Placeholder) else ("*", 0)
        number = int(digits) - shift
        text = digits if not shift else str(number).zfill(len(digits) if digits[0] == "0" else 1)
        if number < 0 or found.setdefault(key, text) != text:
            return None
    return found


@tried(40)
@given(patterns, st.lists(names, max_size=12), st.data())
def test_an_index_finds_what_a_regular_expression_finds(
    parts: list[NamePart], there: list[str], data: st.DataObject
) -> None:
    pattern = NamePattern(name_of(*parts))
    index = NameIndex(there)
    index.find(pattern)  # so that names come and go with the groups that this makes
    gone = data.draw(st.lists(st.sampled_from(sorted(set(there))), unique=True)) if there else []
    for name in gone:
        index.remove(name)
    late = data.draw(st.lists(names, max_size=3))
    for name in late:
        index.add(name)
    expected = {}
    for name in (set(there) - set(gone)) | set(late):
        found = _plainly(parts, name)
        if found is not None:
            expected[name] = (tuple(found[variable] for variable in pattern.variables), found.get("*", ""))
    assert {name: (bindings, star) for name, bindings, star in index.find(pattern)} == expected


@pytest.mark.parametrize(
    ("digits", "shift", "expected"),
    [
        ("3", 0, "3"),
        ("009", 1, "010"),
        ("0", -1, None),
        ("10", -10, "0"),
        ("9" * 5000, 1, "1" + "0" * 5000),
        ("1" + "0" * 5000, -1, "9" * 5000),
        ("0" * 5000, 1, "0" * 4999 + "1"),
        ("0" * 5000, -1, None),
    ],
)
def test_shifting_keeps_leading_zeros_and_knows_no_negative_numbers(
    digits: str, shift: int, expected: str | None
) -> None:
    assert shifted(digits, shift) == expected
