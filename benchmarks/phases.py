"""Where the time of our own step goes, seen from outside: clocks on the channel, the model and the optimizer."""

import cProfile
import io
import json
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.cells import in_processes
from benchmarks.ours import OURS_SETTINGS, cast_each_time, channel, engine, plan_of
from benchmarks.workload import Batch, Shape, batches, llama
from shardwise.comm import Channel, Work

NUM_STEPS = 20


@dataclass(kw_only=True, slots=True)
class Clock:
    """Adds up the time of nested phases, each without the phases inside it."""

    seconds: dict[str, float] = field(default_factory=dict)
    _stack: list[str] = field(default_factory=list)
    _since: float = 0.0

    def enter(self, phase: str) -> None:
        """Charge what follows to `phase`."""
        self._charge()
        self._stack.append(phase)

    def leave(self) -> None:
        """Charge what follows to the phase before."""
        self._charge()
        self._stack.pop()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Charge what happens inside to `phase`."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()

    def on(self, phase: str, function: Callable[..., object]) -> Callable[..., object]:
        """Return the function, charged to `phase`."""

        def clocked(*arguments: object, **named: object) -> object:
            with self.during(phase):
                return function(*arguments, **named)

        return clocked

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._stack:
            self.seconds[self._stack[-1]] = self.seconds.get(self._stack[-1], 0.0) + now - self._since
        self._since = now


@dataclass(frozen=True, kw_only=True, slots=True)
class _ClockedWork:
    work: Work
    clock: Clock
    phase: str

    @property
    def is_done(self) -> bool:
        return self.work.is_done

    def wait(self) -> None:
        with self.clock.during(self.phase):
            self.work.wait()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockedChannel:
    """A channel whose calls and waits are charged to reduce, gather and exchange."""

    channel: Channel
    clock: Clock

    @property
    def rank(self) -> int:
        return self.channel.rank

    @property
    def size(self) -> int:
        return self.channel.size

    @property
    def device(self) -> torch.device:
        return self.channel.device

    @property
    def progresses_alone(self) -> bool:
        return self.channel.progresses_alone

    def over(self, ranks: Sequence[int]) -> Channel:
        return ClockedChannel(channel=self.channel.over(ranks), clock=self.clock)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self.channel.allocate(num_bytes)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        return self.channel.share(num_bytes)

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        with self.clock.during(f"exchange: {purpose}"):
            return self.channel.exchange(value, purpose=purpose)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        with self.clock.during("all-gather: start"):
            work = self.channel.all_gather(output, input, purpose=purpose, counts=counts)
        return _ClockedWork(work=work, clock=self.clock, phase="all-gather: wait")

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        with self.clock.during("reduce-scatter: start"):
            work = self.channel.reduce_scatter(output, input, purpose=purpose, counts=counts)
        return _ClockedWork(work=work, clock=self.clock, phase="reduce-scatter: wait")

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        return self.channel.send(tensor, destination, purpose=purpose)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        return self.channel.receive(tensor, source, purpose=purpose)

    def abort(self, reason: str) -> None:
        self.channel.abort(reason)

    def close(self) -> None:
        self.channel.close()


def run(side: str, shape: str, num_microbatches: int) -> str:
    """Profile one of our sides; return rank 0's phases and its most expensive functions as text."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps([side, shape, num_microbatches]))
        in_processes(_profile, folder)
        return (folder / "profile.txt").read_text()


def _profile(rank: int, folder: Path) -> None:
    side, shape, num_microbatches = json.loads((folder / "asked.json").read_text())
    clock = Clock()
    settings = OURS_SETTINGS[side]
    model = llama()
    if settings.autocast:
        cast_each_time(model)
    _clock_model(model, clock)
    over = ClockedChannel(channel=channel(settings.wire), clock=clock)
    plan = plan_of(over.size, num_microbatches, precision=settings.precision, sharding=settings.sharding)
    trained = engine(model, plan, over=over)
    trained.optimizer.register_step_pre_hook(lambda *_: clock.enter("optimizer"))
    trained.optimizer.register_step_post_hook(lambda *_: clock.leave())
    drawn = batches(Shape.parse(shape), num_microbatches, rank=rank, count=NUM_STEPS)
    with patch.object(torch.Tensor, "backward", clock.on("backward", torch.Tensor.backward)):
        text = _measure(lambda batch: trained.step(batch.whole), drawn, clock)
    if rank == 0:
        (folder / "profile.txt").write_text(f"{side}, k = {num_microbatches}, {shape} tokens, rank 0\n{text}")


def _clock_model(model: nn.Module, clock: Clock) -> None:
    model.register_forward_pre_hook(lambda *_: clock.enter("forward"))
    model.register_forward_hook(lambda *_: clock.leave())
    for parameter in model.parameters():
        # The engine will register its hook on the parameter: what it registers is then clocked.
        clocked = partial(_register_clocked, parameter.register_post_accumulate_grad_hook, clock)
        setattr(parameter, "register_post_accumulate_grad_hook", clocked)  # noqa: B010, it shadows a method


def _register_clocked(register: Callable[[Any], object], clock: Clock, hook: Callable[..., object]) -> object:
    return register(clock.on("gradients into the arena", hook))


def _measure(step: Callable[[Batch], object], drawn: list[Batch], clock: Clock) -> str:
    for batch in drawn[:3]:
        step(batch)
    clock.seconds.clear()
    dist.barrier()
    for batch in drawn:
        with clock.during("rest of the step (cast, scale, norm, checks)"):
            step(batch)
    total = sum(clock.seconds.values())
    lines = [f"  {1e3 * total / NUM_STEPS:8.2f} ms a step"]
    for phase, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        lines.append(f"  {1e3 * seconds / NUM_STEPS:8.2f} ms {seconds / total:6.1%}  {phase}")
    dist.barrier()
    profile = cProfile.Profile()
    for batch in drawn:
        profile.runcall(step, batch)
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("cumulative").print_stats("shardwise|method|built-in", 30)
    return "\n".join([*lines, f"functions, {NUM_STEPS} steps:", out.getvalue()])
