"""The benchmark of the control plane measures what it says: one rank of many, with stubs for its neighbours."""

import pytest

from benchmarks.control import KINDS, StepKind, StepSaid, milliseconds_of_a_step, milliseconds_of_exchanges


@pytest.mark.parametrize("rank", [0, 64, 127])
@pytest.mark.parametrize("num_bytes", [20, 400])
def test_one_rank_of_many_exchanges_with_its_neighbours_alone(rank: int, num_bytes: int) -> None:
    """400 bytes each are more than goes into one frame."""
    least, median, num_sockets = milliseconds_of_exchanges(128, rank, num_bytes)
    assert 0 < least <= median
    assert num_sockets <= 12  # of the tree, and of the relay


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_of_one_rank_of_many_decides_by_what_all_say(kind: StepKind) -> None:
    least, median, num_bytes = milliseconds_of_a_step(StepSaid(kind, 64), 64, 0)
    assert 0 < least <= median
    assert 200 < num_bytes < 300
