"""Signals that ask a run to end, as schedulers send them before they take the machine away.

    before the first update    the run ends at once: nothing is lost
    while it trains            the update under way is finished and saved on all ranks, then the run ends
    a second signal            the run ends at once

A context inside of another takes the signals first, and passes them on to the outer one.

    SIGTERM ->  rank 1: number = 15      rank 1's next step says "stop"  ->  all ranks: same update, save, Stopped
                rank 0: no signal

A signal may reach one rank only, so no rank acts on its own: the wish to stop goes with the next step.
torch is not imported here: the command installs these before it checks the configuration.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from shardwise.launchers.environment import ONE_REQUEST_SECONDS

if TYPE_CHECKING:
    from shardwise.comm import Channel

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Schedulers send SIGTERM; SLURM sends SIGUSR1 for `--signal=USR1@...`. Both kill a process without a handler."""


class Stopped(BaseException):
    """A run that a signal has ended. Like KeyboardInterrupt it is no error that code in between may catch.

    number: of the signal. where: what all ranks have agreed on; without it this rank stops alone.
    """

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} {where}".strip())
        self.is_agreed = bool(where)
        self.exit_code = 128 + number
        """As shells have it."""


class StopSignals:
    """The stop signals of this process, while its context lasts; signals with a handler of others are left alone."""

    def __init__(self, *, ends_at_first: bool = True) -> None:
        """ends_at_first: a first signal outside of `noted` ends the run; else it is noted there too."""
        self._ends_at_first = ends_at_first
        self.number = 0
        """Of the signal that has come; 0 while there was none."""
        self._came_s = 0.0
        self.channel: Channel | None = None
        """Of the ranks that train together, which learn of a sudden end. None: the first signal ends the run."""
        self._pid = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}
        self._outer: StopSignals | None = None
        """The context around this one."""

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread only; simulated ranks are other threads.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # A handler that was installed before (by a launcher, a notebook) stays.
                handler = signal.getsignal(number)
                if isinstance(outer := getattr(handler, "__self__", None), StopSignals):
                    self._outer = outer
                elif handler != signal.SIG_DFL:
                    continue
                self._previous[number] = signal.signal(number, self._came)
            if self._outer is not None:
                self.number, self._came_s = self._outer.number, self._outer._came_s
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @property
    def is_nested(self) -> bool:
        """Whether another context around this one takes note of the same signals."""
        return self._outer is not None

    def has_come(self) -> bool:
        """Whether this process is asked to stop."""
        return self.number != 0

    def of_all(self, channel: "Channel") -> int:
        """The signal that has come on any rank, the same on all ranks, which call this together; 0 for none."""
        from shardwise.comm.agreement import understood

        purpose = "signals that ask to stop"
        numbers = channel.exchange(str(self.number).encode(), purpose=purpose)
        return next((number for number in understood(numbers, int, purpose=purpose) if number), 0)

    @contextlib.contextmanager
    def noted(self, channel: "Channel") -> Iterator[Callable[[], bool]]:
        """While this lasts a first signal is only noted; a second one tells the peers and ends the process."""
        self.channel = channel
        try:
            yield self.has_come
        finally:
            self.channel = None
        if self.number:  # it came when the ranks had agreed to go on
            raise Stopped(self.number)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child, such as a worker that reads data, is no run
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now_s = time.monotonic()
        if not self.number:
            self._note(number, now_s)
            if self.channel is None and self._ends_at_first:
                raise Stopped(number)
        elif now_s - self._came_s > ONE_REQUEST_SECONDS:
            self._end(number)

    def _note(self, number: int, now_s: float) -> None:
        if not self.number:
            self.number, self._came_s = number, now_s
        if self._outer is not None:
            self._outer._note(number, now_s)

    def _end(self, number: int) -> None:
        """End at once: nothing is unwound, because a save under way would be waited for."""
        channel = self.channel or (self._outer.channel if self._outer is not None else None)
        try:
            if channel is not None:
                # Peers learn of it at once; without it they would wait for this rank until their time limit.
                channel.abort(f"{signal.Signals(number).name} came twice")
        finally:
            os._exit(128 + number)
