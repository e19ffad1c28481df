"""A row of `benchmarks.loops`: an average of the weights after every update, against the same step without one."""

from collections.abc import Callable

import torch

import shardwise as sw
from benchmarks.workload import ADAMW, Batch, llama
from shardwise.comm import Channel


def averages(channel: Channel, k: int) -> tuple[Callable[[Batch], object], Callable[[Batch], object]]:
    """One update without an average, and with EMA. It moves 12 bytes per owned element, whatever the rows."""

    def stepping(average: sw.Average | None) -> Callable[[Batch], object]:
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=channel.size),
            merge=sw.Merge(microbatches=k),
            clip_grad_norm=1.0,
            average=average,
        )
        optimizer = lambda parameters: torch.optim.AdamW(parameters, **ADAMW)  # noqa: E731
        engine = sw.parallelize(llama(), plan, optimizer=optimizer, channel=channel)
        return lambda batch: engine.step(batch.whole).loss

    return stepping(None), stepping(sw.Average(decay=0.999))
