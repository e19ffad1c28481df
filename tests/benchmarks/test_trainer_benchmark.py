"""The benchmark of trainers measures what it says: both sides take turns, and make the same update."""

from functools import partial

from benchmarks.trainer import NUM_WARM, turns
from benchmarks.workload import Shape, llama
from shardwise.comm import alone


def test_both_sides_take_turns() -> None:
    small = partial(llama, num_heads=2, num_layers=1, width=8)
    found = turns(alone(), Shape.parse("2x4"), 2, 3, small)
    # The first turn has no beginning that is known.
    assert len(found) == 3
    assert NUM_WARM > 1
    assert all(engine > 0 and trainer > 0 for engine, trainer in found)
