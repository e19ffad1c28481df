"""The benchmark of offloaded state: its sides train the same, and what it says of bytes is the formula's."""

import pytest

import shardwise as sw
from benchmarks.offload import HEADER, SIDES, measure, rows_of


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.stress)])
def test_sides_hold_what_they_say(fake: str, ranks: int) -> None:
    found = sw.simulate(ranks, lambda channel: measure(channel, 1, 1, layers=1), device=fake)[0]
    assert list(found) == [side for side, (stage, _) in SIDES.items() if ranks > 1 or stage < 3]
    rows = rows_of(fake, ranks, 1, found)
    assert {len(row) for row in rows} == {len(HEADER)}
    assert [row[5] == "" for row in rows] == [SIDES[side][1] is None for side in found]
    for side, (seconds, used, on_device, on_host) in found.items():
        assert len(seconds) == len(used) == 1
        assert (on_host > 0) == (SIDES[side][1] is not None)
        if on_host:
            assert on_device < found[side.partition(",")[0]][2]
