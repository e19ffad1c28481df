"""The benchmark of streams: its layouts are whole, its rows count within a round, and a small cell of it runs."""

import pytest

from benchmarks.stream import BY_HAND, CELLS, FIRST, GLOO, SAME, STREAM, model, row, table
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import check_cover


def test_every_layout_has_all_of_the_model() -> None:
    for layout in {each for cell in CELLS for each in cell}:
        for tensor in model(1):
            pieces = dict.fromkeys(layout.piece(tensor, rank) for rank in layout.holders(tensor))
            assert check_cover(pieces) == []


@pytest.mark.parametrize("num_mib", [1, 64])
def test_the_model_is_about_as_large_as_asked(num_mib: int) -> None:
    tensors = model(num_mib)
    assert len({each.name for each in tensors}) == len(tensors)
    num_bytes = sum(itemsize_bytes("bfloat16") * each.shape[0] * (*each.shape, 1)[1] for each in tensors)
    assert 0.8 < num_bytes / (num_mib << 20) < 2


def test_ratios_are_of_the_same_round_and_too_many_bytes_are_refused() -> None:
    seconds = {
        FIRST: [9.0],
        STREAM: [1.0, 10.0, 2.0],
        SAME: [0.1] * 3,
        BY_HAND: [2.0, 20.0, 8.0],
        GLOO: [4.0, 10.0, 8.0],
    }
    result = {"sent": 101, "needed": 100, "by hand": 300, "seconds": seconds}
    assert row(CELLS[0], 4, result)[3:5] == ("1.0100", "3.00")
    assert row(CELLS[0], 4, result)[-2:] == ("0.50", "0.25")
    with pytest.raises(AssertionError, match=r"106\.0 bytes were sent for 100\.0"):
        row(CELLS[0], 4, {**result, "sent": 106})


@pytest.mark.stress
def test_a_small_cell_runs() -> None:
    assert "tp 2 to tp 2, 1 MiB" in table([1], 1, cells=[0])
