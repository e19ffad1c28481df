"""One update with its times, and who can do it."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.pipeline.models import Batch
from shardwise.plan.timeline import TimeSpan

__all__ = ["Do", "Taken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """One update on one rank; seconds on a clock that all ranks of a host share."""

    start_s: float
    passes_start_s: float
    """The first forward may begin."""
    passes_stop_s: float
    """The last backward has ended, and what has to be agreed on about them."""
    stop_s: float
    cpu_s: float
    """Processor seconds of the process from the first forward to the last backward, all its threads."""
    loss: float
    """The mean of the microbatches, where this rank knows it; else nan."""
    spans: tuple[TimeSpan, ...] = ()


Do = Callable[[Batch], Taken]
"""One update."""
