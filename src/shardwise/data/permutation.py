"""Permutations of many samples, computed element by element: no shuffled list is held or sent.

A permutation is chosen by a key, made of (seed, epoch). The place of each element is computed alone, so that every rank
computes those of its own rows only, and a run goes on from any place at once.
"""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

NUM_ROUNDS = 6


def epoch_key(seed: int, epoch: int) -> Words:
    """The key of the order of an epoch: one word."""
    return mixed(mixed(np.array([seed], np.uint64)) ^ np.uint64(epoch))


def shuffled(samples: Indices, *, seed: int, size: int) -> Indices:
    """The element of each sample; samples are numbered through all epochs, and each epoch has `size` elements once."""
    epochs, positions = np.divmod(samples.astype(np.uint64), np.uint64(size))
    indices = np.empty(samples.shape, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        indices[chosen] = permuted(positions[chosen], epoch_key(seed, int(epoch)), size).astype(np.int64)
    return indices


def permuted(positions: Words, key: Words, size: int) -> Words:
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
    for turn in range(NUM_ROUNDS):
        # Whatever the round function gives, this can be undone: that makes it a bijection, hence an order without
        # repeats.
        left, right = right, left ^ (mixed(right ^ key + np.uint64(turn)) & mask)
    return (left << shift) | right


def mixed(values: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): every bit of the input reaches every bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
