"""The text of a run as tokens in memory, a part of it held out, and which sample reads which tokens.

Which text makes which sample is a pure function of (seed, sample number), whatever the layout: so a run can go on
under another number of ranks and read what it would have read. Samples are numbered through the whole run. An epoch
is a permutation of the windows of the training text, computed element by element, so no shuffled list is held or sent.

    sample number   0 ... 999           1000 ... 1999        of 1000 windows: epoch 0, epoch 1
    position        0 ... 999           0 ... 999            permuted with a key of (seed, epoch)
    window          417, 3, 880 (say)   52, 998, 6 (say)     start = window * length + phase of the epoch

    update u, global batch 8, 2 data ranks:  samples 8u ... 8u+3 on data rank 0, 8u+4 ... 8u+7 on data rank 1
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import DataError
from shardwise.train.config import BYTES, PYTHON_DOCS, DataTable

Tokens = npt.NDArray[np.integer[Any]]
Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
_NUM_ROUNDS = 6
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
    tokenizer: Any
    """A `tokenizers.Tokenizer`, or None for bytes."""

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
        if self.tokenizer is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        return str(self.tokenizer.decode(tokens))


def read_corpus(data: DataTable, folder: Path) -> Corpus:
    """Read, tokenize and split the text of [data]. Raises `DataError`: nothing there, not text, or too little."""
    tokenizer = None if data.tokenizer == BYTES else _tokenizer(folder / data.tokenizer)
    parts: list[Tokens] = []
    for name, raw in _documents(data.source, folder):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"data.source: {name} is not UTF-8 text (byte {error.start}); name the text files by a glob such as "
                '"texts/**/*.txt"'
            ) from error
        if tokenizer is None:
            parts.append(np.frombuffer(raw, dtype=np.uint8))
        else:
            parts.append(np.asarray(tokenizer.encode(text).ids, dtype=np.int32))
    if sum(map(len, parts)) == 0:
        raise DataError(f"data.source: {data.source} holds no text ({len(parts)} files found)")
    size = 256 if tokenizer is None else int(tokenizer.get_vocab_size())
    training, held_out = split(np.concatenate(parts), fraction=data.held_out, window=data.sequence_length)
    return Corpus(training=training, held_out=held_out, vocabulary_size=size, tokenizer=tokenizer)


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
            f"data: {len(tokens)} tokens are too few: with held_out = {fraction:g}, {len(kept)} are left to train on "
            f"and {needed * window} for evaluation, and each needs a row of {window}; give more text, another held_out "
            "or a shorter sequence_length"
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


def _tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError(
            "data.tokenizer: a tokenizer file needs the package tokenizers; pip install tokenizers"
        ) from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every fault of a file
        raise DataError(f"data.tokenizer: {path} is not the JSON of a tokenizer: {error}") from error


def _documents(source: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each document, always in the same order."""
    if source == PYTHON_DOCS:
        yield from _python_docs()
        return
    root = folder / source
    if "*" in source:
        files = sorted(folder / found for found in glob(source, root_dir=folder, recursive=True))
    else:
        files = sorted(root.rglob("*")) if root.is_dir() else [root]
    for file in files:
        if root.is_file() or file.is_file():
            try:
                yield str(file), file.read_bytes()
            except OSError as error:
                raise DataError(f"data.source: {file} cannot be read: {error.strerror}") from error


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
        """The first token of each sample; a window may run over the end of the text and on at its beginning.

        Every epoch visits each window once. Windows begin at another phase in each epoch, so that a text which is read
        several times is not always cut at the same places.
        """
        epochs, positions = np.divmod(samples.astype(np.uint64), np.uint64(self.num_windows))
        starts = np.empty(samples.shape, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = _mixed(_mixed(np.array([self.seed], np.uint64)) ^ epoch)
            phase = int(_mixed(key ^ np.uint64(_NUM_ROUNDS))[0] % np.uint64(self.window))
            windows = _permuted(positions[chosen], key, self.num_windows)
            starts[chosen] = (windows.astype(np.int64) * self.window + phase) % self.num_tokens
        return starts


def rank_samples(*, update: int, global_batch: int, data_rank: int, num_data_ranks: int) -> Indices:
    """The samples of one data rank in one update (both counted from 0): its part, in order, of the global batch."""
    rows = global_batch // num_data_ranks
    first = update * global_batch + data_rank * rows
    return np.arange(first, first + rows, dtype=np.int64)


def _permuted(positions: Words, key: Words, size: int) -> Words:
    """A permutation of range(size), chosen by `key`, applied to `positions`."""
    # The smallest domain of two halves of equal bits that holds `size`: at most four times as large, so the walk
    # below takes four turns at most on average.
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _feistel(positions, key, half)
    while (outside := values >= np.uint64(size)).any():
        # A bijection of the larger domain, walked until it lands inside, is a bijection of range(size).
        values[outside] = _feistel(values[outside], key, half)
    return values


def _feistel(values: Words, key: Words, half: int) -> Words:
    """A bijection of range(4 ** half) (Luby and Rackoff, 1988)."""
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for turn in range(_NUM_ROUNDS):
        # Whatever the round function gives, this can be undone: that makes it a bijection, hence an order without
        # repeats.
        left, right = right, left ^ (_mixed(right ^ key + np.uint64(turn)) & mask)
    return (left << shift) | right


def _mixed(values: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): every bit of the input reaches every bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
