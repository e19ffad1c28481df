"""The benchmark of loops measures what it says: both sides of a row do the same, but for what the row is about."""

import pytest

from benchmarks.loops import ROWS, in_turns
from benchmarks.workload import Shape, batches
from shardwise.comm import alone


@pytest.mark.parametrize("name", ROWS)
def test_both_sides_of_a_row_take_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import loops, workload

    monkeypatch.setattr(loops, "llama", lambda: workload.llama(num_heads=2, num_layers=1, width=8))
    sides, (batch,) = ROWS[name](alone(), 2), batches(Shape.parse("2x4"), 2, rank=0, count=1)
    without, given = (side(batch) for side in sides)
    if isinstance(without, float) and isinstance(given, float):
        assert without == given
    assert len(in_turns(sides, [batch], 2, num_warm=1)) == 2
