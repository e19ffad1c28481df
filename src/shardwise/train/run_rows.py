"""The rows of a run: of files, of saved datasets and of those that `load_dataset` finds, or of a callable.

read_rows       training rows, held-out rows if there are any, and how they become samples and batches
columns, text   -> `RowEncoder`; without both, rows go to `data.collate` as they are
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.comm.agreement import json_as, understood
from shardwise.data.row_sources import TensorRows, as_opened, has_items
from shardwise.errors import ConfigError, DataError, ShardwiseError, in_words
from shardwise.train.config import RunConfig
from shardwise.train.data_settings import PACKING, PADDING, DataTable
from shardwise.train.references import arguments_of, made, resolve
from shardwise.train.row_encoding import EncodedRows, EncodedStream, Padding, RowEncoder
from shardwise.train.row_files import (
    NEEDS_DATASETS,
    ImageFolders,
    JsonRows,
    ParquetRows,
    classes_of,
    files_of,
    missing_columns,
)
from shardwise.train.run_tokenizer import RunTokenizer, tokenizer_of

Collator = Callable[[list[Any]], Any]
"""f(samples) -> a batch."""

_SHARE = tuple[list[tuple[int, str]], int] | None
_TOLD = tuple[tuple[_SHARE, _SHARE], list[str]]
"""Of what a rank has seen: for the rows of training and those held out the first problems, and how many there are; and
the columns with fractions."""

_SHOWN = 3
"""Bad lines that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRows:
    """What [data] reads that is no text."""

    training: Any
    held_out: Any
    """None where nothing but a part of `training` is there for evaluations."""
    encoder: RowEncoder
    is_encoded: bool
    """Whether rows become samples by `encoder`, or go to `collate` as they are."""
    tokenizer: RunTokenizer | None
    collate: Collator | None
    """None: torch's `default_collate`."""

    def samples(self, rows: Any) -> Any:
        """The rows as a dataset of samples."""
        if rows is None or not self.is_encoded:
            return rows
        if has_items(rows) and hasattr(rows, "__len__"):
            return EncodedRows(rows, self.encoder)
        if (opened := as_opened(rows)) is not None:
            return EncodedStream(opened, self.encoder)
        raise DataError(
            f"data: columns of a {type(rows).__name__} cannot be read; it has neither __len__ and __getitem__ nor open"
        )

    def told(self) -> bytes:
        """What this rank has seen in its share of the rows of JSON."""
        problems = [
            None if not isinstance(each, JsonRows) else [each.problems[:_SHOWN], len(each.problems)]
            for each in (self.training, self.held_out)
        ]
        return json.dumps([problems, sorted(self.encoder.fractions)]).encode()

    def take(self, told: Sequence[bytes], data: DataTable) -> None:
        """Take what all ranks have seen. Raises DataError with the first bad lines, the same on all ranks."""
        found = understood(told, json_as(_TOLD), purpose="rows of JSON")
        self.encoder.fractions.update(name for _, fractions in found for name in fractions)
        for at, key in enumerate(("source", "source" if data.held_out_source is None else "held_out_source")):
            shares = [problems[at] for problems, _ in found if problems[at] is not None]
            if first := sorted(tuple(each) for share, _ in shares for each in share)[:_SHOWN]:
                others = sum(number for _, number in shares) - len(first)
                more = f"; {others} more lines are wrong" if others else ""
                raise DataError(f"data.{key}: {'; '.join(text for _, text in first)}{more}")


def read_rows(config: RunConfig, share: tuple[int, int] = (0, 1)) -> RunRows:
    """The rows of [data]. Raises ConfigError or DataError for what cannot be read.

    share: of `JsonRows`. Where several ranks share the rows, each has to `take` what all of them have `told`.
    """
    data, folder = config.data, config.folder
    tokenizer = tokenizer_of(data, folder) if data.has_rows and data.reads_tokens else None
    classes = data.classes
    if classes is None and data.format == "images":
        classes = classes_of(folder / data.source)
    encoder = RowEncoder(data, tokenizer, classes)
    is_of_own = data.collate not in (None, PADDING, PACKING)
    names_columns = bool(data.columns) or data.reads_tokens
    is_encoded = names_columns or (data.dataset is None and not is_of_own)
    read = partial(_rows_of, config, encoder if is_encoded else None, classes, share=share)
    rows = RunRows(
        training=read(is_held_out=False),
        held_out=read(is_held_out=True),
        encoder=encoder,
        is_encoded=is_encoded,
        tokenizer=tokenizer,
        collate=_collator(config, tokenizer, is_encoded=is_encoded),
    )
    if share[1] == 1:
        rows.take([rows.told()], data)
    return rows


def _rows_of(
    config: RunConfig, encoder: RowEncoder | None, classes: Any, *, is_held_out: bool, share: tuple[int, int]
) -> Any:
    """Rows to train on, or those for evaluation, which may be None."""
    data = config.data
    options = {**data.dataset_options, **(data.held_out_options if is_held_out else {})}
    if data.dataset is not None:
        name = "held_out_dataset" if is_held_out else "dataset"
        reference = getattr(data, name) or (data.dataset if is_held_out and data.held_out_options else None)
        return None if reference is None else _checked(_made_by(config, name, reference, options), data)
    source = data.held_out_source if is_held_out else data.source
    if is_held_out and source is None and not data.held_out_options:
        return None
    key = "data.held_out_source" if is_held_out and source is not None else "data.source"
    source = source or data.source
    try:
        if data.format in ("saved", "hub"):
            return _checked(_of_datasets(data, source, config.folder, options), data)
        rows = _of_files(data, source, config.folder, encoder, classes, share)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    if not len(rows):
        raise DataError(f"{key}: {source} has no rows")
    return rows


def _of_files(
    data: DataTable, source: str, folder: Path, encoder: RowEncoder | None, classes: Any, share: tuple[int, int]
) -> Any:
    if data.format == "images":
        return ImageFolders(folder / source, classes)
    paths = files_of(source, folder, f"*.{data.format}")
    if data.format == "jsonl":
        return JsonRows(paths, check=(lambda row: None) if encoder is None else encoder.learn, share=share)
    return ParquetRows(paths, columns=None if encoder is None else encoder.needed)


def _of_datasets(data: DataTable, source: str, folder: Path, options: Mapping[str, Any]) -> Any:
    """What the package datasets reads from disk, or finds by name."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(NEEDS_DATASETS) from error
    given = dict(options)
    # Formats that can run code as they are read. Of the library's own ones, only "pandas" reads pickles.
    if given.pop("trust_remote_code", False) or source == "pandas":
        raise DataError("no code of a dataset is run, and no pickle is read; give files such as parquet")
    split = given.get("split")
    try:
        if data.format == "saved":
            if unknown := sorted(given.keys() - {"split"}):
                raise ConfigError(f"data.dataset_options.{unknown[0]}: the format saved takes split alone")
            found = datasets.load_from_disk(str(folder / source))
        else:
            found = datasets.load_dataset(**_located(source, given, folder))
    except ShardwiseError:
        raise
    except Exception as error:  # the library raises whatever files and servers make it raise
        raise DataError(f"{source}: {in_words(error)}") from error
    if not isinstance(found, dict):  # the splits by name, which are dicts
        return found
    if split not in found:
        raise DataError(
            f"{source} has the splits {', '.join(found)}; name one: data.dataset_options.split, and "
            "data.held_out_options.split for evaluation"
        )
    return found[split]


def _located(source: str, options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of `load_dataset`, with files that are relative to the configuration."""

    def located(files: Any) -> Any:
        if isinstance(files, Mapping):
            return {name: located(each) for name, each in files.items()}
        if isinstance(files, list):
            return [located(each) for each in files]
        return files if "://" in str(files) else str(folder / str(files))

    placed = {key: located(value) if key in ("data_files", "data_dir") else value for key, value in options.items()}
    return {"path": str(folder / source) if (folder / source).exists() else source, **placed}


def _made_by(config: RunConfig, name: str, reference: str, options: Mapping[str, Any]) -> Any:
    factory = resolve(reference, folder=config.folder, key=f"data.{name}")
    # Each rank makes the dataset for itself: one that draws its samples has to draw the same.
    torch.manual_seed(config.train.seed)
    try:
        dataset = factory(**options)
    except (Exception, SystemExit) as error:  # a factory that calls exit() would end the rank without a word
        raise DataError(f"data.{name}: {reference} raised {type(error).__name__}: {error}") from error
    if dataset is None:
        raise DataError(f"data.{name}: {reference} returned None; it must return the dataset")
    return TensorRows(dataset) if isinstance(dataset, Mapping) else dataset


def _checked(rows: Any, data: DataTable) -> Any:
    """The rows of a dataset that names its columns. Raises ConfigError for columns that it does not have."""
    columns = getattr(rows, "column_names", None)
    # Of a stream they may be unknown before it is read.
    if isinstance(columns, list) and (problems := missing_columns(data.wanted_columns, columns)):
        raise ConfigError(*problems)
    return rows


def _collator(config: RunConfig, tokenizer: RunTokenizer | None, *, is_encoded: bool) -> Collator | None:
    data = config.data
    if data.collate in (None, PADDING, PACKING):
        pads = is_encoded or data.collate == PADDING
        return Padding(0 if tokenizer is None else tokenizer.pad) if pads else None
    reference, options = str(data.collate), dict(data.collate_options)
    found = resolve(reference, folder=config.folder, key="data.collate")
    if isinstance(found, type) and tokenizer is not None and "tokenizer" in arguments_of(found):
        options.setdefault("tokenizer", tokenizer.inner)
    return made(reference, options, folder=config.folder, key="data.collate")
