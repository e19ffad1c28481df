"""The benchmark of matrix optimizers: what it says of work and bytes holds without a clock."""

import pytest

import shardwise as sw
from benchmarks.matrix_optimizers import ASKED_BYTES, HEADER, measure


@pytest.mark.parametrize("layout", ["dp_shard=2", "tp=2"])
def test_work_is_shared_out_and_bytes_stay_fair(layout: str) -> None:
    row = sw.simulate(2, lambda channel: measure(channel, layout, 1, 1, width=96))[0]
    assert len(row) == len(HEADER)
    assert float(row[HEADER.index("bytes over AdamW's")]) <= ASKED_BYTES
