"""How rows are cut into microbatches."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import split_rows
from tests.plan.strategies import proven


@proven
@given(st.integers(0, 60), st.integers(1, 20))
def test_microbatches_hold_every_row_once_in_order_and_differ_by_one_at_most(num_rows: int, count: int) -> None:
    parts = split_rows(num_rows, count)
    assert len(parts) == count
    assert [row for part in parts for row in part] == list(range(num_rows))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
