"""What a rank's host does for a step of a model of tiny widths: the whole model, and its part under each schedule.

All sides run in the same processes in turns, and all ranks run the whole model at the same time: so every side has the
same neighbours on the machine. Processor time of the process in forwards and backwards, waits included as far as they
take the processor.
"""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import shardwise as sw
from benchmarks.pipeline.models import batches
from benchmarks.pipeline.ours import engine_of
from benchmarks.pipeline.outcome import Cell, Host
from shardwise.comm import Channel, alone

__all__ = ["WHOLE", "measure_host"]

WHOLE = "whole model"
NUM_WARM = 3
OF_HOST = ("1f1b", "interleaved")


def measure_host(cell: Cell, channel: Channel) -> Host:
    """Updates of all sides in turns, on one batch."""
    (batch,) = batches(cell.kind, cell.shape, cell.num_microbatches, 1)
    engines = {WHOLE: engine_of(cell.kind, cell.shape, "1f1b", cell.num_microbatches, alone())}
    engines |= {
        schedule: engine_of(cell.kind, cell.shape, schedule, cell.num_microbatches, channel) for schedule in OF_HOST
    }
    cpu_s: dict[str, list[float]] = {name: [] for name in engines}
    for name, engine in engines.items():
        _clock(engine, cpu_s[name])
    for _ in range(NUM_WARM + cell.num_rounds):
        for engine in engines.values():
            dist.barrier()
            engine.step(batch)
    runners = {name: engine.pipeline for name, engine in engines.items() if engine.pipeline is not None}
    num_steps = NUM_WARM + cell.num_rounds
    return Host(
        rank=channel.rank,
        cpu_s={name: seconds[NUM_WARM:] for name, seconds in cpu_s.items()},
        num_tried={name: runner.inference.num_tried for name, runner in runners.items()},
        num_replayed={
            name: runner.inference.num_replayed / (num_steps * cell.num_microbatches)
            for name, runner in runners.items()
        },
    )


def _clock(engine: sw.Engine, seconds: list[float]) -> None:
    train: Callable[..., Any] = engine._computation.train

    def clocked(*arguments: Any, **named: Any) -> Any:
        start_s = time.process_time()
        losses = train(*arguments, **named)
        seconds.append(time.process_time() - start_s)
        return losses

    setattr(engine._computation, "train", clocked)  # noqa: B010, it shadows a method
