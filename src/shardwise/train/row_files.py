"""Files of rows, found and checked without torch: lines of JSON, parquet, folders of images. A row is a dict.

    reviews.jsonl     {"text": "good", "label": 1}     rows 0 and 1 are lines 1 and 3; places are held, not values
                      (blank)
                      {"text": "bad", "label": 0}
    part-*.parquet    columns                          held in memory, in the types of arrow
    pictures/cat/1.png                                 {"image": the picture, "label": 0}: a class for each folder

`where` says of a row which line or file it is, for messages.
"""

import difflib
import importlib.util
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from shardwise.errors import DataError, few_of

IMAGE, LABEL = "image", "label"
"""Columns of a folder of images."""
_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
NEEDS_DATASETS = 'data.format saved or hub needs the package datasets; pip install "shardwise[datasets]"'
_NEEDS_PYARROW = 'parquet needs the package pyarrow; pip install "shardwise[datasets]"'

RowCheck = Callable[[Mapping[str, Any]], str | None]
"""f(row) -> what is wrong with it."""


def files_of(source: str, folder: Path, pattern: str = "*") -> list[Path]:
    """The files that `source` names: one, those of a glob, or those of `pattern` below a directory; sorted."""
    root = folder / source
    if "*" in source:
        found = [folder / each for each in glob(source, root_dir=folder, recursive=True)]
    else:
        found = list(root.rglob(pattern)) if root.is_dir() else [root]
    return sorted(each for each in found if each == root or each.is_file())


class JsonRows:
    """Lines of JSON, an object each; blank lines are no rows.

    Their places are known to every rank. Parsing takes long: with share = (rank, size) this rank parses every
    size-th row. What it has found is in `problems`, by the number of the row, and `check` has seen the row.
    """

    def __init__(self, paths: Sequence[Path], *, check: RowCheck, share: tuple[int, int] = (0, 1)) -> None:
        self._paths = list(paths)
        self._files, self._starts = array("q"), array("q")
        self._sizes, self._numbers = array("q"), array("q")
        self.problems: list[tuple[int, str]] = []
        for at, path in enumerate(self._paths):
            start = 0
            for number, line in enumerate(_lines_of(path), 1):
                if line.strip():
                    row = len(self)
                    for places, value in zip(self._places(), (at, start, len(line), number), strict=True):
                        places.append(value)
                    if row % share[1] == share[0]:
                        try:
                            problem = check(_object_in(line))
                        except ValueError as error:
                            problem = str(error)
                        self.problems += [(row, f"{path.name} line {number}: {problem}")] if problem else []
                start += len(line)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> dict[str, Any]:
        at, start, size, _ = (places[number] for places in self._places())
        # Opened for each row: workers of a DataLoader and threads share no position in a file then.
        with self._paths[at].open("rb") as file:
            file.seek(start)
            line = file.read(size)
        try:
            return _object_in(line)
        except ValueError as error:
            raise DataError(f"{self.where(number)}: {error}; the file has changed since the run began") from error

    def where(self, number: int) -> str:
        """File and line."""
        return f"{self._paths[self._files[number]].name} line {self._numbers[number]}"

    def _places(self) -> tuple["array[int]", ...]:
        return self._files, self._starts, self._sizes, self._numbers


def _lines_of(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _object_in(line: bytes) -> dict[str, Any]:
    """Raises ValueError, in words, for a line that is no JSON object."""
    try:
        # Some programs begin a file with a byte order mark.
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}, not an object with columns")
    return found


class ParquetRows:
    """Rows of parquet files, in memory."""

    def __init__(self, paths: Sequence[Path], *, columns: Sequence[str] | None) -> None:
        """columns: those to read; None: all."""
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DataError(_NEEDS_PYARROW) from error
        try:
            tables = [pyarrow.parquet.read_table(path, columns=columns) for path in paths]
            self._table = pyarrow.concat_tables(tables)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{few_of([path.name for path in paths])}: {_first_line(error)}") from error
        self._columns = {name: self._table.column(name) for name in self._table.column_names}
        for name in columns or ():
            if nulls := self._columns[name].null_count:
                first = next(at for at, each in enumerate(self._columns[name]) if not each.is_valid)
                raise DataError(f'column "{name}" has {nulls} values that are null, the first in row {first}')

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: column[number].as_py() for name, column in self._columns.items()}

    def where(self, number: int) -> str:
        """The number of the row."""
        return f"row {number}"


class ImageFolders:
    """Images in a folder for each class."""

    def __init__(self, root: Path, classes: Sequence[str]) -> None:
        if unknown := sorted(set(classes_of(root)) - set(classes)):
            raise DataError(
                f"{root} has the folder {unknown[0]}, which is no class; the classes are {few_of(classes, 8)}"
            )
        self._images: list[Path] = []
        self._labels: list[int] = []
        for label, name in enumerate(classes):
            for path in sorted((root / name).rglob("*")):
                if path.suffix.lower() in _IMAGES and path.is_file():
                    if not path.stat().st_size:
                        raise DataError(f"{path} is empty")
                    self._images.append(path)
                    self._labels.append(label)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> dict[str, Any]:
        from PIL import Image

        try:
            with Image.open(self._images[number]) as image:
                image.load()
                return {IMAGE: image, LABEL: self._labels[number]}
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what decoders raise
            raise DataError(f"{self._images[number]} is no image that can be read: {_first_line(error)}") from error

    def where(self, number: int) -> str:
        """The file."""
        return str(self._images[number])


def classes_of(root: Path) -> list[str]:
    """The names of the folders below one, in order."""
    return sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))


def first_problems(kind: str, source: str, folder: Path, wanted: Mapping[str, str]) -> list[str]:
    """What is wrong with rows, as far as file names and first rows show it, before any process starts.

    kind: a format of rows. wanted: setting -> column that it names.
    """
    if kind == "images":
        return _problems_of_images(folder / source)
    if kind in ("saved", "hub") and importlib.util.find_spec("datasets") is None:
        return [NEEDS_DATASETS]
    if kind == "hub":
        return []
    if kind == "saved":
        is_saved = any((folder / source / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
        return [] if is_saved else [f"{folder / source} is no folder of save_to_disk: it has no dataset_info.json"]
    paths = files_of(source, folder, f"*.{kind}")
    if not paths:
        return [f"{source} has no files of rows (*.{kind})"]
    try:
        columns = _first_line_of(paths) if kind == "jsonl" else _schema_of(paths)
    except DataError as error:
        return [str(error)]
    return missing_columns(wanted, columns)


def missing_columns(wanted: Mapping[str, str], columns: Sequence[str]) -> list[str]:
    """A finding for each setting that names a column which is not there, with the nearest one."""
    problems = []
    for key, column in wanted.items():
        if column not in columns:
            near = difflib.get_close_matches(column, columns, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are {few_of(sorted(columns), 8)}"
            problems.append(f'{key}: there is no column "{column}"; {hint}')
    return problems


def _problems_of_images(root: Path) -> list[str]:
    problems = []
    if importlib.util.find_spec("PIL") is None:
        problems.append("data.format images needs the package pillow; pip install pillow")
    if not root.is_dir() or not classes_of(root):
        problems.append(f"{root} has no folders; images are in a folder for each class")
    elif not any(path.suffix.lower() in _IMAGES for path in root.glob("*/**/*")):
        problems.append(f"{root} has no images in its folders ({', '.join(sorted(_IMAGES))})")
    return problems


def _first_line_of(paths: Sequence[Path]) -> list[str]:
    """The columns of the first row."""
    for path in paths:
        for number, line in enumerate(_lines_of(path), 1):
            if line.strip():
                try:
                    return list(_object_in(line))
                except ValueError as error:
                    raise DataError(f"{path.name} line {number}: {error}") from error
    raise DataError(f"{few_of([path.name for path in paths])} has no rows")


def _schema_of(paths: Sequence[Path]) -> list[str]:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(_NEEDS_PYARROW)
    import pyarrow
    import pyarrow.parquet

    try:
        heads = [pyarrow.parquet.ParquetFile(path) for path in paths]
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{few_of([path.name for path in paths])}: {_first_line(error)}") from error
    if not sum(head.metadata.num_rows for head in heads):
        raise DataError(f"{few_of([path.name for path in paths])} has no rows")
    return list(heads[0].schema_arrow.names)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
