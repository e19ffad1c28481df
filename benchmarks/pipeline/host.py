"""What a rank's host does for a step of a model of tiny widths: a plain loop of the whole, and each schedule's part.

All sides run in the same processes in turns, and all ranks run the plain loop at the same time: so every side has the
same neighbours on the machine. Processor time of the process in a whole step, waits included as far as they take the
processor; AdamW is fused on all sides.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.pipeline.models import ADAMW, Batch, batches, loss_of, net
from benchmarks.pipeline.ours import engine_of
from benchmarks.pipeline.outcome import Cell, Host
from shardwise.comm import Channel

__all__ = ["PLAIN", "measure_host"]

PLAIN = "plain loop"
NUM_WARM = 3
OF_HOST = ("1f1b", "interleaved")


def measure_host(cell: Cell, channel: Channel) -> tuple[Host, dict[str, list[float]]]:
    """Updates of all sides in turns, on one batch; and the losses of each side."""
    (batch,) = batches(cell.kind, cell.shape, cell.num_microbatches, 1)
    engines = {
        schedule: engine_of(cell.kind, cell.shape, schedule, cell.num_microbatches, channel) for schedule in OF_HOST
    }
    sides: dict[str, Callable[[Batch], float]] = {PLAIN: _plain_loop(cell)}
    sides |= {name: _step_of(engine) for name, engine in engines.items()}
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    num_steps = NUM_WARM + cell.num_rounds
    for _ in range(num_steps):
        for name, step in sides.items():
            dist.barrier()
            start_s = time.process_time()
            losses[name].append(step(batch))
            cpu_s[name].append(time.process_time() - start_s)
    runners = {name: engine.pipeline for name, engine in engines.items() if engine.pipeline is not None}
    host = Host(
        rank=channel.rank,
        cpu_s={name: seconds[NUM_WARM:] for name, seconds in cpu_s.items()},
        num_tried={name: runner.inference.num_tried for name, runner in runners.items()},
        num_replayed={
            name: runner.inference.num_replayed / (num_steps * cell.num_microbatches)
            for name, runner in runners.items()
        },
    )
    return host, losses


def _step_of(engine: sw.Engine) -> Callable[[Batch], float]:
    return lambda batch: engine.step(batch).loss


def _plain_loop(cell: Cell) -> Callable[[Batch], float]:
    """A step of the whole model as anybody would write it."""
    model, _ = net(cell.kind, cell.shape, num_stages=1)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(batch: Batch) -> float:
        total = 0.0
        for at in range(cell.num_microbatches):
            part = {name: each[at : at + 1] for name, each in batch.items()}
            loss = model(**part).loss if cell.kind == "llama" else loss_of(model(part["values"]), part["target"])
            loss = loss / cell.num_microbatches
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step
