"""Limits of memory and time so small that small states reach them. No other file of tests sets them."""

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwise import checkpoint

# What a rank reads, gathers, writes or compares at a time, wherever it is; and how much of the size that is given.
_PARTS = {
    **{"ROUND_BYTES": 1, "OWN_BYTES": 1, "IN_PLACE_BYTES": 1, "ONE_ROUND_BYTES": 1, "ONE_ROUND_BYTES_ALONE": 1},
    **{"WINDOW_BYTES": 1, "LARGE_WINDOW_BYTES": 3, "_CHUNK_BYTES": 1, "_STRETCH_BYTES": 1, "_PART_BYTES": 1},
    **{"_BOUNCE_BYTES": 1, "_SPLIT_BYTES": 1, "_BLOCK_BYTES": 1, "_MAX_CHUNK_BYTES": 1},
}
_SECONDS = ("VISIBLE_SECONDS", "_MEETING_SECONDS")


@contextmanager
def small_limits(
    num_bytes: int | None = None, *, block_bytes: int | None = None, seconds: float | None = None
) -> Iterator[None]:
    """num_bytes: windows, rounds, chunks. block_bytes: what has a checksum. seconds: patience with slow storage."""
    names = [each.name for each in pkgutil.walk_packages(checkpoint.__path__, "shardwise.checkpoint.")]
    # Users cannot set these sizes, and states that reach the real ones would make thousands of cases slow.
    with pytest.MonkeyPatch.context() as patch:
        for module in map(importlib.import_module, names):
            values: dict[str, float] = {}
            if num_bytes is not None:
                values |= {name: part * num_bytes for name, part in _PARTS.items()}
                values["DEFAULT_MAX_BYTES"] = max(64, num_bytes)
            if block_bytes is not None and module.__name__.endswith((".saving", ".stream_digests")):
                values |= {"BLOCK_BYTES": block_bytes, "_AT_ONCE_BYTES": 2 * block_bytes}
            if seconds is not None:
                values |= dict.fromkeys(_SECONDS, seconds)
            for name in values.keys() & vars(module).keys():
                patch.setattr(module, name, values[name])
        yield
