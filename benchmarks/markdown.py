"""Tables of results, as Markdown."""

from collections.abc import Sequence
from typing import TypeAlias

Row: TypeAlias = tuple[str, ...]


def markdown(header: Row, rows: Sequence[Row]) -> str:
    """A table whose columns line up as text too."""
    widths = [max(len(row[at]) for row in (header, *rows)) for at in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (header, *rows)
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
