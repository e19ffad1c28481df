"""What a schedule predicts from the times of its stages, and what was measured."""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.pipeline.models import Shape
from shardwise.comm import Channel
from shardwise.engine.pipeline.mailbox import Key, Mailbox, MessageKind
from shardwise.plan.schedule_check import Transfers
from shardwise.plan.schedules import Schedule
from shardwise.plan.timeline import Timeline, TimeSpan, simulate_schedule

__all__ = ["StageTimes", "known", "measured", "most_in_flight", "predicted", "transfer_seconds"]

NUM_ROUND_TRIPS = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds of a forward and a backward, by stage."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def measured(timeline: Timeline, num_stages: int) -> StageTimes:
    """The median over microbatches, without the waits inside."""
    busy: dict[tuple[str, int, int], float] = defaultdict(float)
    for span in timeline.busy_spans():
        busy[span.kind, span.stage, span.microbatch] += span.stop_s - span.start_s
    seconds: dict[str, list[list[float]]] = {kind: [[] for _ in range(num_stages)] for kind in "FB"}
    for (kind, stage, _), value in busy.items():
        seconds[kind][stage].append(value)
    forward_s, backward_s = (tuple(map(statistics.median, seconds[kind])) for kind in "FB")
    return StageTimes(forward_s=forward_s, backward_s=backward_s)


def known(shape: Shape, num_stages: int) -> StageTimes:
    """Of stages that sleep."""
    num_layers = shape.num_layers // num_stages
    return StageTimes(
        forward_s=(num_layers * shape.forward_s,) * num_stages,
        backward_s=(num_layers * shape.backward_s,) * num_stages,
    )


def predicted(schedule: Schedule, transfers: Transfers, times: StageTimes, transfer_s: float) -> Timeline:
    """As the simulator says."""
    return simulate_schedule(
        schedule, transfers, forward_s=times.forward_s, backward_s=times.backward_s, transfer_s=transfer_s
    )


def most_in_flight(spans: Sequence[TimeSpan], stage: int) -> int:
    """The microbatches whose forward on a stage has begun and whose backward has not ended, at most at a time."""
    changes = [(span.start_s, 1) for span in spans if span.kind == "F" and span.stage == stage]
    changes += [(span.stop_s, -1) for span in spans if span.kind == "B" and span.stage == stage]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


def transfer_seconds(channel: Channel, shape: Shape) -> float:
    """From posting a value of the model's activations to having it: half of a round trip between ranks 0 and 1.

    The median; the same on all ranks.
    """
    mailbox = Mailbox(channel)
    value = torch.randn(1, shape.num_tokens, shape.width)
    seconds = []
    dist.barrier()
    for number in range(NUM_ROUND_TRIPS if channel.rank < 2 else 0):
        there, back = Key(MessageKind.VALUE, number, 0), Key(MessageKind.GRADIENT, number, 0)
        start_s = time.perf_counter()
        if channel.rank == 0:
            mailbox.send(1, there, value)
            mailbox.take(1, back)
        else:
            content = mailbox.take(0, there).content
            mailbox.send(0, back, content)
        seconds.append((time.perf_counter() - start_s) / 2)
    mailbox.settle()
    found = torch.tensor([statistics.median(seconds) if seconds else 0.0], dtype=torch.float64)
    dist.broadcast(found, 0)
    return found.item()
