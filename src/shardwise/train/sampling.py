"""Which text makes which sample: a pure function of (seed, sample index), whatever the layout.

Samples are numbered through the whole run. An epoch is a permutation of the windows of the training text, computed
element by element (a Feistel network walked until it lands inside), so no shuffled list is held or sent.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
_NUM_ROUNDS = 6


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

        Every epoch visits each window once. Windows lie at another phase in each epoch, so that a text which is read
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
        left, right = right, left ^ (_mixed(right ^ key + np.uint64(turn)) & mask)
    return (left << shift) | right


def _mixed(values: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): every bit of the input reaches every bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
