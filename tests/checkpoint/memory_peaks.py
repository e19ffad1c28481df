"""How much memory a call takes, in a process of its own: what others left of the heap would hide it."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shardwise.checkpoint import outputs, windows


def peak_of(call: Callable[..., object], small: Sequence[Any], large: Sequence[Any], *, window_part: int) -> float:
    """MiB at the peak of the call with the large arguments, above what the same with small ones has left.

    Windows are of that part of their size, so that small tensors show what large ones would take.
    """
    spawned = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[float] = spawned.Queue()
    process = spawned.Process(target=_measure, args=(call, small, large, window_part, queue))
    # Small blocks that a thread frees stay in its arena, up to 50 MiB by chance. With pages of their own they go back.
    with patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "65536"}):
        process.start()
    process.join(100)
    assert process.exitcode == 0
    return queue.get(timeout=10)


def _measure(
    call: Callable[..., object],
    small: Sequence[Any],
    large: Sequence[Any],
    window_part: int,
    queue: "multiprocessing.Queue[float]",
) -> None:
    torch.set_num_threads(1)
    for name in ("WINDOW_BYTES", "LARGE_WINDOW_BYTES"):
        for module in (windows, outputs):
            setattr(module, name, getattr(module, name) // window_part)
    call(*small)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident_mib("VmRSS")
    call(*large)
    queue.put(_resident_mib("VmHWM") - before)


def _resident_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024
