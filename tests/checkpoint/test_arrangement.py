"""Who writes what: replicas share large pieces."""

from itertools import pairwise

import pytest

import shardwise as sw
from shardwise.checkpoint.arrangement import arrange


@pytest.mark.parametrize("start", [0, 1 << 19])
@pytest.mark.parametrize("num_elements", [1 << 18, (1 << 19) + 3, 1 << 20])
def test_replicas_of_a_large_run_share_its_elements_wherever_it_begins(start: int, num_elements: int) -> None:
    size = start + num_elements + 5
    ends = [(0, start), (start, start + num_elements), (start + num_elements, size)]
    before, run, after = (sw.Piece(name="w", dtype="float32", global_shape=(size,), run=each) for each in ends)
    alone_on = [[before] if start else [], [], [], [after]]
    written = arrange([*([*each, run] for each in alone_on[:3]), alone_on[3]], "pieces", block_bytes=1 << 18).written
    runs = sorted((piece.elements.start, piece.elements.stop) for rank in written for piece in rank)
    assert (runs[0][0], runs[-1][1]) == (0, size)
    assert all(stop == following for (_, stop), (following, _) in pairwise(runs))
    parts = [sum(piece.num_elements for piece in rank if piece != before) for rank in written[:3]]
    assert sum(parts) == num_elements
    assert max(parts) < num_elements or num_elements == 1 << 18, "small ones stay whole"
