"""Buffers: one memory for all uses, given back as a whole."""

from pathlib import Path

import torch

from shardwise.checkpoint.reading import GrowingBuffer

_MIB = 1 << 20


def _resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


def test_a_buffer_is_kept_and_grows_where_more_is_needed() -> None:
    buffer = GrowingBuffer(1000)
    first = buffer.room(10)
    assert (first.dtype, first.numel()) == (torch.uint8, 1000)
    assert buffer.room(1000).data_ptr() == first.data_ptr()
    assert buffer.room(5000).numel() == 5000
    assert GrowingBuffer().room(0).numel() > 0
    first.fill_(7)  # views hold what they view
    assert int(first.sum()) == 7000


def test_a_buffer_takes_no_memory_before_it_is_used_nor_after() -> None:
    before = _resident()
    buffer = GrowingBuffer(64 * _MIB)
    memory = buffer.room(1)
    assert _resident() - before < 8 * _MIB
    memory.fill_(1)
    assert _resident() - before >= 60 * _MIB
    between = [torch.ones(100) for _ in range(100)]  # would keep the end of the heap where it is
    del buffer, memory
    assert _resident() - before < 8 * _MIB
    assert len(between) == 100
