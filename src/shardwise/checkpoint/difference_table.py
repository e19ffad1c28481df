"""The text of a difference: a table with a row for everything that differs, and a line on what is equal."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.checkpoint.names import printable

if TYPE_CHECKING:
    from shardwise.checkpoint.difference import Difference, TensorDifference

__all__ = ["table"]

_HEAD = ("tensor", "differs in", "A", "B", "elements", "max |A-B|", "first at")
_MAX_TEXT = 60


def table(difference: "Difference") -> str:
    """What differs, what was not compared, and how much is equal."""
    lines = [f"A: {difference.a}", f"B: {difference.b}"]
    if difference.tensors:
        lines += ["", *_aligned([_HEAD, *map(_row, difference.tensors)])]
    if difference.extra:
        rows = [(printable(each.place), _short(each.a), _short(each.b)) for each in difference.extra]
        lines += ["", *_aligned([("beside the tensors", "A", "B"), *rows])]
    return "\n".join([*lines, "", _closing(difference)])


def _size(num_bytes: float) -> str:
    """Bytes in three digits or so."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def _closing(difference: "Difference") -> str:
    num_tensors = difference.num_equal + len(difference.tensors)
    text = f"{difference.num_equal:,} of {num_tensors:,} tensors are equal ({_size(difference.equal_bytes)}"
    if difference.num_equal_by_checksum:
        text += f"; {difference.num_equal_by_checksum:,} of them by their checksums, unread"
    text += ")"
    if not difference.extra_compared:
        return text + "; extra was not compared"
    return text + ("; extra differs" if difference.extra else "; extra is equal")


def _row(row: "TensorDifference") -> tuple[str, ...]:
    a, b = _cells(row)
    name = printable(row.name)
    if row.first_index is None or row.a is None:
        same = row.finding == "dtype"
        return name, row.finding, a, b, "none" if same else "", "0" if same else "", ""
    counted = f"{row.num_different:,} of {math.prod(row.a[1]):,}"
    largest = "" if row.max_difference is None else _number(row.max_difference)
    return name, row.finding, a, b, counted, largest, _index(row.first_index)


def _cells(row: "TensorDifference") -> tuple[str, str]:
    """What A and B say to the finding."""
    if row.finding == "values":
        return row.first_shown
    if row.a is None or row.b is None:
        return _kind(row.a), _kind(row.b)
    if row.finding == "shape":
        return _index(row.a[1]), _index(row.b[1])
    a, b = row.first_shown
    return f"{row.a[0]} {a}".rstrip(), f"{row.b[0]} {b}".rstrip()


def _kind(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "-" if kind is None else f"{kind[0]} {_index(kind[1])}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _index(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values))}]"


def _short(text: str | None) -> str:
    if text is None:
        return "-"
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 4]} ..."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side; the last is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]
