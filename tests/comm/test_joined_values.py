"""Values of ranks in one piece: joined in any way they are the values, and other bytes are refused."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.process.joined_values import JoinedValues, joined
from tests.properties import tried

uneven = st.lists(st.binary(max_size=9), min_size=1, max_size=40)
even = st.integers(0, 5).flatmap(
    lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=40)
)
few = st.lists(st.sampled_from([b"", b"ab", b"abc", b"xyz"]), min_size=1, max_size=40)
"""Equal ones in a row, which are kept as runs."""
columns = uneven | even | few | few.map(sorted)
shares = st.integers(0, (1 << 64) - 1)


@tried(25)
@given(columns, columns, st.lists(shares, min_size=40, max_size=40), st.data())
def test_values_joined_in_any_way_are_the_values_part_by_part(
    one: list[bytes], other: list[bytes], given_shares: list[int], data: st.DataObject
) -> None:
    parts = [*zip(*zip(one, other, strict=False), strict=True)]
    count = len(parts[0])
    runs = [
        JoinedValues.of_one(values, share, rank)
        for rank, (*values, share) in enumerate(zip(*parts, given_shares, strict=False))
    ]
    last = 0
    while len(runs) > 1:
        start = data.draw(st.integers(0, len(runs) - 2))
        stop = data.draw(st.integers(start + 2, len(runs)))
        last = runs[data.draw(st.integers(start, stop - 1))].last
        runs[start:stop] = [JoinedValues.parsed(joined(runs[start:stop], last), count, 2)]
    found, total = runs[0].parts, runs[0].share
    order = data.draw(st.permutations(range(count)))
    for part, values in zip(found, parts, strict=True):
        assert tuple(part) == values
        assert (len(part), part.num_bytes) == (count, sum(map(len, values)))
        assert [value for value, repeats in part.runs for _ in range(repeats)] == [*values]
        assert [part[start] for start in part.starts] == [value for value, _ in part.runs]
        ordered, expected = part.in_order(np.array(order)), [values[at] for at in order]
        assert [*ordered] == expected
        assert [value for value, repeats in ordered.runs for _ in range(repeats)] == expected
        assert bytes(part.whole) == b"".join(values)
        lengths = {*map(len, values)}
        if len(lengths) == 1:
            assert part.rows is not None
            assert part.table is not None
            assert [*map(bytes, part.rows)] == [*values]
            assert [*map(bytes, part.table)] == [value for value, _ in part.runs]
        else:
            assert part.rows is part.table is None
    assert runs[0].last == last
    assert total == sum(given_shares[:count]) % (1 << 64)


def one_value(*parts: bytes) -> JoinedValues:
    return JoinedValues.of_one(parts, 0, 0)


def as_tree(values: Sequence[bytes]) -> JoinedValues:
    """Joined as ranks join them: halves first."""
    if len(values) == 1:
        return one_value(values[0])
    middle = len(values) // 2
    halves = [as_tree(values[:middle]), as_tree(values[middle:])]
    return JoinedValues.parsed(joined(halves, 0), len(values), 1)


def num_bytes(values: JoinedValues) -> int:
    return len(joined([values], 0))


def test_what_ranks_have_alike_travels_once_and_numbers_without_lengths() -> None:
    header = num_bytes(one_value(b"")) - 12
    assert num_bytes(as_tree([b"common"] * 1000)) == header + 12 + 6
    assert num_bytes(as_tree([b"first"] * 256 + [b"second"] * 256)) <= header + 2 * 12 + 5 + 6
    numbers = as_tree([rank.to_bytes(8, "little") for rank in range(1000)])
    assert num_bytes(numbers) == header + 8 * 1000
    # Alike where ranks are in another order: runs stay runs, as long as they are few.
    halves = as_tree([b"first"] * 500 + [b"other"] * 500).parts[0]
    turned = halves.in_order(np.roll(np.arange(1000), 100))
    assert turned.runs == [(b"other", 100), (b"first", 500), (b"other", 400)]
    assert halves.in_order(np.arange(1000).reshape(2, 500).T.reshape(-1)).counts is None


@tried(25)
@given(columns, st.data())
def test_bytes_that_are_no_values_are_refused_or_are_as_many(values: list[bytes], data: st.DataObject) -> None:
    run = joined([one_value(value, b"x") for value in values], 0)
    for at in data.draw(st.lists(st.integers(0, len(run) - 1), min_size=1, max_size=3)):
        run[at] = data.draw(st.integers(0, 255))
    cut = run[: data.draw(st.integers(0, len(run)))]
    try:
        found = JoinedValues.parsed(cut, len(values), 2)
    except ValueError:
        return
    assert found.num_ranks <= len(values)
    assert [len([*part]) for part in found.parts] == [found.num_ranks] * 2
