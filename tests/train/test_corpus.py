"""Text, its split and that of samples, and the loss of counting tokens."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from shardwise.errors import DataError
from shardwise.train.corpus import Corpus, SampleOrder, evaluation_rows, frequency_loss, read_corpus, split
from shardwise.train.data_settings import DataTable
from shardwise.train.held_out_split import HeldOutSamples, TrainingSamples
from tests.properties import tried
from tests.refusals import Refusals


def corpus_of(folder: Path, source: str, *, window: int = 4, held_out: float = 0.25) -> Corpus:
    return read_corpus(DataTable(source=source, sequence_length=window, held_out=held_out), folder)


@tried(60)
@given(
    num_tokens=st.integers(0, 5000),
    fraction=st.floats(0.001, 0.5),
    window=st.integers(2, 40),
)
def test_training_and_held_out_tokens_are_all_tokens_once(num_tokens: int, fraction: float, window: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.int32)
    try:
        training, held_out = split(tokens, fraction=fraction, window=window)
    except DataError:
        assert num_tokens * fraction < window or num_tokens < 2 * window
        return
    assert sorted([*training.tolist(), *held_out.ravel().tolist()]) == list(range(num_tokens))
    assert training.tolist() == sorted(training)
    assert held_out.shape == (int(num_tokens * fraction) // window, window)
    assert all((np.diff(row) == 1).all() for row in held_out)


@tried(60)
@given(size=st.integers(1, 200), fraction=st.floats(0.01, 0.9))
def test_each_sample_is_held_out_or_trained_on_and_never_both(size: int, fraction: float) -> None:
    try:
        held_out_samples, training = HeldOutSamples([*range(size)], fraction), TrainingSamples([*range(size)], fraction)
    except DataError:
        assert not 0 < int(size * fraction) < size
        return
    held_out, trained = ([side[at] for at in range(len(side))] for side in (held_out_samples, training))
    assert len(held_out) == int(size * fraction)
    assert sorted([*held_out, *trained]) == [*range(size)]
    assert trained == sorted(trained)
    assert training.__getitems__([0]) == trained[:1]


def test_held_out_blocks_are_spread_over_the_whole_text() -> None:
    _, held_out = split(np.arange(100_000, dtype=np.int32), fraction=0.05, window=10)
    for tenth in range(10):
        share = ((held_out >= tenth * 10_000) & (held_out < (tenth + 1) * 10_000)).sum()
        assert 400 <= share <= 600


def test_a_directory_a_glob_and_a_file_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    for name, text in (("b.txt", "bbbbbbbb"), ("a.txt", "aaaaaaaa"), ("deep/c.txt", "cccccccc"), ("d.md", "dddddddd")):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)

    def letters(source: str) -> str:
        corpus = corpus_of(tmp_path, source, window=2)
        return "".join(dict.fromkeys(corpus.text([*corpus.training.tolist(), *corpus.held_out.ravel().tolist()])))

    assert letters("texts") == "abdc"
    assert letters("texts/**/*.txt") == "abc"
    assert letters(f"{tmp_path}/texts/*.md") == "d"
    assert letters("texts/d.md") == "d"


def test_a_tokenizer_file_makes_the_tokens(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "text.txt").write_text("one two three four " * 10)
    data = DataTable(source="text.txt", tokenizer="words.json", sequence_length=4, held_out=0.25)
    corpus = read_corpus(data, tmp_path)
    assert corpus.vocabulary_size == 4
    assert corpus.training[:5].tolist() == [0, 1, 2, 3, 0]
    assert corpus.text([0, 2]) == "one three"


def test_the_default_corpus_is_the_text_inside_cpython() -> None:
    corpus = read_corpus(DataTable(sequence_length=256), Path())
    assert len(corpus.training) > 4_000_000
    text = corpus.text(corpus.training[:400_000].tolist())
    assert 'The "assert" statement' in text


def test_evaluation_rows_are_spread_over_the_held_out_rows_and_never_repeat(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(128)))
    corpus = corpus_of(tmp_path, "text.txt")  # 32 held-out tokens, 8 rows
    assert np.array_equal(evaluation_rows(corpus, 100), corpus.held_out)
    assert np.array_equal(evaluation_rows(corpus, 4), corpus.held_out[::2])
    assert evaluation_rows(corpus, 3).shape == (3, 4)


@tried(25)
@given(
    training=st.lists(st.integers(0, 5), min_size=1, max_size=50),
    held_out=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=5),
)
def test_frequency_loss_is_the_cross_entropy_of_counted_tokens(training: list[int], held_out: list[list[int]]) -> None:
    counts = Counter(training)
    losses = [-math.log((counts[token] + 1) / (len(training) + 6)) for row in held_out for token in row[1:]]
    found = frequency_loss(np.array(training), np.array(held_out), 6)
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-12)


@tried(60)
@given(
    seed=st.integers(0, 2**63 - 1), num_windows=st.integers(1, 70), window=st.integers(2, 9), extra=st.integers(0, 8)
)
def test_every_epoch_visits_each_window_once_and_no_token_twice(
    seed: int, num_windows: int, window: int, extra: int
) -> None:
    num_tokens = num_windows * window + min(extra, window - 1)
    order = SampleOrder(seed=seed, num_tokens=num_tokens, window=window)
    assert order.num_windows == num_windows
    asked_together = order.starts(np.arange(3 * num_windows))
    for epoch in range(3):
        starts = order.starts(np.arange(epoch * num_windows, (epoch + 1) * num_windows))
        assert starts.tolist() == asked_together[epoch * num_windows :][:num_windows].tolist()
        read = [(int(start) + offset) % num_tokens for start in starts for offset in range(window)]
        assert len(read) == len(set(read)) == num_windows * window


def test_the_order_of_a_seed_is_the_same_in_every_version() -> None:
    order = SampleOrder(seed=3, num_tokens=170, window=10)
    assert order.starts(np.arange(6)).tolist() == [17, 127, 47, 37, 97, 107]
    assert order.starts(np.array([10**9])).tolist() == [27]


def text(name: str, content: bytes | None = None, **settings: Any) -> Callable[[Path], object]:
    def refused(folder: Path) -> None:
        if content is not None:
            (folder / name).write_bytes(content)
        (folder / "words.json").write_text("{}")
        read_corpus(DataTable(**{"source": name, "sequence_length": 4, "held_out": 0.25, **settings}), folder)

    return refused


REFUSED = Refusals(
    "train.corpus",
    {
        "an empty file": text("empty.txt", b""),
        "a short text": text("short.txt", b"abcdefg"),
        "no UTF-8": text("binary.txt", b"abc\xff\xfe" * 9),
        "no files": text("none/*.txt"),
        "no tokenizer": text("text.txt", b"one two three " * 10, tokenizer="words.json"),
    },
    kind=DataError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_text_that_cannot_be_trained_on_is_refused(case: str) -> None:
    REFUSED.check(case)
