"""Explanation: what becomes of what, as a table: target, box, source, box, operations.

A line is a box of a target that is a box of a source. In a long table lines that differ in the numbers of their names
only become one: `layers.{0..31}.w`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.nodes import Correspondence
from shardwise.rewrite.strided_views import Fragment, fill_of, scales_of
from shardwise.space import Box

_LONG = 40
"""Lines from which on lines that are alike become one."""

_DIGITS = re.compile("[0-9]+")
_HEADINGS = ("target", "box", "source", "box", "operations")


_Cells: TypeAlias = tuple[str, str, str, str, str]
"""A row of the table."""


class _Line(NamedTuple):
    """A line of the table; of names what stands between their numbers is in `target` and `source`."""

    target: tuple[str, ...]
    source: tuple[str, ...]
    cells: tuple[str, str, str]
    """Box of the target, box of the source, operations."""


class _Numbered(NamedTuple):
    """A line, and the numbers in the names of its target and source."""

    line: _Line
    target: tuple[str, ...]
    source: tuple[str, ...]


def explain(checked: Correspondence, ties: Mapping[str, str], added: Collection[str], dropped: Collection[str]) -> str:
    """Return the table. Numbers in braces stand for all of a range, the same place in each column at once.

    ties: other names of outputs. added: targets that keep what they have. dropped: sources without an element in an
    output.
    """
    lines = [_numbered(*each) for each in _lines(checked)]
    lines += [_numbered(alias, "", ("", "", f"tied to {name}")) for alias, name in ties.items()]
    lines += [_numbered(name, "", ("", "", "added: keeps its value")) for name in sorted(added)]
    for name in sorted(dropped):
        shape = checked.sources[name].shape
        lines.append(_numbered("", name, ("", _shown((0,) * len(shape), shape), "dropped")))
    rows = [_row(each) for each in lines] if len(lines) < _LONG else _folded(lines)
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (_HEADINGS, *rows))


def _lines(checked: Correspondence) -> Iterator[tuple[str, str, tuple[str, str, str]]]:
    """Of outputs: target, source, and the cells next to them."""
    for name, meta in checked.outputs.items():
        if (step := checked.quantised(name)) is not None and checked.is_scales(name):
            yield name, "", (_shown((0,) * len(meta.shape), meta.shape), "", f"scales of blocks of {list(step.block)}")
            continue
        whole = Box((0,) * len(meta.shape), meta.shape)
        # In the order of the target, as a reader would look for a box.
        fragments = sorted(checked.resolve(name, whole), key=lambda each: each.first)
        for each in fragments:
            if (fill := fill_of(each.other)) is not None:
                casts = [" -> ".join(each.dtypes)] if len(each.dtypes) > 1 else []
                yield name, "", (_target_box(meta.shape, each), "", ", ".join([f"fill {fill}", *casts]))
                continue
            source = checked.sources[each.other]
            yield (
                name,
                each.other,
                (
                    _target_box(meta.shape, each),
                    _shown(each.offset, each.shape),
                    ", ".join(
                        filter(None, [_operations(meta, source, each), f"quantised to {meta.dtype}" if step else ""])
                    ),
                ),
            )
        if not fragments:
            yield name, "", (_shown(whole.offset, whole.shape), "", "no elements")


def _shown(offset: Sequence[int], shape: Sequence[int]) -> str:
    """A box as an index is written: [0:4, 2:8]."""
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True)) + "]"


def _target_box(shape: tuple[int, ...], fragment: Fragment) -> str:
    """The indices of the target that a fragment has; `0:16:2` where it has every other."""
    counts = [1] * len(shape)
    steps = [1] * len(shape)
    for (dim, step), size in sorted(zip(fragment.dims, fragment.shape, strict=True), key=lambda each: each[0][1]):
        if size > 1:
            steps[dim] = step if counts[dim] == 1 else steps[dim]
            counts[dim] *= size
    parts = []
    for start, count, step in zip(fragment.first, counts, steps, strict=True):
        parts.append(f"{start}:{start + (count - 1) * step + 1}" + (f":{step}" if step != 1 else ""))
    return "[" + ", ".join(parts) + "]"


def _operations(target: TensorMeta, source: TensorMeta, fragment: Fragment) -> str:
    """What is done with the elements on the way, in words."""
    done = []
    moving = [dim for (dim, _), size in zip(fragment.dims, fragment.shape, strict=True) if size > 1]
    places = [place for place, size in enumerate(fragment.shape) if size > 1]
    steps = [step for (_, step), size in zip(fragment.dims, fragment.shape, strict=True) if size > 1]
    if len(set(moving)) < len(moving) or any(step != 1 for step in steps):
        done.append("reshape")
    elif moving != places and len(target.shape) == len(source.shape):
        done.append(_permute(target, source, fragment))
    elif len(target.shape) != len(source.shape):
        done.append("reshape")
    dtypes = fragment.dtypes
    if (scales := scales_of(dtypes)) is not None:
        done.append(f"times {scales.source} by blocks of {list(scales.block)}")
        dtypes = (dtypes[0], *dtypes[2:])
    if len(dtypes) > 1:
        done.append(" -> ".join(dtypes))
    return ", ".join(done)


def _permute(target: TensorMeta, source: TensorMeta, fragment: Fragment) -> str:
    """By which permute the dims that have several indices came into their order."""
    if len(target.shape) != len(source.shape):
        return "permute, reshape"
    order: dict[int, int] = {
        dim: place
        for place, ((dim, step), size) in enumerate(zip(fragment.dims, fragment.shape, strict=True))
        if step and size > 1
    }
    rest = [place for place in range(len(source.shape)) if place not in order.values()]
    if list(order.items()) == [(len(order) - 1 - place, place) for place in range(len(target.shape))]:
        return "transpose"
    dims = [order[dim] if dim in order else rest.pop(0) for dim in range(len(target.shape))]
    return "transpose" if dims == [1, 0] else f"permute {dims}"


# Folding


def _numbered(target: str, source: str, cells: tuple[str, str, str]) -> _Numbered:
    parts = _Line(tuple(_DIGITS.split(target)), tuple(_DIGITS.split(source)), cells)
    return _Numbered(parts, tuple(_DIGITS.findall(target)), tuple(_DIGITS.findall(source)))


def _row(each: _Numbered) -> _Cells:
    target_box, source_box, operations = each.line.cells
    return (
        _name(each.line.target, each.target),
        target_box,
        _name(each.line.source, each.source),
        source_box,
        operations,
    )


def _name(parts: Sequence[str], numbers: Sequence[str]) -> str:
    return "".join([text + number for text, number in zip(parts, (*numbers, ""), strict=True)])


def _folded(lines: Sequence[_Numbered]) -> list[_Cells]:
    """Lines as rows of the table, those that are alike as one, at the place of the first."""
    alike: dict[object, list[_Numbered]] = {}
    for each in lines:
        alike.setdefault(_key(each), []).append(each)
    return [row for many in alike.values() for row in _ranges(many)]


def _key(each: _Numbered) -> object:
    """What lines have in common that may become one: all but numbers; also these, if they are written with zeros."""
    numbers = each.target + each.source
    return each.line, numbers if any(number[0] == "0" != number for number in numbers) else ()


class _ShownRanges(NamedTuple):
    """Lines that are one: of each number in the names of target and source the first and the last."""

    bounds: tuple[tuple[int, int], ...]
    moved: tuple[int, ...]
    """Which numbers of the source are ranges, from the left; -1 where a range of the target has one source."""


def _ranges(many: Sequence[_Numbered]) -> Iterator[_Cells]:
    """Lines that are alike as few rows: their numbers as ranges."""
    if len(many) == 1:
        yield _row(many[0])
        return
    width = len(many[0].target)
    parts = [_ShownRanges(tuple([(int(n), int(n)) for n in (*each.target, *each.source)]), ()) for each in many]
    primary = width or len(parts[0].bounds)
    # Figure 1. Lines fold along the last number first, then along the ones before::
    #
    #     l.0.e.0  l.0.e.1  l.1.e.0  l.1.e.1     ->     l.0.e.{0..1}  l.1.e.{0..1}     ->     l.{0..1}.e.{0..1}
    for column in reversed(range(primary)):
        parts = _merged(parts, column, primary)
    for part in parts:
        shown = [str(low) if low == high else f"{{{low}..{high}}}" for low, high in part.bounds]
        yield _row(_Numbered(many[0].line, tuple(shown[:width]), tuple(shown[width:])))


def _merged(parts: Iterable[_ShownRanges], column: int, primary: int) -> list[_ShownRanges]:
    """Join what goes on where another ends along one of the first `primary` columns, and agrees in their rest."""
    rows: dict[object, list[_ShownRanges]] = {}
    for part in parts:
        bounds = part.bounds
        rows.setdefault((bounds[:column], bounds[column + 1 : primary], part.moved), []).append(part)
    merged: list[_ShownRanges] = []
    for row in rows.values():
        row.sort(key=lambda part: part.bounds[column])
        before, current, step = row[0].moved, row[0], None
        for part in row[1:]:
            moved = _moved(current.bounds, part.bounds, before, column, primary)
            if moved is not None and step in (None, moved):
                step = moved
                joined = [
                    (one[0], max(one[1], other[1])) for one, other in zip(current.bounds, part.bounds, strict=True)
                ]
                current = _ShownRanges(tuple(joined), moved)
            else:
                merged.append(current)
                current, step = part, None
        merged.append(current)
    return merged


def _moved(
    one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]], before: tuple[int, ...], column: int, primary: int
) -> tuple[int, ...] | None:
    """Which numbers of the source are ranges once two parts are one; None where they cannot be one.

    A reader pairs the ranges of the target with those of the source from the left. So each has its own, in this order,
    or all of the target have one source.
    """
    going = [place for place in range(primary, len(one)) if one[place] != other[place]]
    if not _follows(one[column], other[column]) or not all(_follows(one[place], other[place]) for place in going):
        return None
    if not going:
        return (-1,) if before in ((), (-1,)) else None
    if len(going) > 1 or (before and going[0] >= before[0]):
        return None
    return (going[0], *before)


def _follows(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a range begins where another ends."""
    return other[0] == one[1] + 1
