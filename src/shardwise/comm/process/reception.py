"""Callers at the listeners of a rank, among whom may be anybody: who of them is a rank of this run.

A caller has a few seconds in all to prove itself, however slowly its bytes come. Others are heard meanwhile, and only
its hello is kept of a caller. A stranger is counted and dropped. A rank receives callers twice: while it
starts, in the thread of the program (`accept`), and later in that of its `relay`.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Collection, Sequence

from shardwise.comm.process.handshake import Caller, check_formats
from shardwise.errors import few_of

LOOK_UP_SECONDS, LONGEST_LOOK_UP_SECONDS = 0.2, 2.0
"""How soon a rank that waits looks up whether another one has given up. Each time it waits twice as long."""

MAX_CALLERS = 1024
"""Callers whose proofs are awaited at a time; beyond, the one that has waited longest is dropped."""

_SHOWN_RANKS = 8


def accept(
    listeners: Sequence[socket.socket],
    awaited: Collection[int],
    key: bytes,
    own_rank: int,
    *,
    deadline: float,
    look_up: Callable[[Collection[int]], None],
    problems: Sequence[BaseException] = (),
) -> dict[int, socket.socket]:
    """The connections of the ranks that are awaited, by rank.

    look_up: called now and then with the ranks that are missing; what it raises ends the wait. problems: the first one
    that another thread puts there is raised. Raises TimeoutError
    when `deadline` (on the monotonic clock) passes, with the number of strangers; MismatchError where a rank that has
    proved itself speaks another format.
    """
    # Callers come in any order, and strangers between them: all are heard at once, none can hold up another.
    awaiting = Awaiting(listeners, awaited, key, own_rank)
    interval = LOOK_UP_SECONDS
    next_look = time.monotonic() + interval
    try:
        while awaiting.missing:
            if problems:
                raise problems[0]
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(awaiting.in_words())
            if now >= next_look:  # strangers that keep us busy do not keep us from it
                look_up(awaiting.missing)
                interval = min(2 * interval, LONGEST_LOOK_UP_SECONDS)
                next_look = now + interval
            awaiting.turn(min(LOOK_UP_SECONDS, deadline - now))
    except BaseException:
        for connection in awaiting.found.values():
            connection.close()
        raise
    finally:
        awaiting.close()
    return awaiting.found


class Reception:
    """Takes in callers at some listeners and sorts out who is one of us."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        key: bytes,
        own_rank: int,
        poll: select.poll,
        *,
        admits: Callable[[int], bool],
        welcome: Callable[[int, Caller], None],
    ) -> None:
        """poll: of the thread that receives. admits: whether a rank that has proved itself may be connected; welcome:
        given its connection then.
        """
        self.num_strangers = 0
        self._key = key
        self._own_rank = own_rank
        self._admits = admits
        self._welcome = welcome
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._callers: dict[int, Caller] = {}
        self._poll = poll
        for listener in listeners:
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)

    def take_in(self, number: int) -> None:
        """Something has come at this descriptor: a caller, or its words."""
        if number in self._listeners:
            with contextlib.suppress(OSError):  # the caller has hung up before it was accepted
                connection, _ = self._listeners[number].accept()
                self._callers[connection.fileno()] = Caller(connection, self._key, self._own_rank, self._admits)
                self._poll.register(connection, select.POLLIN)
        elif number in self._callers:
            self._hear(number)

    def drop_late(self) -> None:
        """A caller that says nothing costs a descriptor: too late or too many, and it is dropped."""
        now = time.monotonic()
        late = [number for number, caller in self._callers.items() if caller.deadline < now]
        for number in late or list(self._callers)[: max(0, len(self._callers) - MAX_CALLERS)]:
            self.num_strangers += 1
            self._drop(number).close()

    def patience_seconds(self) -> float | None:
        """Until the next caller is late; None where there is none."""
        first = min((caller.deadline for caller in self._callers.values()), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def close(self) -> None:
        """Drop all who have not proved who they are."""
        for number in list(self._callers):
            self._drop(number).close()

    def _hear(self, number: int) -> None:
        caller = self._callers[number]
        rank = None
        with contextlib.suppress(OSError, ValueError):
            rank = caller.hear()
            if rank is None:
                return
        connection = self._drop(number)
        self.num_strangers += not caller.is_of_us
        if rank is None:
            connection.close()
        else:
            self._welcome(rank, caller)

    def _drop(self, number: int) -> socket.socket:
        self._poll.unregister(number)
        caller = self._callers.pop(number)
        caller.release()
        return caller.connection


class Awaiting:
    """A rank that starts, and the ranks whose calls it awaits."""

    def __init__(self, listeners: Sequence[socket.socket], awaited: Collection[int], key: bytes, own_rank: int) -> None:
        self.missing = set(awaited)
        self.found: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._reception = Reception(
            # A rank that has started already may call for a message; it will call again.
            listeners,
            key,
            own_rank,
            self._poll,
            admits=self.missing.__contains__,
            welcome=self._welcome,
        )

    @property
    def num_strangers(self) -> int:
        """Callers that did not prove themselves."""
        return self._reception.num_strangers

    def turn(self, patience_seconds: float) -> None:
        """Wait so long for callers and their words, and take them in."""
        for number, _ in self._poll.poll(patience_seconds * 1000):
            self._reception.take_in(number)
        self._reception.drop_late()

    def in_words(self) -> str:
        """Who is missing, and how many strangers called: one of them may be a rank that was given another secret."""
        missing = few_of([str(rank) for rank in sorted(self.missing)], _SHOWN_RANKS, quotes=False)
        strangers = f"; {self.num_strangers} that called did not prove to be ranks of this run"
        return f"no connection in time from rank {missing}{strangers if self.num_strangers else ''}"

    def close(self) -> None:
        """Drop all who have not proved who they are."""
        self._reception.close()

    def _welcome(self, rank: int, caller: Caller) -> None:
        self.missing.remove(rank)
        self.found[rank] = caller.connection
        assert caller.hellos is not None
        check_formats(*caller.hellos)
