"""Our sides: the same model under every schedule."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import shardwise as sw
from benchmarks.pipeline.models import ADAMW, Batch, Kind, Shape, loss_of, net
from benchmarks.pipeline.step import Taken
from shardwise.comm import Channel
from shardwise.engine.forward.batches import MicrobatchLoss
from shardwise.engine.pipeline.runner import PipelineRunner
from shardwise.plan.timeline import TimeSpan

__all__ = ["SCHEDULES", "Ours", "engine_of", "num_stages_of", "runner_of"]

SCHEDULES = ("fthenb", "1f1b", "interleaved")


def num_stages_of(schedule: str, num_ranks: int) -> int:
    """Of a schedule's pipeline."""
    return num_ranks * sw.Pipeline(schedule=schedule).num_chunks


def engine_of(kind: Kind, shape: Shape, schedule: str, num_microbatches: int, channel: Channel) -> sw.Engine:
    """The model on all ranks of the channel, a pipeline and nothing else; one rank has the whole model."""
    model, stages = net(kind, shape, num_stages_of(schedule, channel.size))
    plan = sw.Plan(
        mesh=sw.Mesh(pp=channel.size),
        merge=sw.Merge(microbatches=num_microbatches),
        pipeline=sw.Pipeline(schedule=schedule, stages=stages) if channel.size > 1 else sw.Pipeline(),
    )
    return sw.parallelize(
        model,
        plan,
        optimizer=_adamw,
        loss=None if kind == "llama" else lambda output, batch: loss_of(output, batch["target"]),
        channel=channel,
    )


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAMW)


def runner_of(engine: sw.Engine) -> PipelineRunner:
    """What runs the stages of this rank."""
    runner = engine.pipeline
    assert runner is not None
    return runner


class Ours:
    """An engine whose forwards and backwards are clocked."""

    def __init__(self, kind: Kind, shape: Shape, schedule: str, num_microbatches: int, channel: Channel) -> None:
        self.engine = engine_of(kind, shape, schedule, num_microbatches, channel)
        self.runner = runner_of(self.engine)
        self._passes = (0.0, 0.0, 0.0)
        self._train = self.engine._computation.train
        setattr(self.engine._computation, "train", self._clocked)  # noqa: B010, it shadows a method

    def _clocked(self, *arguments: Any, **named: Any) -> Sequence[MicrobatchLoss]:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        losses = self._train(*arguments, **named)
        self._passes = (start_s, time.perf_counter(), time.process_time() - start_cpu_s)
        return losses

    def do(self, batch: Batch) -> Taken:
        """One update."""
        spans: list[TimeSpan] = []
        self.runner.recorder.spans = spans
        start_s = time.perf_counter()
        report = self.engine.step(batch)
        stop_s = time.perf_counter()
        self.runner.recorder.spans = None
        return Taken(
            start_s=start_s,
            passes_start_s=self._passes[0],
            passes_stop_s=self._passes[1],
            stop_s=stop_s,
            cpu_s=self._passes[2],
            loss=report.loss,
            spans=tuple(spans),
        )
