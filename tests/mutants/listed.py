"""The mutants of mutants.toml, and where in its file each one is."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = Path("src/shardwise")
LIST = Path(__file__).with_name("mutants.toml")

KINDS = ("agreement", "border", "cast", "condition", "device", "error", "order", "sign", "stale", "sum", "wait")
"""Of mutants: what is skipped, swallowed, off by one, not forgotten, not waited for, and so on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One line of the library, changed."""

    name: str
    file: str
    """Below src/shardwise."""
    kind: str
    old: str
    new: str
    seen: str
    """What a user would meet."""
    survives: str = ""
    """Why no test finds it; empty for one that has to be found."""

    @property
    def path(self) -> Path:
        """Its file, relative to the root."""
        return SOURCES / self.file

    @property
    def room(self) -> str:
        return self.file.split("/")[0].removesuffix(".py")

    def applied(self, text: str) -> str:
        """The text of its file with the change. Raises ValueError unless the old text is there once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the old text is {count} times in {self.file}")
        return text.replace(self.old, self.new)

    def line(self, text: str) -> int:
        """The line that changes, counted from 1."""
        pairs = zip(text.splitlines(), self.applied(text).splitlines(), strict=True)
        return next(number for number, (old, new) in enumerate(pairs, 1) if old != new)


def mutants() -> tuple[Mutant, ...]:
    """All of the list."""
    return tuple(Mutant(**each) for each in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"])


def marked(text: str, of_file: list[Mutant]) -> str:
    """The text of a file in which each statement that a mutant changes first notes which test runs it."""
    tree = ast.parse(text)
    for mutant in of_file:
        body, at = _place_of(tree, mutant.line(text))
        note = f"__import__('tests.mutants.marks', fromlist=['note']).note({mutant.name!r})"
        body.insert(at, ast.parse(note).body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _place_of(tree: ast.Module, line: int) -> tuple[list[ast.stmt], int]:
    """The innermost statement on a line: the block that it is in, and its position there."""
    found = [
        (block, at)
        for block in _blocks(tree)
        for at, each in enumerate(block)
        # Notes have no place in the file: those that were put in before are passed over.
        if not _is_note(each) and each.lineno <= line <= (each.end_lineno or each.lineno)
    ]
    return max(found, key=lambda place: place[0][place[1]].lineno)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _is_note(statement: ast.stmt) -> bool:
    return "tests.mutants.marks" in ast.unparse(statement) if isinstance(statement, ast.Expr) else False
