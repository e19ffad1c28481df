"""How long an asynchronous save keeps training waiting, against one copy of the same bytes from memory to memory."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint import peers, states
from shardwise.checkpoint import AsyncSaver

if TYPE_CHECKING:
    from benchmarks.checkpoint.rank import Bench, Turn
    from benchmarks.checkpoint.states import Held

__all__ = ["JOB", "measure"]

JOB = "begin an asynchronous save"
FIRST = "begin the first asynchronous save"


def measure(bench: Bench, state: Held) -> None:
    """Time the part of both libraries' asynchronous saves that training waits for, and copies of as many bytes."""
    num_bytes = states.local_bytes(state)
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    _first(bench, state, source)
    saver = AsyncSaver(bench.folder / "async", channel=bench.world.channel)
    saver.save(state)  # the first of this saver makes its snapshot; after it, memory is warm as that of the copy
    saver.wait()
    group = dist.new_group()
    assert group is not None
    begun: list[Future[Any]] = []
    scratch = bench.folder / "round"

    def settle(name: str) -> None:
        saver.wait()
        while begun:
            begun.pop().result()
        bench.empty(scratch)

    turns: dict[str, Turn] = {
        "ours": partial(saver.save, state),
        "copy": partial(target.copy_, source),
        "dcp": lambda: begun.append(peers.begin_save_dcp(scratch, state, group)),
    }
    bench.in_turns(JOB, turns, between=settle)
    settle("")
    saver.close()
    bench.empty(bench.folder / "async")


def _first(bench: Bench, state: Held, source: torch.Tensor) -> None:
    """The first save of a new saver, with its peak memory, against a copy into new memory."""
    folder = bench.folder / "async"
    savers: list[AsyncSaver] = []

    def begin() -> None:
        savers.append(AsyncSaver(folder, channel=bench.world.channel))
        savers[-1].save(state)

    def close(name: str) -> None:
        while savers:
            savers.pop().close()
        bench.empty(folder)

    def whole() -> None:
        begin()
        savers[-1].wait()

    close("")
    bench.peak(JOB, "ours", whole, known_bytes=states.local_bytes(state))
    bench.in_turns(FIRST, {"ours": begin, "copy to new memory": source.clone}, between=close)
    close("")
