"""The values of a run of ranks in one piece of bytes, as they travel along the tree of an exchange.

Three ranks whose shares of the digest of calls (`call_log`) sum up to 0, each with a value of two parts::

    rank 0   ab  1         JOINED   sum 0, 3 ranks, rank 2 came last, 2 parts
    rank 1   ab  2         PART     1 value, RUNS       counts 3         lengths 2         ab
    rank 2   ab  3         PART     3 values, 1 byte                                       1 2 3

Values that ranks in a row have alike travel once. Where most differ, values of one length travel without lengths. So
4,096 ranks give 4,096 numbers without a look at each, and what they agree on costs nothing.

A piece is a `bytearray`: tensors are made of it, and so links send it, without a copy.
"""

import struct
from array import array
from collections.abc import Sequence

from shardwise.comm.frames import JOINED, PART
from shardwise.comm.rank_values import RankValues

_RUNS = (1 << 64) - 1
"""In the place of the length that all values have: counts and lengths follow."""

_SUMS = 1 << 64
"""Shares are summed modulo this."""

_FEW = 8
"""So many values are kept as runs, and more of one length where each is for `_RANKS_OF_A_RUN` ranks in the mean."""

_RANKS_OF_A_RUN = 8

_BYTES_OF_A_RUN = array("I").itemsize + array("Q").itemsize
"""What a count and a length take."""

Parsed = tuple[int, int, list[RankValues]]
"""The sum, the rank that came last, and the parts."""


def one_value(parts: Sequence[bytes], share: int, rank: int) -> bytearray:
    """The value of one world rank."""
    heads = (PART.pack(1, len(part)) + part for part in parts)
    return bytearray().join([JOINED.pack(share, 1, rank, len(parts)), *heads])


def check_run(run: bytearray, most: int, num_parts: int) -> None:
    """Raise ValueError unless these are at most so many values of so many parts, whole."""
    _, _, parts = _parsed(run, num_parts)
    if parts[0].num_ranks > most:
        raise ValueError(f"{parts[0].num_ranks} values of {most} ranks")


def joined(runs: Sequence[bytearray], last: int = 0) -> bytearray:
    """Some runs, one behind the other, that have been checked; `last` is the position of the one that came last."""
    if len(runs) == 1:
        return runs[0]
    parsed = [_parsed(run) for run in runs]
    parts = [_one_behind_the_other(each) for each in zip(*(parts for _, _, parts in parsed), strict=True)]
    total = sum(share for share, _, _ in parsed) % _SUMS
    pieces: list[bytes | memoryview] = [JOINED.pack(total, parts[0].num_ranks, parsed[last][1], len(parts))]
    for part in parts:
        if part.counts is None:
            pieces += (PART.pack(part.num_ranks, part.lengths[0]), part.body)
        else:
            tables = part.counts.tobytes(), part.lengths.tobytes()
            pieces += (PART.pack(len(part.counts), _RUNS), *tables, part.body)
    return bytearray().join(pieces)


def last_rank(run: bytearray) -> int:
    """The world rank that came last, of all that have joined their values."""
    return _parsed(run)[1]


def split(run: bytearray, count: int, num_parts: int) -> tuple[list[RankValues], int]:
    """As many values as `count`, by parts, and the sum of the shares. Raises ValueError for any other bytes."""
    total, _, parts = _parsed(run, num_parts)
    if parts[0].num_ranks != count:
        raise ValueError(f"{parts[0].num_ranks} values of {count} ranks")
    return parts, total


def _parsed(run: bytearray, num_parts: int | None = None) -> Parsed:
    try:
        total, num_ranks, last, found = JOINED.unpack_from(run)
        if found != num_parts and num_parts is not None:
            raise ValueError(f"values of {found} parts in the place of {num_parts}")
        rest = memoryview(run)[JOINED.size :]
        parts = []
        for _ in range(found):
            part, rest = _part_of(rest, num_ranks)
            parts.append(part)
    except struct.error as error:
        raise ValueError(f"{len(run)} bytes in the place of values") from error
    if len(rest):
        raise ValueError(f"{len(rest)} bytes behind the values")
    return total, last, parts


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


def _one_behind_the_other(parts: Sequence[RankValues]) -> RankValues:
    num_ranks = sum(part.num_ranks for part in parts)
    most = max(_FEW, num_ranks // _RANKS_OF_A_RUN)
    is_even = len({length for part in parts for length in set(part.lengths)}) == 1
    num_values = sum(part.num_ranks if part.counts is None else len(part.counts) for part in parts)
    # The last value of a part may be the first of the next.
    if not is_even or num_values - len(parts) < most:
        found = _runs_of(parts, num_ranks)
        if not is_even or len(found.lengths) <= most:
            return found
        parts = [found]
    length = parts[0].lengths[0]
    pieces = [part.in_one_piece(length) or b"" for part in parts]
    return RankValues(num_ranks, b"".join(pieces), lengths=array("Q", [length]), counts=None)


def _runs_of(parts: Sequence[RankValues], num_ranks: int) -> RankValues:
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
    return RankValues(num_ranks, b"".join(bodies), lengths=lengths, counts=counts)
