"""A recorded channel that notes how long each call keeps its rank, under the purpose that the caller named.

    all_gather(...)     issued, nothing noted
    work.wait()         [ wait for all_gather: values of unit 2 ]      as long as the host is in it
    exchange(...)       [ exchange: losses and norms ]

On a device the host waits for the transfer to end, so that there is something to note.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.accelerators import synchronize
from shardwise.comm.channel import Channel, Work
from shardwise.comm.recorded import Recorded, RecordedCall


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A call, or the wait for one, in seconds on the clock of its rank."""

    call: RecordedCall
    is_wait: bool
    start_s: float
    stop_s: float


class SpanLog:
    """The spans of all channels of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.spans: list[CallSpan] | None = None
        """The noted spans; None: nothing is noted."""
        self.clock: Callable[[], float] = time.perf_counter
        self._device = device

    def now_s(self) -> float:
        """The time at which all that was issued is done."""
        synchronize(self._device)
        return self.clock()


class _TimedWork:
    def __init__(self, work: Work, log: SpanLog, call: RecordedCall) -> None:
        self._work = work
        self._log = log
        self._call: RecordedCall | None = call

    @property
    def is_done(self) -> bool:
        return self._work.is_done

    def wait(self) -> None:
        log, call = self._log, self._call
        if log.spans is None or call is None:
            self._work.wait()
            return
        start_s = log.now_s()
        self._work.wait()
        log.spans.append(CallSpan(call, True, start_s, log.now_s()))
        self._call = None  # who waits again waits for nothing


class Timed(Recorded):
    """A `Channel` around another one; channels from `over` share its log."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.log = SpanLog(channel.device)

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """See `Channel.exchange`."""
        if self.log.spans is None:
            return self._channel.exchange(value, purpose=purpose)
        start_s = self.log.now_s()
        values = super().exchange(value, purpose=purpose)
        self.log.spans.append(CallSpan(self.calls.pop(), False, start_s, self.log.now_s()))
        return values

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.all_gather`."""
        return self._timed(super().all_gather(output, input, purpose=purpose, counts=counts))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.reduce_scatter`."""
        return self._timed(super().reduce_scatter(output, input, purpose=purpose, counts=counts))

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        """See `Channel.send`."""
        return self._timed(super().send(tensor, destination, purpose=purpose))

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        """See `Channel.receive`."""
        return self._timed(super().receive(tensor, source, purpose=purpose))

    def _timed(self, work: Work) -> Work:
        # The list of calls is not kept: a run makes too many.
        return _TimedWork(work, self.log, self.calls.pop())

    def _wrapped(self, inner: Channel) -> "Timed":
        part = Timed(inner)
        part.log = self.log
        return part
