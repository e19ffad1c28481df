"""How much memory steps take, in a process of their own: what others left of the heap would hide it."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shardwise.checkpoint import outputs, windows


def peaks_of(steps: Callable[..., Iterator[str]], *arguments: Any, window_part: int) -> dict[str, float]:
    """MiB above what was there before, when `steps` comes to each name; what it does before the first is not counted.

    Windows are of that part of their size, so that small tensors show what large ones would take.
    """
    spawned = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[dict[str, float]] = spawned.Queue()
    process = spawned.Process(target=_measure, args=(steps, arguments, window_part, queue))
    # Small blocks that a thread frees stay in its arena, up to 50 MiB by chance. With pages of their own they go back.
    with patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": "65536"}):
        process.start()
    process.join(100)
    assert process.exitcode == 0
    return queue.get(timeout=10)


def _measure(
    steps: Callable[..., Iterator[str]],
    arguments: tuple[Any, ...],
    window_part: int,
    queue: "multiprocessing.Queue[dict[str, float]]",
) -> None:
    torch.set_num_threads(1)
    for name in ("WINDOW_BYTES", "LARGE_WINDOW_BYTES"):
        for module in (windows, outputs):
            setattr(module, name, getattr(module, name) // window_part)
    names = steps(*arguments)
    next(names)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident_mib("VmRSS")
    queue.put({name: _resident_mib("VmHWM") - before for name in names})


def _resident_mib(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024
