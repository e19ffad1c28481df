"""Transfers that go on while the rank computes, for tests of what overlaps: one that is late, one that is written down.

    call      `LateWork`: what arrives is garbage until `wait`, and what is sent is read then, as late as can be
    `wait`    this transfer is made, after all that were called before it

An engine that reads too early gets nan; one that writes to what travels sends what it wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardwise as sw
from benchmarks.silence import Silence
from shardwise.comm import Work
from tests.engine.channels import GoesOnAlone
from tests.engine.loops import mean_square, plan_of, sgd
from tests.oracle.program import seeded


class LateWork:
    """A transfer that is made when somebody waits for it or for a later one."""

    def __init__(self, queue: "list[LateWork]", make: Callable[[], Work]) -> None:
        self._queue = queue
        self._make = make
        self.is_done = False
        queue.append(self)

    def wait(self) -> None:
        """Make all transfers up to this one, in the order of the calls."""
        while not self.is_done:
            first = self._queue.pop(0)
            first._make().wait()
            first.is_done = True


class Late(GoesOnAlone):
    """A channel whose collectives are made as late as they may be."""

    def __init__(self, channel: sw.Channel) -> None:
        super().__init__(channel)
        self._queue: list[LateWork] = []

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return Late(self._channel.over(ranks))

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        return None  # devices do not read each other's memory

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        filled = [input.numel()] * self.size if counts is None else list(counts)
        for rank, part in enumerate(output.split(filled)):
            if rank != self.rank:  # its own part may be the input
                _spoil(part)
        return LateWork(self._queue, lambda: self._channel.all_gather(output, input, purpose=purpose, counts=counts))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        return LateWork(
            self._queue, lambda: self._channel.reduce_scatter(output, input, purpose=purpose, counts=counts)
        )


def _spoil(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(0xA5)


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank did: computed something, began a transfer of so many bytes, or waited for one."""

    kind: str
    """compute, issue, wait"""
    what: str
    num_bytes: int = 0
    number: int = -1
    """Of the transfer."""


@dataclass
class Log:
    """The events of one rank, in order."""

    events: list[Event] = field(default_factory=list)
    num_transfers: int = 0

    def issue(self, what: str, num_bytes: int) -> Work:
        """A transfer begins."""
        number, self.num_transfers = self.num_transfers, self.num_transfers + 1
        self.events.append(Event("issue", what, num_bytes, number))
        return _LoggedWork(self, what, number)

    def compute(self, what: str) -> None:
        """The device has something to compute."""
        self.events.append(Event("compute", what))


class _LoggedWork:
    is_done = False

    def __init__(self, log: Log, what: str, number: int) -> None:
        self._log, self._what, self._number = log, what, number

    def wait(self) -> None:
        self._log.events.append(Event("wait", self._what, number=self._number))


class Logged(Silence):
    """One rank of two which writes down what travels."""

    def __init__(self, log: Log) -> None:
        super().__init__(rank=0, size=2)
        object.__setattr__(self, "log", log)

    def over(self, ranks: Sequence[int]) -> sw.Channel:
        return self if len(ranks) == self.size else Silence(rank=list(ranks).index(self.rank), size=len(ranks))

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        super().all_gather(output, input, purpose=purpose, counts=counts)
        return self.log.issue(purpose, output.numel() * output.element_size() // 2)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        super().reduce_scatter(output, input, purpose=purpose, counts=counts)
        return self.log.issue(purpose, input.numel() * input.element_size() // 2)

    log: Log


class _Mark(torch.autograd.Function):
    """Writes down that the backward of a module has begun."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, log: Log, what: str) -> torch.Tensor:
        ctx.log, ctx.what = log, what  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.log.compute(f"B {ctx.what}")  # type: ignore[attr-defined]
        return gradient, None, None


class LoggedBlock(nn.Module):
    """A block that writes down when it computes."""

    def __init__(self, log: Log, name: str, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self._log, self._name = log, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._log.compute(f"F {self._name}")
        return _Mark.apply(x + self.down(torch.relu(self.up(x))), self._log, self._name)  # type: ignore[no-any-return, no-untyped-call]


WIDTH = 8


def engine_of(
    log: Log, channel: sw.Channel | None, stage: int, inner: Sequence[int], *, k: int = 1, **settings: Any
) -> sw.Engine:
    """An engine over blocks with these inner widths, of which one of 8 fills a bucket. channel: one of two ranks."""
    blocks = seeded(lambda: nn.Sequential(*(LoggedBlock(log, str(at), WIDTH, width) for at, width in enumerate(inner))))
    plan = plan_of("dp_shard=2", stage, k, sharding={"bucket_bytes": 600}, clip_grad_norm=0.5)
    given = {"optimizer": sgd, "loss": mean_square, **settings}
    return sw.parallelize(blocks(), plan, channel=channel or Logged(log), **given)


def third_step(log: Log, engine: sw.Engine, k: int = 1) -> list[Event]:
    """What it did: buffers are laid out in the first two."""
    for _ in range(3):
        log.events.clear()
        engine.step({"input": torch.ones(2 * k, WIDTH)})
    return log.events
