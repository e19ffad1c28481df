"""The hello between two ranks that connect, among callers that may be anybody.

Who calls has to say the token within a few seconds in all, however slowly its bytes come. Others are accepted
meanwhile, nothing is allocated for a caller but its hello, and a stranger is dropped without an answer.
"""

import contextlib
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence

from shardwise.comm.shared_memory import map_segment

HELLO_SECONDS = 5.0
"""How long a hello may take, and its answer."""

TOKEN_BYTES = 32
HELLO = struct.Struct(f"<{TOKEN_BYTES}sII")
"""Token, rank that calls, rank that is called: an address may lead to another rank of another host."""

_WELCOME = b"welcome"
_LOOK_UP_SECONDS = 0.2
_MAX_CALLERS = 1024
"""Callers whose hellos are awaited at a time; beyond, the one that has waited longest is dropped."""


class _Caller:
    """A connection whose other side has not proved yet that it is one of us."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + HELLO_SECONDS
        self._hello = b""
        self._descriptors: list[int] = []

    def hear(self) -> bool:
        """Take in what has come of the hello; whether it is whole. Raises OSError where the caller hangs up."""
        size = HELLO.size - len(self._hello)
        with contextlib.suppress(BlockingIOError):
            if self.connection.family == socket.AF_UNIX:
                more, descriptors, _, _ = socket.recv_fds(self.connection, size, 1)
                self._descriptors += descriptors
            else:
                more = self.connection.recv(size)
            if not more:
                raise ConnectionError("the caller hung up")
            self._hello += more
        return len(self._hello) == HELLO.size

    def rank(self, token: bytes, own_rank: int) -> int | None:
        """The rank that calls, which is answered; None for one that is not of us or wants another rank."""
        given, caller, called = HELLO.unpack(self._hello)
        if not secrets.compare_digest(given, token) or called != own_rank:
            return None
        try:
            if self.connection.family == socket.AF_UNIX:
                # The memory behind a descriptor is touched only for one who knows the token.
                shared = (
                    map_segment(self._descriptors.pop(), TOKEN_BYTES).numpy().tobytes() if self._descriptors else b""
                )
                if shared != token:
                    return None
            else:
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connection.setblocking(True)
            self.connection.settimeout(HELLO_SECONDS)
            self.connection.sendall(_WELCOME)
        except (OSError, ValueError):  # ValueError: memory that is shorter than a token
            return None
        return int(caller)

    def release(self) -> None:
        """Close what came along and was not used."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class _Reception:
    """Takes in callers at some listeners and sorts out who is one of us."""

    def __init__(
        self, listeners: Sequence[socket.socket], awaited: Collection[int], token: bytes, own_rank: int
    ) -> None:
        self.missing = set(awaited)
        self.found: dict[int, socket.socket] = {}
        self._token = token
        self._own_rank = own_rank
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._callers: dict[int, _Caller] = {}
        self._poll = select.poll()
        for listener in listeners:
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)

    def turn(self, patience_seconds: float) -> None:
        """Wait so long for callers and their words, and take them in."""
        for number, _ in self._poll.poll(patience_seconds * 1000):
            if number in self._listeners:
                self._take_in(self._listeners[number])
            elif number in self._callers:
                self._hear(number)
        now = time.monotonic()
        late = [number for number, caller in self._callers.items() if caller.deadline < now]
        for number in late or list(self._callers)[: max(0, len(self._callers) - _MAX_CALLERS)]:
            self._drop(number).close()

    def close(self) -> None:
        """Drop all who have not said who they are."""
        for number in list(self._callers):
            self._drop(number).close()

    def _take_in(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the caller has hung up before it was accepted
            connection, _ = listener.accept()
            self._callers[connection.fileno()] = _Caller(connection)
            self._poll.register(connection, select.POLLIN)

    def _hear(self, number: int) -> None:
        rank = None
        with contextlib.suppress(OSError):
            if not self._callers[number].hear():
                return
            rank = self._callers[number].rank(self._token, self._own_rank)
        connection = self._drop(number)
        if rank is not None and rank in self.missing:
            self.missing.remove(rank)
            self.found[rank] = connection
        else:
            connection.close()

    def _drop(self, number: int) -> socket.socket:
        self._poll.unregister(number)
        caller = self._callers.pop(number)
        caller.release()
        return caller.connection


def accept(
    listeners: Sequence[socket.socket],
    awaited: Collection[int],
    token: bytes,
    own_rank: int,
    *,
    deadline: float,
    look_up: Callable[[Collection[int]], None],
) -> dict[int, socket.socket]:
    """The connections of the ranks that are awaited, by rank.

    look_up: called now and then with the ranks that are missing; what it raises ends the wait. Raises TimeoutError
    when `deadline` (on the monotonic clock) passes.
    """
    reception = _Reception(listeners, awaited, token, own_rank)
    next_look = time.monotonic() + _LOOK_UP_SECONDS
    try:
        while reception.missing:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError("no connection in time")
            if now >= next_look:  # strangers that keep us busy do not keep us from it
                look_up(reception.missing)
                next_look = now + _LOOK_UP_SECONDS
            reception.turn(min(_LOOK_UP_SECONDS, deadline - now))
    except BaseException:
        for connection in reception.found.values():
            connection.close()
        raise
    finally:
        reception.close()
    return reception.found


def say_hello(connection: socket.socket, token: bytes, caller: int, called: int) -> None:
    """Prove to the rank that is called who calls; raises OSError unless it answers in time."""
    deadline = time.monotonic() + HELLO_SECONDS
    connection.settimeout(HELLO_SECONDS)
    hello = HELLO.pack(token, caller, called)
    if connection.family == socket.AF_UNIX:
        descriptor = os.memfd_create("shardwise-hello")
        try:
            os.write(descriptor, token)
            socket.send_fds(connection, [hello], [descriptor])
        finally:
            os.close(descriptor)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(hello)
    content = b""
    while len(content) < len(_WELCOME):
        if (left_seconds := deadline - time.monotonic()) <= 0:
            raise TimeoutError("the hello was not answered in time")
        connection.settimeout(left_seconds)
        more = connection.recv(len(_WELCOME) - len(content))
        if not more:
            raise ConnectionError("the other side hung up")
        content += more
    if content != _WELCOME:
        raise ConnectionError("the hello was not answered")
