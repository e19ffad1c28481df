"""The text of a run as tokens in memory, a part of it held out, and which sample reads which tokens.

The text of a sample is a pure function of (seed, sample number), for every layout. So a run can go on under another
number of ranks and read the same samples. Samples are numbered through the whole run. An epoch is a permutation of the
windows of the training text, computed element by element, so no shuffled list is held or sent.

    sample number   0 ... 999           1000 ... 1999        of 1000 windows: epoch 0, epoch 1
    position        0 ... 999           0 ... 999            permuted with a key of (seed, epoch)
    window          417, 3, 880 (say)   52, 998, 6 (say)     start = window * length + phase of the epoch

`sw.Data` reads `TextSamples` in the order of their numbers, and gives each data rank its part of a global batch.
"""

import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardwise.data.permutation import NUM_ROUNDS, Indices, epoch_key, mixed, permuted
from shardwise.errors import DataError
from shardwise.train.data_settings import PYTHON_DOCS, DataTable
from shardwise.train.row_encoding import RowEncoder
from shardwise.train.row_files import files_of
from shardwise.train.run_tokenizer import RunTokenizer, Tokens, tokenizer_of

Row = npt.NDArray[np.int64]
_MAX_BLOCKS = 64
_WINDOWS_PER_BLOCK = 4
_NOT_PROSE = frozenset(
    [
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "pydoc_data",
        "encodings",
        "lib2to3",
        "__pycache__",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens to train on and windows to evaluate on, which have no token in common."""

    training: Tokens
    """[num_tokens]"""
    held_out: Tokens
    """[num_windows, sequence_length], in the order of the text."""
    vocabulary_size: int
    """Tokens are below this."""
    tokenizer: RunTokenizer

    @property
    def sequence_length(self) -> int:
        """Tokens in a window."""
        return int(self.held_out.shape[1])

    def rows(self, samples: Indices, *, seed: int) -> npt.NDArray[np.int64]:
        """The training windows of `samples`: [num_samples, sequence_length]."""
        order = SampleOrder(seed=seed, num_tokens=len(self.training), window=self.sequence_length)
        places = order.starts(samples)[:, None] + np.arange(self.sequence_length)
        # The phase of an epoch may push the last window over the end of the text.
        return np.asarray(self.training[places % len(self.training)], dtype=np.int64)

    def text(self, tokens: list[int]) -> str:
        """The text of the tokens; bytes that are not UTF-8 become replacement marks."""
        return self.tokenizer.decode(tokens)


def read_corpus(data: DataTable, folder: Path) -> Corpus:
    """Read, tokenize and split the text of [data]. Raises `DataError`: nothing there, not text, or too little."""
    tokenizer = tokenizer_of(data, folder)
    held_out = None
    if data.held_out_source is not None:
        held_out = _tokens_of_files(data.held_out_source, folder, tokenizer, key="data.held_out_source")
    return corpus_of(data, tokenizer, _tokens_of_files(data.source, folder, tokenizer, key="data.source"), held_out)


def corpus_of(data: DataTable, tokenizer: RunTokenizer, tokens: Tokens, held_out: Tokens | None) -> Corpus:
    """The corpus of a text. held_out: of another one to evaluate on; None: a part of this one. Raises `DataError`."""
    window = data.sequence_length
    if held_out is None:
        training, windows = split(tokens, fraction=data.held_out, window=window)
    else:
        for name, each in (("to train on", tokens), ("for evaluation", held_out)):
            if len(each) < window:
                raise DataError(f"data: {len(each)} tokens {name} are too few for a row of {window}")
        training, windows = tokens, held_out[: len(held_out) // window * window].reshape(-1, window)
    return Corpus(training=training, held_out=windows, vocabulary_size=tokenizer.size, tokenizer=tokenizer)


def _tokens_of_files(source: str, folder: Path, tokenizer: RunTokenizer, *, key: str) -> Tokens:
    parts: list[Tokens] = []
    for name, raw in _documents(source, folder, key):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{key}: {name} is not UTF-8 text (byte {error.start}); name the text files by a glob such as "
                '"texts/**/*.txt"'
            ) from error
        parts += [tokenizer.encode(text), np.asarray(tokenizer.end, dtype=np.int32)]
    if sum(map(len, parts)) == 0:
        raise DataError(f"{key}: {source} holds no text ({len(parts) // 2} files found)")
    return np.concatenate([part for part in parts if len(part)])


def packed(rows: Any, encoder: RowEncoder, tokenizer: RunTokenizer) -> Tokens:
    """The tokens of all rows, one after the other. Raises DataError."""
    end = np.asarray(tokenizer.end, dtype=np.int32)
    parts: list[Tokens] = []
    for number in range(len(rows)):
        row = rows[number]
        problem = encoder.problem(row) if isinstance(row, Mapping) else f"a row is a {type(row).__name__}, not a dict"
        if problem is not None:
            raise DataError(f"data: {getattr(rows, 'where', 'row {}'.format)(number)}: {problem}")
        # Tokenizers without a token for the end of a text get the end of a line.
        parts += [encoder.tokens(row), end] if len(end) else [encoder.tokens(row), tokenizer.encode("\n")]
    return np.concatenate([part for part in parts if len(part)] or [end])


def split(tokens: Tokens, *, fraction: float, window: int) -> tuple[Tokens, Tokens]:
    """Training tokens, and the windows that make about `fraction` of `tokens`, in blocks spread evenly over them.

    Raises `DataError` when there is not one window for each.
    """
    needed = int(len(tokens) * fraction) // window
    # Documents are in order of their names, so the end of the text alone would be of one kind. From up to 64 places,
    # some windows at the end of each block are held out: in one piece, because each seam cuts a sentence.
    num_blocks = max(1, min(_MAX_BLOCKS, needed // _WINDOWS_PER_BLOCK))
    borders = [len(tokens) * block // num_blocks for block in range(num_blocks + 1)]
    training, held_out = [], []
    for block, (start, stop) in enumerate(pairwise(borders)):
        # Differences of rounded totals: blocks differ by one window at most, and all together have exactly `needed`.
        num_windows = needed * (block + 1) // num_blocks - needed * block // num_blocks
        cut = stop - num_windows * window
        training.append(tokens[start:cut])
        held_out.append(tokens[cut:stop].reshape(num_windows, window))
    kept = np.concatenate(training)
    if needed == 0 or len(kept) < window:
        raise DataError(
            f"data: {len(tokens)} tokens are too few. With held_out = {fraction:g}, {len(kept)} are left to train on "
            f"and {needed * window} for evaluation, and each needs a row of {window}. Give more text, another "
            "held_out or a shorter sequence_length"
        )
    return kept, np.concatenate(held_out)


def evaluation_rows(corpus: Corpus, max_rows: int) -> npt.NDArray[np.int64]:
    """The held-out rows that every evaluation reads, spread evenly: [max_rows or fewer, sequence_length]."""
    available = len(corpus.held_out)
    num_rows = min(max_rows, available)
    chosen = np.arange(num_rows) * available // num_rows
    return np.asarray(corpus.held_out[chosen], dtype=np.int64)


def frequency_loss(training: Tokens, held_out: npt.NDArray[np.int64], vocabulary_size: int) -> float:
    """Nats per token of a model that knows only how often each token occurs in `training` (add-one smoothing).

    It is asked for what a language model is asked for: every token of a row but its first.
    """
    counts = np.bincount(training, minlength=vocabulary_size) + 1.0
    log_frequencies = np.log(counts) - np.log(counts.sum())
    return float(-log_frequencies[held_out[:, 1:]].mean())


def _documents(source: str, folder: Path, key: str) -> Iterator[tuple[str, bytes]]:
    """Name and content of each document, always in the same order."""
    if source == PYTHON_DOCS:
        yield from _python_docs()
        return
    for file in files_of(source, folder):
        try:
            yield str(file), file.read_bytes()
        except OSError as error:
            raise DataError(f"{key}: {file} cannot be read: {error.strerror}") from error


def _python_docs() -> Iterator[tuple[str, bytes]]:
    """The reference text in `pydoc_data.topics`, then the sources of the standard library without tests and tables."""
    # Sorted, like files below: the same documents in the same order make the same samples on every machine.
    for name, text in sorted(topics.items()):
        yield f"topic {name}", text.encode()
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        if _NOT_PROSE.isdisjoint(file.relative_to(library).parts):
            try:
                yield str(file), file.read_text(encoding="utf-8").encode()
            except UnicodeDecodeError:
                continue  # a source may declare another encoding; it is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """Where each sample of a run begins, in a text of `num_tokens` read in windows of `window` tokens."""

    seed: int
    num_tokens: int
    window: int

    @property
    def num_windows(self) -> int:
        """Samples per epoch."""
        return self.num_tokens // self.window

    def starts(self, samples: Indices) -> Indices:
        """The first token of each sample. A window may run over the end of the text and on at its beginning.

        Every epoch visits each window once. Windows begin at another phase in each epoch, so that several readings of a
        text cut it at other places.
        """
        epochs, positions = np.divmod(samples.astype(np.uint64), np.uint64(self.num_windows))
        starts = np.empty(samples.shape, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = epoch_key(self.seed, int(epoch))
            phase = int(mixed(key ^ np.uint64(NUM_ROUNDS))[0] % np.uint64(self.window))
            windows = permuted(positions[chosen], key, self.num_windows)
            starts[chosen] = (windows.astype(np.int64) * self.window + phase) % self.num_tokens
        return starts


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSamples:
    """The training text as a dataset without an end: sample i is row i of the run."""

    corpus: Corpus
    seed: int

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Row]:
        """Those of a batch together, as torch's DataLoader asks for them."""
        return list(self.corpus.rows(np.asarray(numbers, dtype=np.int64), seed=self.seed))


def text_batch(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Rows as causal language models of transformers take them: the model shifts the labels itself."""
    tokens = torch.from_numpy(np.stack(rows))
    return {"input_ids": tokens, "labels": tokens}
