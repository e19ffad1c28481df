"""The values of a run of ranks in one piece of bytes, as they travel along the tree of an exchange.

Three ranks whose shares of the digest of calls (`call_log`) sum up to 0, each with a value of two parts::

    rank 0   ab  1         JOINED   sum 0, 3 ranks, rank 2 came last, 2 parts
    rank 1   ab  2         PART     1 value, RUNS       counts 3         lengths 2         ab
    rank 2   ab  3         PART     3 values, 1 byte                                       1 2 3

Values that ranks in a row have alike travel once. Where most differ, values of one length travel without lengths. So
4,096 ranks give 4,096 numbers without a look at each, and what they agree on costs nothing. A piece is taken apart
once, when it comes.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from shardwise.comm.process.frames import JOINED, PART
from shardwise.comm.rank_values import RankValues, most_runs

_RUNS = (1 << 64) - 1
"""In the place of the length that all values have: counts and lengths follow."""

_SUMS = 1 << 64
"""Shares are summed modulo this."""

_BYTES_OF_A_RUN = array("I").itemsize + array("Q").itemsize
"""What a count and a length take."""


@dataclass(frozen=True, slots=True)
class JoinedValues:
    """The values of ranks in a row, by parts, and what is known of these ranks together."""

    share: int
    """The sum of their shares."""
    last: int
    """The world rank that came last."""
    parts: Sequence[RankValues]

    @classmethod
    def of_one(cls, parts: Sequence[bytes], share: int, rank: int) -> Self:
        """Those of one world rank."""
        found = [RankValues(1, part, lengths=array("Q", [len(part)]), counts=None) for part in parts]
        return cls(share % _SUMS, rank, found)

    @classmethod
    def parsed(cls, content: bytearray | memoryview, most: int, num_parts: int) -> Self:
        """As `joined` gave them, of at most so many ranks, and so many parts. Raises ValueError for any other bytes."""
        try:
            share, num_ranks, last, found = JOINED.unpack_from(content)
            if found != num_parts:
                raise ValueError(f"values of {found} parts in the place of {num_parts}")
            if num_ranks > most:  # before memory is taken for them
                raise ValueError(f"{num_ranks} values of {most} ranks")
            rest = memoryview(content)[JOINED.size :]
            parts = []
            for _ in range(found):
                part, rest = _part_of(rest, num_ranks)
                parts.append(part)
        except struct.error as error:
            raise ValueError(f"{len(content)} bytes in the place of values") from error
        if len(rest):
            raise ValueError(f"{len(rest)} bytes behind the values")
        return cls(share, last, parts)

    @property
    def num_ranks(self) -> int:
        """How many have given values."""
        return self.parts[0].num_ranks


def joined(runs: Sequence[JoinedValues], last: int) -> bytearray:
    """Some of them, one behind the other, as they travel; `last` is the world rank that came last.

    Tensors are made of a `bytearray`, and so links send it, without a copy.
    """
    parts = [*zip(*(run.parts for run in runs), strict=True)]
    num_ranks = sum(run.num_ranks for run in runs)
    pieces: list[bytes | memoryview] = [
        JOINED.pack(sum(run.share for run in runs) % _SUMS, num_ranks, last, len(parts))
    ]
    for of_runs in parts:
        pieces += _one_behind_the_other(of_runs, num_ranks)
    return bytearray().join(pieces)


def _part_of(content: memoryview, num_ranks: int) -> tuple[RankValues, memoryview]:
    """The part with which these bytes begin, and what is behind it."""
    num_values, length = PART.unpack_from(content)
    rest = content[PART.size :]
    counts = None
    if length == _RUNS:
        if len(rest) < num_values * _BYTES_OF_A_RUN:
            raise ValueError(f"{len(rest)} bytes in the place of {num_values} runs")
        # In the order of bytes of this machine: ranks of one run have the same, as their tensors need it anyway.
        counts, lengths = array("I"), array("Q")
        for table in (counts, lengths):
            table.frombytes(rest[: num_values * table.itemsize])
            rest = rest[num_values * table.itemsize :]
        if sum(counts) != num_ranks or not all(counts):
            raise ValueError(f"values of {sum(counts)} ranks in the place of {num_ranks}")
        num_bytes = sum(lengths)
    else:
        if num_values != num_ranks:
            raise ValueError(f"{num_values} values of {num_ranks} ranks")
        lengths = array("Q", [length])
        num_bytes = num_values * length
    if num_bytes > len(rest):
        raise ValueError(f"{len(rest)} bytes in the place of {num_bytes}")
    return RankValues(num_ranks, rest[:num_bytes], lengths=lengths, counts=counts), rest[num_bytes:]


def _one_behind_the_other(parts: Sequence[RankValues], num_ranks: int) -> Sequence[bytes | memoryview]:
    most = most_runs(num_ranks)
    is_even = len({length for part in parts for length in set(part.lengths)}) == 1
    num_values = sum(part.num_ranks if part.counts is None else len(part.counts) for part in parts)
    # The last value of a part may be the first of the next.
    if not is_even or num_values - len(parts) < most:
        counts, lengths, bodies = _runs_of(parts)
        if not is_even or len(counts) <= most:
            return [PART.pack(len(counts), _RUNS), counts.tobytes(), lengths.tobytes(), *bodies]
    return [PART.pack(num_ranks, parts[0].lengths[0]), *(part.whole for part in parts)]


def _runs_of(parts: Sequence[RankValues]) -> "tuple[array[int], array[int], list[memoryview]]":
    counts, lengths = array("I"), array("Q")
    bodies: list[memoryview] = []
    for part in parts:
        counts_here, lengths_here, body = part.counts, part.lengths, memoryview(part.body)
        if counts_here is None:
            counts_here, lengths_here = array("I", [1]) * part.num_ranks, lengths_here * part.num_ranks
        if counts and counts_here and lengths[-1] == lengths_here[0]:
            length = lengths[-1]
            if bodies[-1][len(bodies[-1]) - length :] == body[:length]:
                counts[-1] += counts_here[0]
                counts_here, lengths_here, body = counts_here[1:], lengths_here[1:], body[length:]
        counts += counts_here
        lengths += lengths_here
        if counts_here:
            bodies.append(body)
    return counts, lengths, bodies
