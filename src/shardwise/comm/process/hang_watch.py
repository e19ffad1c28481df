"""The watch over one rank: it tells the others where this rank is when nothing moves, and prints what they have said.

A rank that waits says where it is after a quarter of the time limit. A rank that is stuck in its own program makes no
call, so that a thread speaks for it. At the time limit all have spoken that can::

    time     limit / 4                                limit
    rank 0   WHERE: "I wait for rank 2, train.py:57"  verdict -> report, PeerError
    rank 1   WHERE: "I wait for rank 2, train.py:57"  verdict -> PeerError
    rank 2   WHERE: "in no call, train.py:31", by its thread

The lowest rank that waits prints the report. A rank that has said nothing is dead, stopped, or in code that holds the
interpreter. As long as all ranks move, the thread sleeps and nothing is sent.
"""

import contextlib
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from shardwise.comm.channel import Signature
from shardwise.comm.hang_report import Whereabouts, lines_of, report
from shardwise.comm.process.messages import TransferInFlight

_LOOK_SECONDS = 1.0
"""How often the thread wakes up."""

_SILENT = "has not said where it is: it is stopped, dead, in code that holds Python, or has just left a call"


class Activity:
    """What a rank is doing: written by its calls, and read by its thread without a lock."""

    __slots__ = ("last_call", "num_acts", "thread", "waits_in")

    def __init__(self) -> None:
        self.num_acts = 0
        """Changes with each call, and with each message that a call moves."""
        self.thread = 0
        """That made the last call."""
        self.last_call: Signature | None = None
        self.waits_in: TransferInFlight | None = None

    def begin(self, call: Signature) -> None:
        """A call begins."""
        self.num_acts += 1
        self.thread = threading.get_ident()
        self.last_call = call

    def whereabouts(self, rank: int, seconds: float) -> Whereabouts:
        """Where the rank is, `seconds` after its last act."""
        waits_in = self.waits_in
        call = self.last_call if waits_in is None else waits_in.signature
        return Whereabouts(
            rank=rank,
            host=platform.node(),
            call="" if call is None else f"{call.operation} for {call.purpose!r}",
            awaited=() if waits_in is None else tuple(sorted(set(waits_in.awaited))),
            seconds=seconds,
            lines=lines_of(threading.main_thread().ident if waits_in is None else self.thread),
        )


class HangWatch:
    """What the ranks have said of where they are. The caller of every method holds the lock of the connections."""

    def __init__(self, rank: int, size: int, *, timeout_seconds: float) -> None:
        self.activity = Activity()
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout_seconds
        self._heard: dict[int, tuple[float, Whereabouts]] = {}
        """When, and what; this rank's own words as well."""
        self._said_act = -1
        self._has_printed = False

    def words(self, idle_seconds: float) -> bytes:
        """What this rank tells the others; empty where it is not idle for long enough, or has said it."""
        if idle_seconds < self._timeout_seconds / 4 or self._said_act == self.activity.num_acts:
            return b""
        self._said_act = self.activity.num_acts
        place = self.activity.whereabouts(self._rank, idle_seconds)
        self._heard[self._rank] = (time.monotonic(), place)
        return place.packed()

    def heard(self, rank: int, place: Whereabouts) -> None:
        """Another rank has said where it is."""
        self._heard[rank] = (time.monotonic(), replace(place, rank=rank))

    def moved(self, rank: int) -> None:
        """A rank has sent something: it is no longer where it said."""
        if self._heard:
            self._heard.pop(rank, None)

    def print_once(self) -> None:
        """Print the report, where this rank is the one that does."""
        speakers = {rank: place for rank, (_, place) in self._heard.items()}
        # A rank that waits is preferred: a rank that is stuck in its program may be killed before it looks.
        waiting = [rank for rank, place in speakers.items() if place.awaited]
        if self._has_printed or min(waiting or speakers, default=None) != self._rank:
            return
        self._has_printed = True
        places = []
        for rank in range(self._size):
            said_s, place = self._heard.get(rank, (0.0, Whereabouts(rank=rank, note=_SILENT)))
            places.append(replace(place, seconds=place.seconds + time.monotonic() - said_s))
        print(report(places, waited_seconds=self._timeout_seconds), file=sys.stderr, flush=True)


class QuietThread:
    """Speaks for a rank that makes no call, and notices the end of its program."""

    def __init__(
        self,
        activity: Activity,
        *,
        timeout_seconds: float,
        on_quiet: Callable[[float], None],
        on_end: Callable[[], None],
    ) -> None:
        """on_quiet: called now and then, with the seconds since the last act, where no call is in progress.

        on_end: called when the thread that made the calls was the main one, and has ended before the channel.
        """
        self._activity = activity
        self._timeout_seconds = timeout_seconds
        self._on_quiet = on_quiet
        self._on_end = on_end
        self._ends = threading.Event()
        # A daemon: a program that forgets `close` must end all the same.
        threading.Thread(target=self._run, name="shardwise hang watch", daemon=True).start()

    def stop(self) -> None:
        """There is nothing to watch any more; the thread ends soon."""
        self._ends.set()

    def _run(self) -> None:
        seen, last_act = -1, time.monotonic()
        main = threading.main_thread()
        while not self._ends.wait(min(_LOOK_SECONDS, self._timeout_seconds / 16)):
            if not main.is_alive() and self._activity.thread == main.ident:
                # Python waits for other threads of the program, which may run for long, before it ends.
                self._on_end()
                return
            now = time.monotonic()
            if self._activity.num_acts != seen:
                seen, last_act = self._activity.num_acts, now
            elif now - last_act >= self._timeout_seconds / 4 and self._activity.waits_in is None:
                with contextlib.suppress(OSError):
                    self._on_quiet(now - last_act)
