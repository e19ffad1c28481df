"""A dataset of a known size cut in two: samples to train on, and some, spread evenly, that serve for evaluation.

10 samples, 3 held out    0 1 [2] 3 4 [5] 6 7 8 [9]     each block ends with the held-out one
training sample           0 1     2 3     4 5 6         computed from its number: no list of indices is held
"""

from collections.abc import Sequence
from typing import Any

from shardwise.errors import DataError


class HeldOutSamples:
    """The samples that are held out, in their order."""

    def __init__(self, dataset: Any, fraction: float) -> None:
        self._dataset = dataset
        self._size = len(dataset)
        self._num_samples = num_held_out(self._size, fraction)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < self._num_samples:
            raise IndexError(number)
        return self._dataset[(number + 1) * self._size // self._num_samples - 1]


class TrainingSamples:
    """All others."""

    def __init__(self, dataset: Any, fraction: float) -> None:
        self._dataset = dataset
        self._size = len(dataset)
        self._num_held_out = num_held_out(self._size, fraction)

    def __len__(self) -> int:
        return self._size - self._num_held_out

    def __getitem__(self, number: int) -> Any:
        return self._dataset[self._index(number)]

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        """Those of a batch together, where the dataset gives them so."""
        indices = [self._index(number) for number in numbers]
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(indices)
        return [self._dataset[index] for index in indices]

    def _index(self, number: int) -> int:
        # Blocks that end with a held-out sample: the first b of them have (b * size) // held_out - b training samples.
        # The number of whole blocks before this sample is the largest b for which that is not above its number.
        return number + ((number + 1) * self._num_held_out - 1) // len(self)


def num_held_out(num_samples: int, fraction: float) -> int:
    """How many samples of a dataset are held out. Raises DataError where none would be left on either side."""
    found = int(num_samples * fraction)
    if not 0 < found < num_samples:
        raise DataError(
            f"{num_samples} samples are too few. With held_out = {fraction:g}, {num_samples - found} are left to train "
            f"on and {found} for evaluation. Give more, or another held_out"
        )
    return found
