"""[data] of a configuration: its settings, which of them exclude each other, and what the files show at once."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shardwise.train.row_files import first_problems
from shardwise.train.strict_tables import Table

PYTHON_DOCS = "python-docs"
BYTES = "bytes"
PADDING, PACKING = "padding", "packing"
Format = Literal["text", "jsonl", "parquet", "images", "saved", "hub"]


class ImageTable(Table):
    """[data.images]: how images become tensors [channels, height, width]."""

    size: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=2, max_length=2)
    """Height and width to which images are scaled; left out: as they are, and all alike."""
    mode: Literal["RGB", "L"] = "RGB"
    """"RGB": three channels; "L": one, the brightness."""
    mean: list[float] | float = 0.0
    """Taken off values from 0 to 1; a number for each channel, or one."""
    std: list[Annotated[float, Field(gt=0)]] | Annotated[float, Field(gt=0)] = 1.0
    """By which they are divided then."""


class DataTable(Table):
    """[data]: what it is trained on."""

    source: str = PYTHON_DOCS
    """A file, a directory, a glob such as "texts/**/*.md", or "python-docs": the documentation and the standard library
    that ship inside CPython. Paths are relative to the config. Of the format "hub": a name of `load_dataset`."""
    tokenizer: str = BYTES
    """"bytes" (256 tokens), the JSON file of a `tokenizers` tokenizer, or a folder of one of transformers."""
    sequence_length: int = Field(default=256, ge=2)
    """Tokens in a row of a batch; the most of a row, where rows are padded."""
    held_out: float = Field(default=0.05, gt=0, le=0.5)
    """Fraction of the text, or of the rows, that is never trained on and serves for evaluation."""
    dataset: str | None = None
    """In the place of `source`: a callable f(**dataset_options) -> any dataset of `sw.Data`, named like
    `model.factory`."""
    dataset_options: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of `dataset`; of `load_dataset` for the format "hub"; `split` for the format "saved"."""
    held_out_dataset: str | None = None
    """A callable like `dataset`, with the same arguments, whose samples serve for evaluation; left out: `held_out`."""
    collate: str | None = None
    """"padding" or "packing" for rows of text, or a callable f(list of samples) -> a dict of tensors, named like
    `model.factory`, or a class of such callables. Left out: torch's `default_collate`; "padding" for columns."""
    num_workers: int = Field(default=0, ge=0)
    """Processes per rank that read ahead."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Decides the order of the samples; left out: `train.seed`."""
    format: Format = "text"
    """What `source` is. "text": one text; or rows: "jsonl", "parquet", "images" (a folder for each class), "saved"
    (`save_to_disk` of datasets), "hub" (`load_dataset`)."""
    held_out_source: str | None = None
    """Files like `source` that serve for evaluation; left out: `held_out`."""
    held_out_options: dict[str, object] = Field(default_factory=dict)
    """What differs from `dataset_options` for evaluation, such as { split = "test" }."""
    text: str | None = None
    """Column of rows whose text becomes `input_ids`; also `labels`, where no column does and `collate` is ours."""
    messages: str | None = None
    """In the place of `text`, a column of lists of messages, written by the template of the tokenizer."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Argument of the model, or entry of the batch -> column of rows; left out: every column that is not `text`, if
    there is no text."""
    classes: list[str] | None = None
    """Names of classes, for columns that hold names; the first one is 0. Left out: the folders of "images"."""
    images: ImageTable = Field(default_factory=ImageTable)
    """How images become tensors."""
    rows: int | dict[str, int | Literal["all"]] = 0
    """The dim of the tensors of a batch that has its rows: a number from 0 on, or numbers by names and globs, such as
    { frames = 1, table = "all" }. "all": a tensor for all rows. What no name means has dim 0."""
    collate_options: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments of `collate`; of the constructor, where it is a class. One that takes a `tokenizer`
    gets that of `tokenizer`."""

    @property
    def row_dims(self) -> int | dict[str, int | None]:
        """`rows`, as `parallelize` takes them."""
        if isinstance(self.rows, int):
            return self.rows
        return {name: None if dim == "all" else int(dim) for name, dim in self.rows.items()}

    @property
    def unit(self) -> str:
        """What a run reads: a token of a text, or a row of another dataset."""
        if not self.is_text:
            return "row"
        return "byte" if self.tokenizer == BYTES else "token"

    @property
    def has_rows(self) -> bool:
        """Whether the data come as rows, not as one text."""
        return self.dataset is not None or self.format != "text"

    @property
    def is_text(self) -> bool:
        """Whether samples are windows of one text, into which rows may be packed."""
        return not self.has_rows or self.collate == PACKING

    @property
    def reads_tokens(self) -> bool:
        """Whether a tokenizer has something to do."""
        return not self.has_rows or self.text is not None or self.messages is not None

    @property
    def wanted_columns(self) -> dict[str, str]:
        """Setting -> column of rows that it names."""
        named = {"data.text": self.text, "data.messages": self.messages}
        named |= {f"data.columns.{name}": column for name, column in self.columns.items()}
        return {key: column for key, column in named.items() if column is not None}


def dataset_problems(data: DataTable | None) -> list[str]:
    """Settings of [data] that another one makes meaningless."""
    if data is None:
        return []
    given = data.model_fields_set
    own, without_rows = data.dataset is not None, "given without rows; name them by data.format or data.dataset"
    clashes = [
        (
            ("dataset_options", "held_out_options", "collate", "collate_options", *_OF_ROWS),
            not data.has_rows,
            without_rows,
        ),
        (("source", "format", "held_out_source"), own, "given with data.dataset, which is no text; leave one out"),
        (("held_out_dataset",), not own, "given without data.dataset, which it belongs to"),
        (("tokenizer", "sequence_length"), not data.reads_tokens, "given without data.text or data.messages"),
        (("text",), data.messages is not None, "given with data.messages; leave one out"),
        (
            ("columns", "classes", "images"),
            data.collate == PACKING,
            f'given with data.collate = "{PACKING}"; leave one out',
        ),
        (("collate_options",), data.collate in (None, PADDING, PACKING), "given without a callable as data.collate"),
        (
            ("dataset_options", "held_out_options"),
            data.format in ("jsonl", "parquet", "images"),
            f"given with data.format {data.format}, which has no options",
        ),
    ]
    problems = [f"data.{key}: {why}" for keys, is_wrong, why in clashes if is_wrong for key in keys if key in given]
    if data.format != "text" and "source" not in given:
        problems.append(f"data.source: missing; data.format {data.format} reads what it names")
    if data.collate == PACKING and data.has_rows and not data.reads_tokens:
        problems.append(f'data.collate: "{PACKING}" packs tokens; name their column by data.text or data.messages')
    if data.messages is not None and data.tokenizer == BYTES:
        problems.append("data.messages: bytes have no template of messages; give a folder as data.tokenizer")
    if data.reads_tokens and "input_ids" in data.columns:
        problems.append("data.columns.input_ids: data.text or data.messages makes it; leave one out")
    if twice := [name for name, number in Counter(data.classes or ()).items() if number > 1]:
        problems.append(f"data.classes: {twice[0]!r} stands there twice, and a class has one number; leave one out")
    dims = data.rows.values() if isinstance(data.rows, dict) else [data.rows]
    problems += [f"data.rows: {each} is no dim; give 0, 1, .." for each in dims if isinstance(each, int) and each < 0]
    names = [name for name in ("held_out_dataset", "held_out_source", "held_out_options") if name in given]
    if names and "held_out" in given:
        problems.append(f"data.held_out: given with data.{names[0]}; leave one out")
    return problems


_OF_ROWS = ("text", "messages", "columns", "classes", "images")


def source_problems(data: DataTable, folder: Path) -> list[str]:
    """Problems of data.source and data.held_out_source, as far as their first rows show them."""
    problems = []
    for key, source in (("data.source", data.source), ("data.held_out_source", data.held_out_source)):
        if data.dataset is not None or source is None or (data.format == "text" and source == PYTHON_DOCS):
            continue
        if data.format != "hub" and "*" not in source and not (folder / source).exists():
            way_out = f'; "{PYTHON_DOCS}" needs none' if data.format == "text" else ""
            problems.append(f"{key}: no file or directory {folder / source}{way_out}")
        elif data.format != "text":
            problems += [f"{key}: {each}" for each in first_problems(data.format, source, folder, data.wanted_columns)]
    return problems
