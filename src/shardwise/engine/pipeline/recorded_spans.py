"""What a rank did and when, for traces and figures."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.plan.timeline import TimeSpan


class SpanRecorder:
    """Records forwards, backwards and waits of one rank while somebody wants to know."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.spans: list[TimeSpan] | None = None
        """What was recorded; None: nobody wants to know."""
        self._rank = rank
        self._device = device

    @contextmanager
    def noting(self, kind: str, microbatch: int, stage: int) -> Iterator[None]:
        """Record what the body takes."""
        if self.spans is None:
            yield
            return
        start_s = self._now_s()
        yield
        self.spans.append(
            TimeSpan(
                rank=self._rank, kind=kind, microbatch=microbatch, stage=stage, start_s=start_s, stop_s=self._now_s()
            )
        )

    def _now_s(self) -> float:
        # Kernels run on after they were issued: without this a forward would last as long as its Python alone.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
