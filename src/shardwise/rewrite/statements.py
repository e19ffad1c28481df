"""Statements: what one line of a rewrite says, as data; and findings, what is wrong with one, shown at its place."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.errors import RewriteError
from shardwise.rewrite.verbs.operation import Operation


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Where something stands in the text of a rewrite."""

    line: int
    """Counted from 1, through all statements."""
    column: int
    """Of the first character, counted from 1."""
    width: int
    """Number of characters."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder: `$LAYER_ID` stands for the digits that keys have there, the same in the whole statement."""

    name: str
    """Without the dollar sign."""
    shift: int = 0
    """Added to the number: -1 for `$LAYER_ID-1`, and for `$LAYER_ID_OFFSET` on the right."""

    def __str__(self) -> str:
        return f"${self.name}" + (f"{self.shift:+d}" if self.shift else "")


@dataclass(frozen=True, slots=True)
class Star:
    """`*`: stands for all digits that keys have there, in numeric order; the name becomes as many names."""

    def __str__(self) -> str:
        return "*"


@dataclass(frozen=True, slots=True)
class Rest:
    """`**`: stands for all that names have from there on, the same in the whole statement; the end of a name."""

    def __str__(self) -> str:
        return REST


REST = "**"

NamePart: TypeAlias = str | Placeholder | Star | Rest


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a tensor, or of many that are alike."""

    parts: tuple[NamePart, ...]
    """Text, placeholders, at most one star; or text and a rest. A single text part is the name itself. Never empty."""
    transposed: bool
    """Whether `^T` follows it (left side only): all dims are reversed before anything else happens."""
    place: TextPlace

    @property
    def plain(self) -> str | None:
        """The name itself, where it is one."""
        # Most names of most rewrites are plain, and skip all matching.
        return self.parts[0] if len(self.parts) == 1 and isinstance(self.parts[0], str) else None

    @property
    def text(self) -> str:
        """The name as messages show it: without quotes, with `$LAYER_ID+1` and `*`."""
        return "".join([part if isinstance(part, str) else str(part) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement. `left` or `right` has exactly one name (before stars and arrays are expanded)."""

    left: tuple[Name, ...]
    """Empty: `_ -> b`, b keeps its current value."""
    right: tuple[Name, ...]
    """Empty: `a -> _`, a is dropped."""
    operations: tuple[Operation, ...]
    optional: bool
    """Whether it may match nothing (`optional=1`)."""
    place: TextPlace
    text: str
    """As it was written, for messages; of statements that were derived: as it would be written."""
    gaps: bool = False
    """Whether the numbers of a star that stacks may be others than 0, 1, 2 and so on (`gaps=1`)."""


Faults: TypeAlias = list[tuple[TextPlace, str]]
"""What is wrong within one statement, and where: findings, before their statement is known."""

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
        # The place of a name lies within the statement; `start` says where the text begins, so that carets can be
        # counted.
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
        # A derived statement has the place of the one that it undoes, and maybe fewer lines: no line of it has the
        # fault.
        if not 0 <= index < len(written):
            return [f"    {_plain(line)}" for line in written]
        line = _plain(written[index])
        first = self.place.column - (start.column if index == 0 else 1)
        # A name in quotes may end on a later line of the statement: carets stop with this one.
        stop = min(first + self.place.width, len(line))
        indent = 0 if index == 0 else len(line) - len(line.lstrip())
        line, first, stop = line[indent:], first - indent, stop - indent
        line, first, stop = _around(line.rstrip(), first, stop)
        return [f"    {line}", f"    {' ' * first}{'^' * max(stop - first, 1)}"]


def _plain(line: str) -> str:
    """The same number of characters, each of them visible."""
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
    # In the order of the text, however they were found.
    ordered = sorted(findings, key=lambda each: (each.place.line, each.place.column))
    if ordered:
        raise RewriteError(*map(str, ordered))
