"""Until all have moved: `tests.oracle.words` and `tests.oracle.batches`."""

from tests.oracle.batches import NUM_WORDS, Batch, word_batch, word_loss
from tests.oracle.words import (
    Curve,
    Residual,
    Words,
    WordsWithKeptNorm,
    curve,
    curve_batch,
    curve_loss,
    loss_of_words,
    words,
    words_with_kept_norm,
)

__all__ = [
    "NUM_WORDS",
    "Batch",
    "Curve",
    "Residual",
    "Words",
    "WordsWithKeptNorm",
    "curve",
    "curve_batch",
    "curve_loss",
    "loss_of_words",
    "word_batch",
    "word_loss",
    "words",
    "words_with_kept_norm",
]
