"""The peer: torch.distributed.pipelining over gloo, with the same pieces cut by hand into its stages."""

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from benchmarks.pipeline.models import ADAMW, Batch, Kind, Shape, loss_of, pieces, stages
from benchmarks.pipeline.ours import num_stages_of
from benchmarks.pipeline.step import Taken

__all__ = ["PEERS", "Theirs"]

PEERS = {"fthenb": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved"}
"""Our schedules -> theirs."""
SINGLE = {"fthenb": ScheduleGPipe, "1f1b": Schedule1F1B}


class Theirs:
    """A schedule of the peer's."""

    def __init__(self, kind: Kind, shape: Shape, schedule: str, num_microbatches: int) -> None:
        """`schedule`: the name that we call it."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        num_stages = num_stages_of(schedule, num_ranks)
        places = stages(kind, shape, num_stages)
        whole = pieces(kind, shape)
        self.modules = [
            nn.Sequential(*(piece for piece, place in zip(whole, places, strict=True) if place == stage))
            for stage in range(rank, num_stages, num_ranks)
        ]
        built = [
            PipelineStage(module, rank + at * num_ranks, num_stages, torch.device("cpu"))
            for at, module in enumerate(self.modules)
        ]
        self._schedule: Any
        if len(built) == 1:
            self._schedule = SINGLE[schedule](built[0], num_microbatches, loss_fn=loss_of)
        else:
            self._schedule = ScheduleInterleaved1F1B(built, num_microbatches, loss_fn=loss_of)  # type: ignore[arg-type]
        self._optimizer = torch.optim.AdamW([each for part in self.modules for each in part.parameters()], **ADAMW)
        self._is_first, self._is_last = rank == 0, rank == num_ranks - 1

    def do(self, batch: Batch) -> Taken:
        """One update."""
        losses: list[torch.Tensor] = []
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        inputs = (batch["values"],) if self._is_first else ()
        wanted = {"target": batch["target"], "losses": losses} if self._is_last else {}
        self._schedule.step(*inputs, **wanted, return_outputs=False)
        passes_stop_s, cpu_s = time.perf_counter(), time.process_time() - start_cpu_s
        self._optimizer.step()
        self._optimizer.zero_grad()
        stop_s = time.perf_counter()
        return Taken(
            start_s=start_s,
            passes_start_s=start_s,
            passes_stop_s=passes_stop_s,
            stop_s=stop_s,
            cpu_s=cpu_s,
            loss=torch.stack(losses).mean().item() if losses else math.nan,
        )
