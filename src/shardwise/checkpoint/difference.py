"""Difference: what two checkpoints of any formats hold differently, tensor by tensor, whatever their pieces.

    names       of A and B, ties included  ->  pairs, only in A, only in B
    metadata    shape or dtype differ      ->  a row; a shape that differs is not read
    checksums   two saves of ours, same pieces, same checksums  ->  equal, unread
    elements    the rest in windows, both sides in the same order, compared bit by bit

Each step leaves fewer tensors to the next, which costs more for each.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.checkpoint.comparison import compared, equal_unread
from shardwise.checkpoint.contents import Contents, StoredTensor, printable
from shardwise.checkpoint.destinations import Progress
from shardwise.checkpoint.elements import Elements, ElementValue
from shardwise.checkpoint.outputs import model_of
from shardwise.checkpoint.reading import DataFiles, check_files
from shardwise.checkpoint.sources import with_contents
from shardwise.checkpoint.stores import Address, store_of
from shardwise.checkpoint.windows import PieceReader, check_whole
from shardwise.errors import CheckpointError
from shardwise.rewrite.sections import uncollected
from shardwise.space.boxes import index_of_element

_HEAD = ("tensor", "differs in", "A", "B", "elements", "max |A-B|", "first at")
_MAX_TEXT = 60

Finding = Literal["only in A", "only in B", "shape", "dtype", "values"]
"""What is different: the first of these that is. A difference in dtype has the values compared too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that differs."""

    name: str
    """One that both sides know, where they do."""
    finding: Finding
    a: tuple[str, tuple[int, ...]] | None
    """Its dtype and shape in A; None where it is missing."""
    b: tuple[str, tuple[int, ...]] | None
    num_different: int = 0
    """Elements that differ, where shapes agree."""
    max_difference: float | None = None
    """The largest |a - b|: an int for whole numbers, NaN where one of the two is NaN; None when no element differs."""
    first_index: tuple[int, ...] | None = None
    """Index of the first element that differs, in row-major order."""
    first_a: ElementValue | None = None
    first_b: ElementValue | None = None
    first_shown: tuple[str, str] = ("", "")
    """The two values as text, with their bits where they look alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraDifference:
    """A place in `extra`, or in the settings of optimizers, that differs."""

    place: str
    """Such as `extra.data.position`."""
    a: str | None
    """JSON text in A; None where there is nothing."""
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What `diff` found. As text (`str`) it is a table; `to_json` gives JSON values."""

    a: str
    """What A is, in words: its path, format, step and layout."""
    b: str
    """The same for B."""
    tensors: tuple[TensorDifference, ...]
    """Those that differ, in the order of A, then of B."""
    extra: tuple[ExtraDifference, ...]
    """Where `extra` differs, or the settings of optimizers."""
    extra_compared: bool
    """False where the formats differ, for each has another extra, and where only the model was compared."""
    num_equal: int
    """Tensors that are equal."""
    num_equal_by_checksum: int
    """Of them, those whose data need not be read, because all pieces and all checksums agree."""
    equal_bytes: int
    """Bytes of the equal tensors."""
    notes: tuple[str, ...] = ()
    """What of A or B was not compared, or has a guessed name: see `Contents.notes`."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.tensors and not self.extra

    def __str__(self) -> str:
        return _table(self)

    def to_json(self) -> dict[str, object]:
        """As JSON values; numbers that JSON cannot hold are strings ("nan"), complex numbers are lists of two."""
        rows = [{key: _json(getattr(row, key)) for key in row.__dataclass_fields__} for row in self.tensors]
        return {
            "equal": self.equal,
            "a": self.a,
            "b": self.b,
            "num_equal": self.num_equal,
            "num_equal_by_checksum": self.num_equal_by_checksum,
            "equal_bytes": self.equal_bytes,
            "tensors": rows,
            "extra_compared": self.extra_compared,
            "extra": [{"place": each.place, "a": each.a, "b": each.b} for each in self.extra],
            "notes": list(self.notes),
        }


@uncollected()
def diff(
    a: Address,
    b: Address,
    *,
    step_a: int | None = None,
    step_b: int | None = None,
    model_only: bool = False,
    progress: Progress = lambda done, total: None,
) -> Difference:
    """Compare the checkpoints at `a` and `b`, of any formats that `open` reads, as logical tensors.

    Two elements are equal when they have the same bits: NaN equals NaN of the same bits, and -0.0 differs from 0.0 (by
    0). Where dtypes differ, which counts as a difference, values are compared instead. A tensor is found under every
    name that it is tied to: it is missing only where the other side knows none of them. `extra` and the settings of
    optimizers (not the plan, which belongs to the layout) are compared between checkpoints of one format.

    step_a, step_b: the newest save of that step; the default is the newest of all.
    model_only: leave out the state of optimizers, `extra` and settings.
    Both sides are read in windows, verified where there are checksums. Memory stays below 64 MiB and what the metadata
    takes. Tensors of two saves of ours whose pieces and checksums agree are not read. That their files have all their
    bytes is looked at.
    Raises CheckpointError when one of them is damaged or incomplete.
    """
    stores = store_of(a), store_of(b)

    def compared(*contents: Contents) -> Difference:
        files = DataFiles(stores[0])
        others = DataFiles(stores[1], turns_with=files)
        return _difference((files, others), contents, model_only, progress)

    # Nested: where B is removed meanwhile only B is read anew, and where A is, both are.
    return with_contents(
        stores[0], step_a, lambda ours: with_contents(stores[1], step_b, lambda theirs: compared(ours, theirs))
    )


def _difference(
    files: tuple[DataFiles, DataFiles], contents: Sequence[Contents], model_only: bool, progress: Progress
) -> Difference:
    # Names of optimizers are known by format: this way a save of ours compares with plain weights.
    ours, theirs = map(model_of, contents) if model_only else contents
    sides = ours, theirs
    # A truncated file would pass for equal, where checksums in the metadata settle it.
    for each, side in zip(files, sides, strict=True):
        side.check_tensors(side.tensors)
        check_whole(side, side.tensors.values())
        _check_sizes(each, side)
    pairs, alone = _paired(*sides)
    # Different shapes have no elements in common places, and without elements nothing differs.
    alike = [pair for pair in pairs if pair.finding != "shape" and pair.a.num_bytes]
    read = [p for p in alike if p.finding or not equal_unread(sides[0], p.a.name, sides[1], p.b.name)]
    a, b = PieceReader(files[0], ours), PieceReader(files[1], theirs)
    different = compared({p.name: (p.a.whole, p.b.whole) for p in read}, a.read, b.read, progress=progress)
    rows = [row for pair in pairs if (row := _row(pair, different.get(pair.name)))] + alone
    equal = [pair for pair in pairs if pair.finding is None and pair.name not in different]
    # Each format has its own things in extra, so that any two formats would differ.
    extra_compared = sides[0].format == sides[1].format and not model_only
    return Difference(
        a=_words(sides[0]),
        b=_words(sides[1]),
        tensors=tuple(rows),
        extra=tuple(_extra_differences(*sides)) if extra_compared else (),
        extra_compared=extra_compared,
        num_equal=len(equal),
        num_equal_by_checksum=len(alike) - len(read),
        equal_bytes=sum(pair.a.num_bytes for pair in equal),
        notes=tuple(f"{side}: {note}" for side, each in zip("AB", contents, strict=True) for note in each.notes),
    )


def _check_sizes(files: DataFiles, side: Contents) -> None:
    """Raise CheckpointError where data is missing that a comparison by checksums would not read."""
    names = sorted({piece.file for tensor in side.tensors.values() for piece in tensor.pieces})
    if findings := [each for *_, found in check_files(files, side, names, heads=()) for each in found]:
        raise CheckpointError(*findings, about=f"{side.location} is not as it was written")


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor that both sides have."""

    name: str
    a: StoredTensor
    b: StoredTensor

    @property
    def finding(self) -> Literal["shape", "dtype"] | None:
        """What differs by the metadata."""
        if self.a.shape != self.b.shape:
            return "shape"
        return "dtype" if self.a.dtype != self.b.dtype else None


def _paired(a: Contents, b: Contents) -> tuple[list[_Pair], list[TensorDifference]]:
    """The tensors that both sides know under one of their names, each pair once, and those that one side lacks."""
    pairs: dict[tuple[str, str], _Pair] = {}
    for name in dict.fromkeys([*a.tensors, *a.aliases]):
        ours, theirs = _find(a, name), _find(b, name)
        if ours is not None and theirs is not None:
            # By the stored names: a tied tensor is met under each of its names, and compared once.
            pairs.setdefault((ours.name, theirs.name), _Pair(name, ours, theirs))
    # A tensor that is tied to one of the other side is met, though its own name is unknown there.
    met_a, met_b = {key[0] for key in pairs}, {key[1] for key in pairs}
    alone = [
        TensorDifference(name=each.name, finding="only in A", a=(each.dtype, each.shape), b=None)
        for each in a.tensors.values()
        if each.name not in met_a
    ]
    alone += [
        TensorDifference(name=each.name, finding="only in B", a=None, b=(each.dtype, each.shape))
        for each in b.tensors.values()
        if each.name not in met_b
    ]
    return list(pairs.values()), alone


def _find(contents: Contents, name: str) -> StoredTensor | None:
    return contents.tensors.get(name) or contents.tensors.get(contents.aliases.get(name, name))


def _row(pair: _Pair, elements: Elements | None) -> TensorDifference | None:
    """The row of a pair; None when it is equal."""
    if pair.finding is None and elements is None:
        return None
    row = TensorDifference(
        name=pair.name,
        finding=pair.finding or "values",
        a=(pair.a.dtype, pair.a.shape),
        b=(pair.b.dtype, pair.b.shape),
    )
    if elements is None:
        return row
    return replace(
        row,
        num_different=elements.num_different,
        max_difference=elements.max_difference,
        first_index=index_of_element(pair.a.shape, elements.first),
        first_a=elements.a,
        first_b=elements.b,
        first_shown=(elements.a_shown, elements.b_shown),
    )


def _extra_differences(a: Contents, b: Contents) -> Iterator[ExtraDifference]:
    yield from _json_differences("extra", dict(a.extra), dict(b.extra))
    # Of the settings only what training depends on: two layouts of one run have different plans.
    ours, theirs = a.settings.get("optimizers", []), b.settings.get("optimizers", [])
    yield from _json_differences("settings.optimizers", ours, theirs)


# None is a JSON value: an absent key is something else than null.
_NOTHING = object()


def _json_differences(place: str, a: object, b: object) -> Iterator[ExtraDifference]:
    """The innermost places at which two JSON values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            yield from _json_differences(f"{place}.{key}", a.get(key, _NOTHING), b.get(key, _NOTHING))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for at, (mine, yours) in enumerate(zip(a, b, strict=True)):
            yield from _json_differences(f"{place}[{at}]", mine, yours)
    # As text: 1 and 1.0 and True are equal in Python, and NaN is not equal to itself.
    elif (ours := _text(a)) != (theirs := _text(b)):
        yield ExtraDifference(place=place, a=ours, b=theirs)


def _text(value: object) -> str | None:
    return None if value is _NOTHING else json.dumps(value, sort_keys=True)


def _words(contents: Contents) -> str:
    step = [] if contents.step is None else [f"step {contents.step}"]
    layout = [contents.layout] if contents.layout else []
    return f"{contents.location} ({', '.join([contents.format, *step, *layout])})"


def _json(value: object) -> object:
    # json.dumps writes NaN and Infinity, which no other reader of JSON knows.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, complex):
        return [_json(value.real), _json(value.imag)]
    if isinstance(value, tuple):
        return [_json(each) for each in value]
    return value


def _table(difference: Difference) -> str:
    """What differs, what was not compared, and how much is equal."""
    lines = [f"A: {difference.a}", f"B: {difference.b}"]
    if difference.tensors:
        lines += ["", *_aligned([_HEAD, *map(_cells_of_row, difference.tensors)])]
    if difference.extra:
        rows = [(printable(each.place), _short(each.a), _short(each.b)) for each in difference.extra]
        lines += ["", *_aligned([("beside the tensors", "A", "B"), *rows])]
    notes = [f"note: {printable(each)}" for each in difference.notes]
    return "\n".join([*lines, "", _closing(difference), *notes])


def _size(num_bytes: float) -> str:
    """Bytes in three digits or so."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def _closing(difference: Difference) -> str:
    num_tensors = difference.num_equal + len(difference.tensors)
    text = f"{difference.num_equal:,} of {num_tensors:,} tensors are equal ({_size(difference.equal_bytes)}"
    if difference.num_equal_by_checksum:
        text += f"; {difference.num_equal_by_checksum:,} of them by their checksums, unread"
    text += ")"
    if not difference.extra_compared:
        return text + "; extra was not compared"
    return text + ("; extra differs" if difference.extra else "; extra is equal")


def _cells_of_row(row: TensorDifference) -> tuple[str, ...]:
    a, b = _cells(row)
    name = printable(row.name)
    if row.first_index is None or row.a is None:
        # Another dtype with the same values: the row says that none differs, instead of nothing.
        same = row.finding == "dtype"
        return name, row.finding, a, b, "none" if same else "", "0" if same else "", ""
    counted = f"{row.num_different:,} of {math.prod(row.a[1]):,}"
    largest = "" if row.max_difference is None else _number(row.max_difference)
    return name, row.finding, a, b, counted, largest, _index(row.first_index)


def _cells(row: TensorDifference) -> tuple[str, str]:
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
