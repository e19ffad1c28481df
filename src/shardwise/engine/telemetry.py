"""What each rank did with its time up to the exchange that closes a step; how that travels, and who is slow.

    step n - 1       |                      step n                                  | step n + 1
    closed update,   | outside: data,  open  forward, backward, reduce       closed | update, publish ...
           publish   | evaluation                                                   |
    <------------------- what the message that closes step n has ------------------>

One message has it, which the ranks exchange anyway. So the update of a step counts in the next one. Two parts:

    amounts    sent, received, late                                          18 bytes, which many ranks have alike
    seconds    compute, waiting, outside, peak, (rank, seconds for it) ..    20 bytes, and 8 for each of up to 4 ranks

Seconds travel in float32, because each rank has its own, and 4,096 ranks take all of them in every step. Meters find
out where the time goes:

    CPU       begin |  now - now before = compute + waits  | packed, end        the channel's tally has the waits
    device    begin (e)  .. (e) wait (e) ..                (e) packed, end (e)  events (e) on the stream; the host asks
                                                                                for times in later steps, as they pass
"""

import math
import resource
import struct
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from shardwise.comm import Channel
from shardwise.comm.accelerators import peak_memory
from shardwise.comm.agreement import understood
from shardwise.comm.rank_values import RankValues
from shardwise.comm.tally import Counted, DeviceSpan, tally_of
from shardwise.engine.step.edges import StepObserver
from shardwise.engine.step.reports import RankTimes

_AMOUNTS = struct.Struct("<QQH")
_SECONDS = struct.Struct("<fffQ")
_PAIR = struct.Struct("<if")
_NOBODY = -1
_MOST_NAMED = 4
"""Ranks that a message names as waited for: those for which it was longest."""

_PEAK_SECONDS = 1.0
"""How often the peak of memory is looked up: devices make a table of all that they count."""
_MOST_PENDING = 64
"""Steps that a device may be behind before the oldest is forgotten."""


def packed(times: RankTimes, *, num_ranks: int, late_steps: int = 0) -> list[bytes]:
    """As they travel: without the rank, which the order of the messages tells. num_ranks: of the world."""
    # As long on all ranks, however many they have waited for: values of one length travel in one piece.
    num_named = min(_MOST_NAMED, num_ranks - 1)
    named = [*times.waited_for.items(), *[(_NOBODY, 0.0)] * num_named][:num_named]
    amounts = _AMOUNTS.pack(times.sent_bytes, times.received_bytes, min(late_steps, 0xFFFF))
    seconds = _SECONDS.pack(times.compute_s, times.waiting_s, times.outside_s, times.peak_bytes)
    return [amounts, seconds + b"".join(_PAIR.pack(*each) for each in named)]


def rank_times(parts: Sequence[RankValues]) -> tuple[RankTimes, ...]:
    """Of all ranks, from what each has packed; empty where nothing is known yet."""
    of_amounts, of_seconds = parts
    if not (all(value for value, _ in of_amounts.runs) and all(value for value, _ in of_seconds.runs)):
        return ()
    amounts = understood(of_amounts, _AMOUNTS.unpack, purpose="losses and norms")
    times = understood(of_seconds, _seconds_in, purpose="losses and norms")
    return tuple(
        RankTimes(
            rank=rank,
            compute_s=compute_s,
            waiting_s=waiting_s,
            waited_for=waited_for,
            outside_s=outside_s,
            sent_bytes=sent,
            received_bytes=received,
            peak_bytes=peak,
            late_steps=late,
        )
        for rank, ((compute_s, waiting_s, outside_s, peak, waited_for), (sent, received, late)) in enumerate(
            zip(times, amounts, strict=True)
        )
    )


def _seconds_in(packed: bytes) -> tuple[float, float, float, int, dict[int, float]]:
    compute_s, waiting_s, outside_s, peak = _SECONDS.unpack_from(packed)
    pairs = _PAIR.iter_unpack(packed[_SECONDS.size :])
    return compute_s, waiting_s, outside_s, peak, {rank: s for rank, s in pairs if rank != _NOBODY}


class _Meter(StepObserver):
    """Of one rank: a tally counts its waits and its bytes."""

    @staticmethod
    @override
    def times(parts: Sequence[RankValues]) -> tuple[RankTimes, ...]:
        return rank_times(parts)

    def __init__(self, channel: Channel) -> None:
        self._tally = tally_of(channel)
        self._rank, self._num_ranks, self._device = channel.rank, channel.size, channel.device
        self._counted: list[Counted] = []
        """Since the last step closed."""
        self._looked_s, self._peak_bytes = -math.inf, 0

    def _times(
        self,
        step_s: float,
        outside_s: float,
        waits: Sequence[tuple[int | None, float]],
        counted: Sequence[Counted],
        now_s: float,
    ) -> RankTimes:
        """step_s: in steps, with waits. waits: by the rank that came last, where that is known."""
        if now_s - self._looked_s >= _PEAK_SECONDS:
            self._looked_s = now_s
            self._peak_bytes = peak_memory(self._device) if self._device.type != "cpu" else _peak_of_process()
        waited: Counter[int] = Counter()
        for rank, seconds in waits:
            if rank is not None:
                waited[rank] += seconds  # type: ignore[assignment]
        waiting_s = math.fsum(seconds for _, seconds in waits)
        return RankTimes(
            rank=self._rank,
            compute_s=step_s - waiting_s,
            waiting_s=waiting_s,
            waited_for=dict(waited.most_common()),
            outside_s=outside_s,
            sent_bytes=sum(each.sent_bytes for each in counted),
            received_bytes=sum(each.received_bytes for each in counted),
            peak_bytes=self._peak_bytes,
            late_steps=0,
        )


class HostMeter(_Meter):
    """Of a rank on the CPU, by the clock of its tally."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._since_s = 0.0
        self._left_s: float | None = None
        self._inside_s = self._outside_s = 0.0

    @override
    def begin(self) -> None:
        self._since_s = self._tally.now_s()
        if self._left_s is not None:
            self._outside_s += self._since_s - self._left_s
            self._left_s = self._since_s  # a step that is refused has no end, and the next one begins here
        self._tally.open()

    @override
    def packed(self) -> list[bytes]:
        """All since the last call, or of an earlier step where that is what is known; empty parts: nothing is."""
        self._add()
        waits = [wait for each in self._counted for wait in each.waited.items()]
        times = self._times(self._inside_s, self._outside_s, waits, self._counted, self._since_s)
        self._inside_s = self._outside_s = 0.0
        self._counted = []
        return packed(times, num_ranks=self._num_ranks)

    @override
    def end(self) -> None:
        self._add()
        self._left_s = self._since_s
        self._tally.close()

    def _add(self) -> None:
        now_s = self._tally.now_s()
        self._inside_s += now_s - self._since_s
        self._since_s = now_s
        self._counted.append(self._tally.take())


@dataclass(frozen=True, kw_only=True, slots=True)
class _DeviceStep:
    """Events of a device from the close of a step to that of the next."""

    number: int
    whole: DeviceSpan
    outside: list[DeviceSpan]
    counted: list[Counted]

    @property
    def waits(self) -> list[DeviceSpan]:
        return [span for each in self.counted for span in each.spans]

    @property
    def is_over(self) -> bool:
        return self.whole.is_over and all(each.is_over for each in self.waits)


class _DeviceMeter(_Meter):
    """Of a rank whose device computes, by events on its current stream. The host never waits for one."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._number = 0
        self._closed: torch.Event | None = None
        self._left: torch.Event | None = None
        self._outside: list[DeviceSpan] = []
        self._steps: deque[_DeviceStep] = deque(maxlen=_MOST_PENDING)
        self._known: tuple[int, RankTimes] | None = None

    @override
    def begin(self) -> None:
        self._tally.open()
        begun = self._tally.event(self._device)
        if self._left is not None:
            self._outside.append(DeviceSpan(self._left, begun, None))
            self._left = begun  # a step that is refused has no end, and the next one begins here
        self._closed = self._closed or begun

    @override
    def packed(self) -> list[bytes]:
        assert self._closed is not None, "a step has begun"
        closed = self._tally.event(self._device)
        self._counted.append(self._tally.take())
        whole = DeviceSpan(self._closed, closed, None)
        step = _DeviceStep(number=self._number, whole=whole, outside=self._outside, counted=self._counted)
        self._steps.append(step)
        self._number += 1
        self._closed, self._outside, self._counted = closed, [], []
        while self._steps and self._steps[0].is_over:
            step = self._steps.popleft()
            outside_s = math.fsum(each.seconds for each in step.outside)
            waits = [(each.rank, each.seconds) for each in step.waits]
            inside_s = step.whole.seconds - outside_s
            self._known = step.number, self._times(inside_s, outside_s, waits, step.counted, self._tally.now_s())
        if self._known is None:
            return [b"", b""]
        number, times = self._known
        return packed(times, num_ranks=self._num_ranks, late_steps=self._number - 1 - number)

    @override
    def end(self) -> None:
        self._left = self._tally.event(self._device)
        self._counted.append(self._tally.take())
        self._tally.close()


def _peak_of_process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def step_meter(channel: Channel) -> StepObserver:
    """The one for the device of a channel."""
    return HostMeter(channel) if channel.device.type == "cpu" else _DeviceMeter(channel)
