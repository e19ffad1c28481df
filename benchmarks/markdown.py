"""Tables of results, as Markdown, and the pages that have them."""

import os
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TypeAlias

import torch

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


def write_page(path: Path, program: str, title: str, reading: str, table: str, *, load_before: float) -> None:
    """Write tables with how they were made, and how to read them. load_before: the machine's, by `os.getloadavg`."""
    command = shlex.join(["python", "-m", program, *sys.argv[1:]])
    made = f"Made by `{command}` on {date.today()}: {torch.__version__}, Python {sys.version.split()[0]}."
    load = f"Load of the machine, of {os.cpu_count()} cores: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after."
    path.write_text("\n\n".join([f"# {title}", f"{made} {load} {reading}", table]) + "\n")
