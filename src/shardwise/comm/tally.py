"""What a rank waited for other ranks, and how many bytes it moved: counted by its channel and all parts of that.

    host     receive from 1  [ ........ 1 gives ]                  0.3 s for rank 1
             all-gather      [ ..... 2 gives ...... 1 gives ]      0.5 s for rank 1, which came last

    device   stream          | reached | waits for the kernel of the all-gather | passed |
             host            goes on: it keeps both events, and asks for the time between them when they have passed

A wait of the host is the time in which nothing came: what it copies or adds meanwhile is work. On a device the transfer
itself is part of the wait, because its kernel runs until the tensor is there. Bytes are those that any implementation
has to move at least, as in `recorded`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from shardwise.comm.channel import Channel, Signature


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """Two events of one stream, and the world rank for which it waited between them; None: it may be any of several."""

    reached: torch.Event
    passed: torch.Event
    rank: int | None

    @property
    def is_over(self) -> bool:
        """Whether the device has come to the second event. Asking waits for nothing."""
        return bool(self.passed.query())

    @property
    def seconds(self) -> float:
        """The time between the events, once the device has passed both; nan where it has no clock."""
        try:
            return float(self.reached.elapsed_time(self.passed)) / 1e3
        except (NotImplementedError, RuntimeError):  # a backend whose events have no time
            return float("nan")


@dataclass(kw_only=True, slots=True)
class Counted:
    """What a tally has counted since somebody took it last."""

    waited: dict[int, float] = field(default_factory=dict)
    """Seconds of the host, by the world rank that came last."""
    spans: list[DeviceSpan] = field(default_factory=list)
    """Waits of the device."""
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class RankTally:
    """The counts of one rank, over all its channels. It counts between `open` and `close`, and costs nothing else."""

    now_s: Callable[[], float] = time.perf_counter
    last: int | None = None
    """The world rank for which the host waited last."""
    _thread: int | None = None
    _counted: Counted = field(default_factory=Counted)

    def open(self) -> None:
        """Begin to count, anew, and only the waits of this thread: others may wait too."""
        self.take()  # what a step that has failed has left
        self._thread = threading.get_ident()

    @property
    def is_open(self) -> bool:
        """Whether it counts."""
        return self._thread is not None

    def close(self) -> None:
        """Count no longer."""
        self._thread = None

    def take(self) -> Counted:
        """The counts so far; they begin anew."""
        taken, self._counted = self._counted, Counted()
        return taken

    def waited(self, rank: int, seconds: float) -> None:
        """The host has waited, and this world rank came last."""
        self.last = rank
        if self._thread == threading.get_ident():
            self._counted.waited[rank] = self._counted.waited.get(rank, 0.0) + seconds

    def moved(self, *, sent_bytes: int, received_bytes: int) -> None:
        """An exchange has been made."""
        if self._thread is not None:
            self._counted.sent_bytes += sent_bytes
            self._counted.received_bytes += received_bytes

    def count(self, signature: Signature, rank: int) -> None:
        """A call of a tensor has been made, or an `exchange` with its counts. rank: of the channel."""
        if self._thread is None:
            return
        size, counts = signature.dtypes[0].itemsize, signature.counts
        if signature.operation in ("send", "receive"):
            sends = signature.operation == "send"
            own, others = counts[0] * size, 0
        else:
            # Gathering sends the own part to every peer and takes each peer's part; scattering does the reverse.
            sends = signature.operation != "reduce_scatter"
            own, others = (len(counts) - 1) * counts[rank] * size, (sum(counts) - counts[rank]) * size
        # Of each call of a tensor: what it adds is not passed on.
        self._counted.sent_bytes += own if sends else others
        self._counted.received_bytes += others if sends else own

    def event(self, device: torch.device) -> torch.Event:
        """An event of the current stream of a device; one that has a time while the tally is open."""
        stream = torch.accelerator.current_stream(device)
        if self._thread is None:
            return stream.record_event()
        made = torch.Event(device, enable_timing=True)
        stream.record_event(made)
        return made

    def waited_on_device(self, reached: torch.Event, passed: torch.Event, rank: int | None) -> None:
        """The current stream of a device waits between two events that `event` gave."""
        if self._thread is not None:
            self._counted.spans.append(DeviceSpan(reached, passed, rank))


@runtime_checkable
class Tallied(Protocol):
    """What a channel can besides: count."""

    @property
    def tally(self) -> RankTally:
        """One for all channels of this rank."""


def tally_of(channel: Channel) -> RankTally:
    """The tally of a channel; one in which nothing is counted where the channel has none."""
    return channel.tally if isinstance(channel, Tallied) else RankTally()
