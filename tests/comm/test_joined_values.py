"""Values of ranks in one piece: joined in any way they are the values, and other bytes are refused."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.comm.joined_values import check_run, joined, last_rank, one_value, split
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
        one_value(values, share, rank) for rank, (*values, share) in enumerate(zip(*parts, given_shares, strict=False))
    ]
    last = 0
    while len(runs) > 1:
        start = data.draw(st.integers(0, len(runs) - 2))
        stop = data.draw(st.integers(start + 2, len(runs)))
        last_of_them = data.draw(st.integers(start, stop - 1))
        last = last_rank(runs[last_of_them])
        runs[start:stop] = [joined(runs[start:stop], last_of_them - start)]
        for run in runs:
            check_run(run, count, 2)
    found, total = split(runs[0], count, 2)
    order = data.draw(st.permutations(range(count)))
    for part, values in zip(found, parts, strict=True):
        assert tuple(part) == values
        assert (len(part), part.num_bytes) == (count, sum(map(len, values)))
        assert [value for value, repeats in part.runs for _ in range(repeats)] == [*values]
        assert [part[start] for start in part.starts] == [value for value, _ in part.runs]
        assert [*part.in_order(order)] == [values[at] for at in order]
        for length in range(4):
            expected = b"".join(values) if {*map(len, values)} == {length} else None
            assert part.in_one_piece(length) == expected
    assert last_rank(runs[0]) == last
    assert total == sum(given_shares[:count]) % (1 << 64)


def as_tree(values: Sequence[bytes]) -> bytearray:
    """Joined as ranks join them: halves first."""
    if len(values) == 1:
        return one_value(values, 0, 0)
    middle = len(values) // 2
    return joined([as_tree(values[:middle]), as_tree(values[middle:])])


def test_what_ranks_have_alike_travels_once_and_numbers_without_lengths() -> None:
    header = len(one_value([b""], 0, 0))
    assert len(as_tree([b"common"] * 1000)) == header + 12 + 6
    assert len(as_tree([b"first"] * 256 + [b"second"] * 256)) <= header + 2 * 12 + 5 + 6
    assert len(as_tree([rank.to_bytes(8, "little") for rank in range(1000)])) == header + 8 * 1000


@tried(25)
@given(columns, st.data())
def test_bytes_that_are_no_values_are_refused_or_are_as_many(values: list[bytes], data: st.DataObject) -> None:
    run = joined([one_value([value, b"x"], 0, 0) for value in values])
    for at in data.draw(st.lists(st.integers(0, len(run) - 1), min_size=1, max_size=3)):
        run[at] = data.draw(st.integers(0, 255))
    cut = run[: data.draw(st.integers(0, len(run)))]
    try:
        check_run(cut, len(values), 2)
        found, _ = split(cut, len(values), 2)
    except ValueError:
        return
    assert [len([*part]) for part in found] == [len(values)] * 2


def test_a_run_of_too_many_values_or_parts_is_refused() -> None:
    run = joined([one_value([b"ab"], 0, 0)] * 3)
    with pytest.raises(ValueError, match="3 values of 2 ranks"):
        check_run(run, 2, 1)
    with pytest.raises(ValueError, match="3 values of 4 ranks"):
        split(run, 4, 1)
    with pytest.raises(ValueError, match="values of 1 parts in the place of 2"):
        check_run(run, 3, 2)
