"""The list of mutants stays good: each one still applies to the library, and every room has some."""

import ast

from tests.mutants.listed import KINDS, ROOT, SOURCES, mutants


def top_level_block(lines: list[str], line: int) -> str:
    """The function or class that holds a line, counted from 0: to parse whole files would take a second."""
    begins = [at for at, text in enumerate(lines) if text and (text[0].isalpha() or text[0] in "_@")]
    first = max(at for at in begins if at <= line)
    return "\n".join(lines[first : next((at for at in begins if at > line), None)])


def test_every_mutant_changes_one_line_of_its_file_into_another_that_compiles() -> None:
    for mutant in mutants():
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        changed = mutant.applied(text)
        before, after = text.splitlines(), changed.splitlines()
        different = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        assert len(different) == 1, mutant.name
        ast.parse(top_level_block(after, different[0]))


def test_mutants_are_of_every_room_and_every_kind() -> None:
    listed = mutants()
    assert len(listed) >= 130
    assert len({mutant.name for mutant in listed}) == len(listed)
    folders = {each.name for each in (ROOT / SOURCES).iterdir() if each.is_dir() and (each / "__init__.py").exists()}
    assert {mutant.room for mutant in listed} >= folders - {"testing"}  # its own tests refuse what it lets through
    assert {mutant.kind for mutant in listed} == set(KINDS)
    assert all(mutant.seen.endswith(".") for mutant in listed)
