"""Records when a rank runs forwards and backwards, and when it waits in them."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from shardwise.comm.accelerators import synchronize
from shardwise.plan.timeline import TimeSpan

_NOTHING: AbstractContextManager[None] = nullcontext()


class SpanRecorder:
    """Records forwards, backwards and waits of one rank, while `spans` is a list."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.spans: list[TimeSpan] | None = None
        """The recorded spans; None: nothing is recorded."""
        self.updates: list[tuple[float, float]] | None = None
        """When optimizers began and ended; None: it is not recorded."""
        self.clock: Callable[[], float] = time.perf_counter
        self._rank = rank
        self._device = device

    def noting(self, kind: str, microbatch: int, stage: int) -> AbstractContextManager[None]:
        """Record when the body begins and ends."""
        return _NOTHING if self.spans is None else self._noting(self.spans, kind, microbatch, stage)

    @contextmanager
    def _noting(self, spans: list[TimeSpan], kind: str, microbatch: int, stage: int) -> Iterator[None]:
        start_s = self.now_s()
        yield
        spans.append(
            TimeSpan(
                rank=self._rank, kind=kind, microbatch=microbatch, stage=stage, start_s=start_s, stop_s=self.now_s()
            )
        )

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Record when the optimizers of an update begin and end."""
        if self.updates is None:
            yield
            return
        start_s = self.now_s()
        yield
        self.updates.append((start_s, self.now_s()))

    def now_s(self) -> float:
        """The time at which all that was issued is done."""
        # Kernels run on after they were issued: without this a forward would last as long as its Python alone.
        synchronize(self._device)
        return self.clock()
