"""Findings: what is wrong in a rewrite, shown at its place in the statement."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.errors import RewriteError
from shardwise.rewrite.statements import Statement, TextPlace

__all__ = ["SHOWN", "Faults", "StatementFinding", "raise_all"]

Faults: TypeAlias = list[tuple[TextPlace, str]]
"""What is wrong within one statement, and where: findings, before they are told of which statement."""

SHOWN = 3
"""Instances or combinations that one finding names; of more it says how many there are."""

_SHOWN_WIDTH = 100
"""Characters shown of a line; of longer ones, those around the fault."""


@dataclass(frozen=True, slots=True)
class StatementFinding:
    """One thing that is wrong; `str()` shows the message, the statement with carets, and what it was expanded to."""

    place: TextPlace
    """What is wrong: carets stand under it."""
    text: str
    """The statement as it was written."""
    message: str
    """What was asked, what holds, what to do."""
    expansion: tuple[str, ...] = ()
    """What became of the statement before the fault showed: from the first expansion to the last."""
    start: TextPlace | None = None
    """Where the statement begins; None: at the place."""

    @classmethod
    def of(
        cls, statement: Statement, message: str, *, at: TextPlace | None = None, expansion: Iterable[str] = ()
    ) -> "StatementFinding":
        """Return a finding about a statement, at the place of one of its names, or of all of it."""
        return cls(at or statement.place, statement.text, message, tuple(expansion), statement.place)

    def __str__(self) -> str:
        """Several lines, without a newline at the end."""
        lines = [f"line {self.place.line}, column {self.place.column}: {self.message}", *self._shown()]
        return "\n".join([*lines, *(f"    in: {each}" for each in self.expansion)])

    def _shown(self) -> list[str]:
        """The line of the statement in which the fault is, and carets under it."""
        start = self.start or self.place
        written = self.text.split("\n")
        index = self.place.line - start.line
        if not 0 <= index < len(written):
            return [f"    {_plain(line)}" for line in written]
        line = _plain(written[index])
        first = self.place.column - (start.column if index == 0 else 1)
        stop = min(first + self.place.width, len(line))
        indent = 0 if index == 0 else len(line) - len(line.lstrip())
        line, first, stop = line[indent:], first - indent, stop - indent
        line, first, stop = _around(line.rstrip(), first, stop)
        return [f"    {line}", f"    {' ' * first}{'^' * max(stop - first, 1)}"]


def _plain(line: str) -> str:
    """As many characters, all of which are shown, each as one."""
    return "".join(character if character.isprintable() else " " for character in line)


def _around(line: str, first: int, stop: int) -> tuple[str, int, int]:
    """What is shown of a long line: what stands around a part of it; and the part in what is shown."""
    if len(line) <= _SHOWN_WIDTH:
        return line, first, stop
    begin = max(0, min(first - _SHOWN_WIDTH // 3, len(line) - _SHOWN_WIDTH))
    end = begin + _SHOWN_WIDTH
    before, after = "... " if begin else "", " ..." if end < len(line) else ""
    moved = len(before) - begin
    return before + line[begin:end] + after, first + moved, min(stop, end) + moved


def raise_all(findings: Iterable[StatementFinding]) -> None:
    """Raise one RewriteError that carries all findings, in the order of their places; nothing where there are none."""
    ordered = sorted(findings, key=lambda each: (each.place.line, each.place.column))
    if ordered:
        raise RewriteError(*map(str, ordered))
