"""The watch over what a device waits for: a host that reads a result must not wait for ever for a lost peer.

`wait` makes a stream wait, not the host. The host blocks later, where it reads a number from the device, and nothing
there knows of ranks. One thread looks at the connections between the CPUs, which do::

    stream    ... | reached |  waits for the kernel of an all-gather, in which rank 2 is missing   | passed | ...
    host          wait()   .item() ...........................................................  next call: PeerError
    watch                      looks   looks   looks: rank 2 is gone -> abort the communicators

A rank that waits for a second tells all so, with its last calls. Ranks whose kernels wait for each other in different
calls know it then. The kernels end, the host gets a number that means nothing, and the next call of the channel raises,
on every rank, with the culprit and the call in which the device waited.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shardwise.comm.channel import Signature
from shardwise.comm.device.groups import Communicators

_LOOK_SECONDS = 0.2
"""How soon a lost rank is noticed."""

_DRAIN_SECONDS = 0.001

_CLOSED_SECONDS = 3.0
"""How long a device waits for a rank that has closed its channel: its last bytes may be on their way still."""


class Witness(Protocol):
    """The connections between the CPUs, as far as the watch asks them."""

    def has_failed(self, *, patience_seconds: float = 0.0) -> bool:
        """Whether a rank is lost or has given up. Waits so long at most for another thread's call to end."""

    def has_closed(self, awaited: Sequence[int]) -> bool:
        """Whether one of these world ranks has closed its channel, as far as was heard."""

    def tell_waiting(self, signature: Signature, awaited: Sequence[int]) -> bool:
        """The device has waited for a while for these ranks: tell all, with the last calls, which are compared.

        Whether that was said; a call that is in progress says it itself.
        """

    def judge(self, signature: Signature, awaited: Sequence[int]) -> None:
        """Blame one of these ranks of the channel, for which the device has waited too long."""

    def blocked(self, signature: Signature) -> None:
        """Errors name this call from now on: the one in which the device waited when the channel failed."""


def patience_seconds(witness: Witness, awaited: Sequence[int], timeout_seconds: float) -> float:
    """How long a device may wait for these world ranks."""
    return min(timeout_seconds, _CLOSED_SECONDS) if witness.has_closed(awaited) else timeout_seconds


class DeviceWait:
    """A stream that waits for a transfer, or has waited."""

    def __init__(
        self, signature: Signature, witness: Witness, awaited: Sequence[int], reached: Callable[[], bool]
    ) -> None:
        """reached: whether the stream has come to the wait. awaited: the world ranks that may be missing."""
        self.signature = signature
        self.witness = witness
        self.awaited = awaited
        self.passed: Callable[[], bool] | None = None
        """Whether the stream has come out of it; None while the host itself is in the call."""
        self.was_said = False
        """Whether all have heard that this rank waits."""
        self._reached = reached
        self._since: float | None = None

    def waited_since(self, now: float) -> float:
        """When the stream began to wait; `now` while it has not come so far."""
        # Not when the call was made: a host is ahead of its device, and kernels of its own take as long as they need.
        if self._since is None and self._reached():
            self._since = now
        return now if self._since is None else self._since


class DeviceWatch:
    """One thread per channel and its parts, asleep while nothing is waited for."""

    def __init__(self, communicators: Communicators, *, timeout_seconds: float) -> None:
        self._communicators = communicators
        self._timeout_seconds = timeout_seconds
        self._notice_seconds = min(1.0, timeout_seconds / 4)
        self._waits: deque[DeviceWait] = deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.given_up: DeviceWait | None = None
        """The wait whose transfer was ended: what it was to give means nothing."""

    def add(self, wait: DeviceWait) -> None:
        """Watch over a wait until it has passed."""
        with self._change:
            self._waits.append(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shardwise device watch", daemon=True)
                self._thread.start()
            elif len(self._waits) == 1:
                self._change.notify()

    def drain(self) -> None:
        """Return when nothing is waited for any more, or the communicators have ended."""
        while not self._communicators.has_ended:
            with self._change:
                self._forget_passed()
                if not self._waits:
                    return
            time.sleep(_DRAIN_SECONDS)

    def stop(self) -> None:
        """End the thread soon."""
        with self._change:
            self._stopped = True
            self._change.notify()

    def _run(self) -> None:
        last_movement = time.monotonic()
        had_failed = False
        while True:
            with self._change:
                while not (self._waits or self._stopped):
                    self._change.wait()
                if not self._stopped:
                    self._change.wait(_LOOK_SECONDS)
                if self._stopped:
                    return
                now = time.monotonic()
                if self._forget_passed():
                    last_movement = now
                if not self._waits:
                    had_failed = False
                    continue
                first = self._waits[0]
            failed = first.witness.has_failed()
            if failed and had_failed:  # seen twice: what a lost rank has given before is let arrive
                self._end(first)
                return
            had_failed = failed
            waited_seconds = now - max(last_movement, first.waited_since(now))
            if waited_seconds >= self._notice_seconds and not first.was_said:
                first.was_said = first.witness.tell_waiting(first.signature, first.awaited)
            if waited_seconds >= patience_seconds(first.witness, first.awaited, self._timeout_seconds):
                first.witness.judge(first.signature, first.awaited)
                self._end(first)
                return

    def _end(self, wait: DeviceWait) -> None:
        self.given_up = wait
        wait.witness.blocked(wait.signature)
        self._communicators.abort()

    def _forget_passed(self) -> bool:
        """Whether there were any. The caller holds the lock."""
        # In order: streams come to later waits later. A wait that passed behind one that has not is forgotten with it.
        moved = False
        while self._waits and (passed := self._waits[0].passed) is not None and passed():
            self._waits.popleft()
            moved = True
        return moved
