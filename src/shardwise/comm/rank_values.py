"""What all ranks gave in an exchange: equal values of ranks in a row are kept once, others of one length in one piece.

A value may have several parts. Each part of all ranks is held, and travels between processes, for itself::

    rank      0        1        2        3
    flags     01       01       01       11            2 runs: 3 ranks gave 01, 1 rank gave 11
    loss      0.5      0.25     0.75     0.5           one piece of 4 * 8 bytes

So 4,096 ranks that agree are read once, and their numbers as one array.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, groupby, repeat
from operator import mul
from struct import Struct
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

Table: TypeAlias = npt.NDArray[np.uint8]
"""Bytes of values: one row for each."""

Index: TypeAlias = npt.NDArray[np.intp]
"""Numbers of rows."""

_FEW = 8
_RANKS_OF_A_RUN = 8


def most_runs(num_ranks: int) -> int:
    """So many are kept as runs, where all values are of one length; more are kept apart, without lengths."""
    return max(_FEW, num_ranks // _RANKS_OF_A_RUN)


class RankValues(Sequence[bytes]):
    """The values of ranks in a row. Nothing is taken apart before somebody reads it."""

    __slots__ = ("_all", "body", "counts", "lengths", "num_ranks")

    def __init__(
        self, num_ranks: int, body: bytes | memoryview, *, lengths: "array[int]", counts: "array[int] | None"
    ) -> None:
        """body: the values, one behind the other.

        counts: for how many ranks each is, and `lengths` has one number per value. None: each is for one rank, and
        `lengths` has the one length of all.
        """
        self.num_ranks = num_ranks
        self.body = body
        self.lengths = lengths
        self.counts = counts
        self._all: list[bytes] | None = None

    @classmethod
    def of(cls, values: Iterable[bytes]) -> "RankValues":
        """Those of a list."""
        runs = [(value, sum(1 for _ in equal)) for value, equal in groupby(values)]
        counts, lengths = array("I", [count for _, count in runs]), array("Q", [len(value) for value, _ in runs])
        return cls(sum(counts), b"".join([value for value, _ in runs]), lengths=lengths, counts=counts)

    @property
    def runs(self) -> Sequence[tuple[bytes, int]]:
        """Each value, and for how many ranks in a row it is."""
        if self.counts is None:
            return [*zip(self._list(), repeat(1))]
        ends = [*accumulate(self.lengths)]
        cuts = zip([0, *ends[:-1]], ends, strict=True)
        return [(bytes(self.body[start:end]), count) for (start, end), count in zip(cuts, self.counts, strict=True)]

    @property
    def is_one(self) -> bool:
        """Whether all ranks have the same value, and it is kept so."""
        return self.counts is not None and len(self.counts) == 1

    @property
    def starts(self) -> Sequence[int]:
        """The first rank of each of the runs."""
        return range(self.num_ranks) if self.counts is None else [0, *accumulate(self.counts)][:-1]

    @property
    def num_bytes(self) -> int:
        """Of all values together, each as often as it was given."""
        if self.counts is None:
            return self.num_ranks * self.lengths[0]
        return sum(map(mul, self.counts, self.lengths))

    @property
    def whole(self) -> bytes | memoryview:
        """All values, one behind the other, each as often as it was given."""
        return self.body if self.counts is None else b"".join([value * count for value, count in self.runs])

    @property
    def table(self) -> Table | None:
        """One row for each of the runs; None where values differ in length."""
        return self._as_table(self.body, self.num_ranks if self.counts is None else len(self.counts))

    @property
    def rows(self) -> Table | None:
        """One row for each rank; None where values differ in length."""
        return self._as_table(self.whole, self.num_ranks)

    def _as_table(self, content: bytes | memoryview, num_rows: int) -> Table | None:
        if len(set(self.lengths)) > 1:
            return None
        return np.frombuffer(content, dtype=np.uint8).reshape(num_rows, self.lengths[0])

    def in_order(self, positions: Index) -> "RankValues":
        """These values in another order: at `positions[rank]` is that of `rank`."""
        if self.is_one:
            return self
        rows = self.table
        if self.counts is None:
            assert rows is not None, "values that are kept apart have one length"
            return RankValues(self.num_ranks, rows.take(positions, axis=0).tobytes(), lengths=self.lengths, counts=None)
        # By the number of the run that each rank has: values are not compared again.
        runs = self.runs
        numbers = np.arange(len(runs)).repeat(self.counts).take(positions)
        ends = np.append(np.flatnonzero(np.diff(numbers)), self.num_ranks - 1)
        if rows is not None and len(ends) > most_runs(self.num_ranks):
            return RankValues(
                self.num_ranks, rows.take(numbers, axis=0).tobytes(), lengths=self.lengths[:1], counts=None
            )
        values = [runs[number][0] for number in numbers[ends].tolist()]
        counts, lengths = array("I", np.diff(ends, prepend=-1).tolist()), array("Q", map(len, values))
        return RankValues(self.num_ranks, b"".join(values), lengths=lengths, counts=counts)

    def __len__(self) -> int:
        return self.num_ranks

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._list())

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        return self._list()[at]

    def _list(self) -> list[bytes]:
        if self._all is None:
            if self.counts is None:
                self._all = [*_equal_parts(self.lengths[0], self.num_ranks).unpack(self.body)]
            else:
                self._all = [*chain.from_iterable(repeat(value, count) for value, count in self.runs)]
        return self._all


@lru_cache(maxsize=8)
def _equal_parts(length: int, count: int) -> Struct:
    # Takes 4,096 values apart in a fifth of the time of as many slices.
    return Struct(f"{length}s" * count)
