"""Preemption in programs of your own: a signal to any rank ends the loops of all ranks after the same step.

    step            4              5                                  6
    rank 0     step, requested     step, requested -> True  -> save, break
    rank 1     step,  SIGTERM      step, requested -> True  -> save, break      exit code 143 on both

The wish travels in the exchange that each step makes. Only a call without a step before it makes an exchange, and the
end of a loop that no signal has ended: one may have come behind the last call.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import nn

from shardwise.engine import Engine
from shardwise.errors import PeerError, PlanError
from shardwise.runs.stop_signals import StopSignals


@dataclass(slots=True)
class _AskedEngine:
    """What is known of one engine. Simulated ranks have one each."""

    engine: Engine[nn.Module]
    stop_asking: Callable[[], None]
    thread: int
    """Of the loop."""
    answered_steps: int = -1
    """Steps up to the last call."""
    is_to_end: bool = False


class Preemption:
    """Notes SIGTERM and SIGUSR1 while its context lasts, so that a loop can save and end.

    A second signal ends the process at once, and its peers learn why. Signals within one second count as one. A signal
    that has a handler already keeps it, but for that of a Preemption around this one: both take note. Python has
    handlers in the main thread only; elsewhere none is installed. One context may be around `sw.simulate`.

    All ranks leave the context together. Where a signal has come after the last `requested`, `exit_code` has it then,
    and rank 0 prints a line.
    """

    def __init__(self) -> None:
        self._signals = StopSignals(ends_at_first=False)
        self._is_open = False
        self._asked: dict[int, _AskedEngine] = {}
        self.exit_code = 0
        """For `sys.exit` after the loop: 128 + the number of the signal that has come (143, 138), as shells have it.

        0 where none has. The same on all ranks.
        """

    def __enter__(self) -> Self:
        self._is_open = True
        self._signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        self._signals.__exit__(kind, error, traceback)
        for asked in self._asked.values():
            asked.stop_asking()
        # The context around this one sees the signal as well, and goes on to ask.
        if not self.exit_code and not self._signals.is_nested:
            self._tell_of_late_signal(error)
        self._asked.clear()
        self._signals.channel = None

    def requested(self, engine: Engine[nn.Module]) -> bool:
        """Whether a rank was asked to stop; the same on all ranks, which call this together, once per step.

        It answers for the time before the last step's exchange. A signal that comes later is seen after the next step.
        Raises PlanError outside of the context, and for what is no engine.
        """
        if not isinstance(engine, Engine):
            given = type(engine).__name__
            raise PlanError(f"requested was given a {given}; give the engine that sw.parallelize returned")
        if not self._is_open:
            raise PlanError(
                "requested was asked outside of its context; put the loop into `with sw.Preemption() as preemption:`"
            )
        if (asked := self._asked.get(id(engine))) is None:
            stop_asking = engine.ask_in_steps(self._signals.has_come)
            asked = self._asked[id(engine)] = _AskedEngine(engine, stop_asking, threading.get_ident())
            self._signals.channel = engine.channel
        if asked.is_to_end:
            return True
        known = engine.steps > asked.answered_steps >= 0
        asked.answered_steps = engine.steps
        # A step has said already that no rank asks. Where one does, or there was no step, the numbers are exchanged.
        if known and not engine.asked_to_stop:
            return False
        if number := self._signals.of_all(engine.channel):
            self.exit_code = 128 + number
            asked.is_to_end = True
        return asked.is_to_end

    def _tell_of_late_signal(self, error: BaseException | None) -> None:
        """The loop is over, and no signal has ended it: find out whether one has come since the last call."""
        number = self._signals.number
        if error is not None:
            if number:
                error.add_note(f"shardwise: {signal.Signals(number).name} had come, and its loop was not asked again")
            return
        here = [asked.engine.channel for asked in self._asked.values() if asked.thread == threading.get_ident()]
        # Simulated ranks have left their loops in other threads, where one process has the signals of all.
        if here:
            with contextlib.suppress(PeerError):  # the program has closed the channel: each rank knows its own only
                number = self._signals.of_all(here[-1])
        if number:
            self.exit_code = 128 + number
            if not here or here[-1].rank == 0:
                name = signal.Signals(number).name
                print(f"shardwise: {name} came after the last step of the loop, which did not see it", file=sys.stderr)
