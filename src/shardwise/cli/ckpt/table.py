"""Tables as text: columns as wide as their widest cell, nothing cut off."""

from collections.abc import Sequence

import click


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: frozenset[str]) -> None:
    """Print rows below a header; the columns in `numbers` end alike, the others begin alike."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        ).rstrip()

    click.secho(line(header), bold=True)
    for row in rows:
        click.echo(line(row))


def plural(number: int, noun: str) -> str:
    """A number and its noun: "1 file", "2 files"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
