"""From rows to samples and batches: columns become arguments of the model, texts become tokens, images become numbers.

{"review": "good", "stars": 5}    text = "review", columns = { labels = "stars" }
  -> {"input_ids": [4], "attention_mask": [4], "labels": []}  a sample: tensors, each of its own length
  -> {"input_ids": [rows, 9], ...}                            a batch: `Padding` fills up to the longest one
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardwise.errors import DataError, few_of, in_words
from shardwise.train.data_settings import PADDING, DataTable, ImageTable
from shardwise.train.row_files import IMAGE, LABEL
from shardwise.train.run_tokenizer import RunTokenizer, Tokens

Sample = dict[str, torch.Tensor]
_IGNORED = -100
"""The label that losses of torch and transformers leave out."""
_INPUTS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"


class RowEncoder:
    """What [data] makes of a row. tokenizer: None where no column is text. classes: names of the numbers of classes."""

    def __init__(self, data: DataTable, tokenizer: RunTokenizer | None, classes: Sequence[str] | None) -> None:
        self._text, self._messages = data.text, data.messages
        self._tokenizer = tokenizer
        self._most_tokens = data.sequence_length
        self._images = data.images
        self._adds_labels = data.collate in (None, PADDING)  # other collators make theirs
        self._class_of = {name: number for number, name in enumerate(classes or ())}
        columns: Mapping[str, str] | None = data.columns or None
        if columns is None and data.format == "images":
            columns = {"pixel_values": IMAGE, _LABELS: LABEL}
        if columns is None and data.reads_tokens:
            columns = {}
        self._columns = columns
        """Argument -> column; None: every column under its own name."""
        self.fractions: set[str] = set()
        """Arguments that are floats in some row: JSON writes 1.0 as 1, and a batch of such rows would be integers."""

    @property
    def needed(self) -> list[str] | None:
        """The columns that are read; None: all."""
        if self._columns is None:
            return None
        named = [name for name in (self._text, self._messages) if name is not None]
        return list(dict.fromkeys([*named, *self._columns.values()]))

    def learn(self, row: Mapping[str, Any]) -> str | None:
        """See of each row of JSON which numbers are floats, before the first one is encoded. Returns its problem."""
        if (problem := self.problem(row)) is None:
            given = self._arguments(row).items()
            self.fractions.update(
                name for name, column in given if name not in self.fractions and _has_fractions(row[column])
            )
        return problem

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with the values of a row, as far as types show it."""
        lacking = [name for name in self.needed or () if name not in row]
        if lacking:
            return f'there is no column "{lacking[0]}"; there are {few_of(sorted(row), 8)}'
        if self._text is not None and not isinstance(row[self._text], str):
            return f'column "{self._text}" is a {type(row[self._text]).__name__}, not a text'
        if self._text is not None and not _is_unicode(row[self._text]):
            return f'column "{self._text}" has half of a character (a surrogate alone), which is no Unicode text'
        if self._messages is not None and not _are_messages(row[self._messages]):
            return f'column "{self._messages}" is no list of messages, each {{"role": .., "content": ..}}'
        for name, column in self._arguments(row).items():
            value = row[column]
            if isinstance(value, str) and value not in self._class_of:
                known = few_of(list(self._class_of), 8)
                return f'column "{column}" is the text {value!r:.60}; ' + (
                    f"data.classes has {known}"
                    if self._class_of
                    else f"give data.classes, its names, or use it as data.text; {name} takes numbers"
                )
            if value is None or isinstance(value, Mapping):
                return f'column "{column}" is {"null" if value is None else "an object"}; {name} takes numbers'
        return None

    def tokens(self, row: Mapping[str, Any]) -> Tokens:
        """The tokens of the row's text or messages, as many as there are."""
        assert self._tokenizer is not None
        if self._text is not None:
            return self._tokenizer.encode(row[self._text])
        return self._tokenizer.messages(row[str(self._messages)])

    def __call__(self, row: Mapping[str, Any]) -> Sample:
        """Raises DataError, without the number of the row."""
        if (problem := self.problem(row)) is not None:
            raise DataError(problem)
        sample: Sample = {}
        if self._text is not None or self._messages is not None:
            assert self._tokenizer is not None
            tokens = torch.from_numpy(self.tokens(row)[: self._most_tokens].astype(np.int64))
            is_empty = not len(tokens)
            if is_empty:  # models do not take rows without tokens, and softmax none that is masked as a whole
                tokens = torch.tensor([self._tokenizer.pad])
            sample = {_INPUTS: tokens, _MASK: torch.ones_like(tokens)}
            if self._adds_labels and _LABELS not in self._arguments(row):
                sample[_LABELS] = torch.full_like(tokens, _IGNORED) if is_empty else tokens
        return sample | {name: self._value(name, row[column]) for name, column in self._arguments(row).items()}

    def _arguments(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        return {name: name for name in row} if self._columns is None else self._columns

    def _value(self, name: str, value: Any) -> torch.Tensor:
        if isinstance(value, str):
            return torch.tensor(self._class_of[value])
        if callable(getattr(value, "convert", None)):
            return pixels(value, self._images)
        try:
            found = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise DataError(f"{name}: {type(value).__name__} becomes no tensor: {in_words(error)}") from error
        return found.float() if found.dtype == torch.float64 or name in self.fractions else found


def _has_fractions(value: Any) -> bool:
    return any(map(_has_fractions, value)) if isinstance(value, list) else isinstance(value, float)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()  # JSON can write what UTF-8 cannot
    except UnicodeEncodeError:
        return False
    return True


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(each, Mapping) and "role" in each and "content" in each for each in value)
    )


def pixels(image: Any, table: ImageTable) -> torch.Tensor:
    """A picture of pillow as [channels, height, width], from 0 to 1 before mean and std. Raises DataError."""
    try:
        picture = image.convert(table.mode)
        if table.size is not None:
            picture = picture.resize((table.size[1], table.size[0]))
        values = torch.from_numpy(np.array(picture)).float() / 255
    except (OSError, ValueError, SyntaxError) as error:  # what decoders raise
        raise DataError(f"no image that can be read: {in_words(error)}") from error
    values = values.permute(2, 0, 1) if values.ndim == 3 else values[None]
    mean, std = (torch.tensor(each).reshape(-1, 1, 1) for each in (table.mean, table.std))
    for name, given in (("mean", mean), ("std", std)):
        if len(given) not in (1, len(values)):
            raise DataError(f"data.images.{name}: {len(given)} numbers for {len(values)} channels")
    return ((values - mean) / std).contiguous()


class EncodedRows:
    """Rows as samples: a dataset of a known size."""

    def __init__(self, rows: Any, encode: Callable[[Mapping[str, Any]], Sample]) -> None:
        self._rows = rows
        self._encode = encode

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Sample:
        return self._encoded(self._rows[number], number)

    def __getitems__(self, numbers: Sequence[int]) -> list[Sample]:
        """Those of a batch together, where the rows come so."""
        together = getattr(self._rows, "__getitems__", None)
        rows = [self._rows[number] for number in numbers] if together is None else together(list(numbers))
        return [self._encoded(row, number) for row, number in zip(rows, numbers, strict=True)]

    def _encoded(self, row: Any, number: int) -> Sample:
        try:
            return self._encode(a_row(row))
        except DataError as error:
            where = getattr(self._rows, "where", "row {}".format)
            raise DataError(f"data: {where(number)}: {error}") from error


class EncodedStream:
    """Rows that are opened at a position, as samples."""

    def __init__(self, rows: Any, encode: Callable[[Mapping[str, Any]], Sample]) -> None:
        self._rows = rows
        self._encode = encode

    def open(self, position: int) -> Iterator[Sample]:
        """Those from a position on."""
        for number, row in enumerate(self._rows.open(position), position):
            try:
                yield self._encode(a_row(row))
            except DataError as error:
                raise DataError(f"data: row {number} of the stream: {error}") from error


def a_row(row: Any) -> Mapping[str, Any]:
    """The row, as a dict of columns. Raises DataError."""
    if not isinstance(row, Mapping):
        raise DataError(f"a row is a {type(row).__name__}; columns are read from dicts")
    return row


class Padding:
    """Samples as a batch: tensors are stacked, and rows of one dim are filled up to the longest."""

    def __init__(self, pad: int) -> None:
        """pad: the token that fills `input_ids`; labels are filled with -100, and all else with 0."""
        self._fill = {_INPUTS: pad, _LABELS: _IGNORED}

    def __call__(self, samples: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Raises DataError for samples that do not fit together."""
        columns: dict[str, list[torch.Tensor]] = {}
        given = [{name: torch.as_tensor(value) for name, value in sample.items()} for sample in samples]
        for sample in given:
            if sample.keys() != given[0].keys():
                raise DataError(f"data: one row has {few_of(list(given[0]), 8)}, and another {few_of(list(sample), 8)}")
            for name, value in sample.items():
                columns.setdefault(name, []).append(value)
        return {name: self._joined(name, values) for name, values in columns.items()}

    def _joined(self, name: str, values: list[torch.Tensor]) -> torch.Tensor:
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) == 1:
            return torch.stack(values)
        if {len(shape) for shape in shapes} != {1}:
            ways = "; data.images.size scales images" if any(len(shape) == 3 for shape in shapes) else ""
            raise DataError(f"data: {name} has the shapes {sorted(shapes)} in one batch, which cannot be stacked{ways}")
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=self._fill.get(name, 0))
