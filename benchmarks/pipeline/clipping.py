"""How long a rank is busy with what is not its own: clocks on the calls of modules, on messages, on backward.

Every moment of the forwards and backwards counts for one phase:

    own        modules of this rank's stages, and operations between modules that are executed on them
    backward   of these
    foreign    calls of modules of other stages
    glue       all else: the user's code between modules, what all ranks compute (masks, positions), the engine
    sending    posting values and gradients
    waiting    for values and gradients, and taking them over; for all ranks, at the end

The clock is the processor time of the rank's thread (ranks may then be more than cores), and the clock on the wall.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

import shardwise as sw
from benchmarks.pipeline.models import Batch
from benchmarks.pipeline.ours import runner_of
from benchmarks.pipeline.outcome import Clipping
from shardwise.engine.pipeline.staged_calls import StagedOperation

__all__ = ["PHASES", "measure_clipping"]

PHASES = ("own", "backward", "foreign", "glue", "sending", "waiting")
NUM_WARM = 2


@dataclass(kw_only=True, slots=True)
class Clock:
    """Adds up nested phases, each without those inside it."""

    cpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    wall_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _stack: list[str] = field(default_factory=list)
    _since: tuple[float, float] = (0.0, 0.0)

    def on(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, charged to `phase`."""

        def clocked(*arguments: Any, **named: Any) -> Any:
            self._charge()
            self._stack.append(phase)
            try:
                return function(*arguments, **named)
            finally:
                self._charge()
                self._stack.pop()

        return clocked

    def _charge(self) -> None:
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        if self._stack:
            self.cpu_s[self._stack[-1]] += cpu_s - self._since[0]
            self.wall_s[self._stack[-1]] += wall_s - self._since[1]
        self._since = (cpu_s, wall_s)


def measure_clipping(engine: sw.Engine, drawn: list[Batch]) -> Clipping:
    """One update on each batch, after some to warm up on the first."""
    runner = runner_of(engine)
    for _ in range(NUM_WARM):
        engine.step(drawn[0])
    assert runner.schedule is not None
    num_microbatches = runner.schedule.num_microbatches
    lookups = runner.inference.num_lookups
    clocks = []
    for batch in drawn:
        clocks.append(Clock())
        with _clocked(engine, clocks[-1]):
            engine.step(batch)
    local = [unit for unit in runner.stages.units if runner.stages.is_local(unit.stage)]
    return Clipping(
        rank=runner.stages.rank,
        num_local=len(local),
        num_foreign=len(runner.stages.units) - len(local),
        num_lookups=(runner.inference.num_lookups - lookups) // (len(drawn) * num_microbatches),
        num_tried=runner.inference.num_tried,
        cpu_s=_medians([clock.cpu_s for clock in clocks], num_microbatches),
        wall_s=_medians([clock.wall_s for clock in clocks], num_microbatches),
    )


def _medians(updates: Sequence[Mapping[str, float]], num_microbatches: int) -> dict[str, float]:
    return {phase: statistics.median(each[phase] for each in updates) / num_microbatches for phase in PHASES}


@contextmanager
def _clocked(engine: sw.Engine, clock: Clock) -> Iterator[None]:
    runner = runner_of(engine)
    with ExitStack() as patches:
        for unit in runner.stages.units:
            if runner.stages.is_local(unit.stage):
                patches.enter_context(patch.object(unit, "forward", clock.on("own", unit.forward)))
            else:
                outer = clock.on("foreign", vars(unit.module)["forward"])
                patches.enter_context(patch.dict(vars(unit.module), {"forward": outer}))
        patches.enter_context(patch.object(StagedOperation, "run_plainly", _method(clock, StagedOperation.run_plainly)))
        patches.enter_context(patch.object(runner.mailbox, "send", clock.on("sending", runner.mailbox.send)))
        patches.enter_context(patch.object(runner.mailbox, "take", clock.on("waiting", runner.mailbox.take)))
        patches.enter_context(patch.object(runner, "_end", clock.on("waiting", runner._end)))
        backward = clock.on("backward", torch.autograd.backward)
        patches.enter_context(patch.object(torch.autograd, "backward", backward))
        train = clock.on("glue", engine._computation.train)
        patches.enter_context(patch.object(engine._computation, "train", train))
        yield


def _method(clock: Clock, function: Callable[..., Any]) -> Callable[..., Any]:
    clocked = clock.on("own", function)
    return lambda *arguments: clocked(*arguments)
