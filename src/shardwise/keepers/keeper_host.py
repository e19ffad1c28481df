"""A keeper as its callers have it: where it is reached, and the one of this host, started where there is none."""

import contextlib
import errno
import hashlib
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.keepers.keeper_talk import (
    MAX_ANSWER_BYTES,
    checked_peer,
    prove_to_keeper,
    receive_head,
    send_head,
)

_START_SECONDS = 60.0
"""How long a keeper may take to start."""

_BUSY_SECONDS = 30.0
"""How long owners of an earlier program may take to end."""

_ANSWER_SECONDS = 60.0
"""How long it may take to answer an owner."""

_PAUSE_SECONDS = 0.02


def socket_name(run: str, host: str) -> str:
    """The name of a keeper's Unix socket, in the abstract namespace of the host's network."""
    # All that start the same run on this host find it, and other users and runs have others.
    digest = hashlib.sha256(f"{os.getuid()}\n{run}\n{host}".encode()).hexdigest()
    return f"shardwise-keeper-{digest[:32]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperAddress:
    """Where a keeper is reached: by a name on its own host, by TCP from others."""

    name: str = ""
    addresses: tuple[str, ...] = ()
    port: int = 0
    key: bytes = b""
    """What callers by TCP have to know; the owners have given it to the keeper."""

    def connect(self, timeout_seconds: float) -> socket.socket:
        """A connection. Raises OSError; the timeout is of each of its calls too."""
        if self.name:
            return _connect_here(self.name, timeout_seconds)
        problems = []
        # One after the other: a host may announce addresses that lead nowhere from here, or to another program.
        for address in self.addresses:
            connection = None
            try:
                connection = socket.create_connection((address, self.port), timeout=timeout_seconds)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                prove_to_keeper(connection, self.key)
            except OSError as error:
                problems.append(f"{address} port {self.port}: {error.strerror or error}")
                if connection is not None:
                    connection.close()
            else:
                return connection
        raise ConnectionError(errno.EHOSTUNREACH, "the keeper of a host is not reached at " + "; ".join(problems))


def _connect_here(name: str, timeout_seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(f"\0{name}")
        checked_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def asked(connection: socket.socket, **head: Any) -> dict[str, Any]:
    """The answer to a head. Raises OSError, with the keeper's number and words, where it refuses."""
    send_head(connection, head)
    return answered(connection)


def answered(connection: socket.socket) -> dict[str, Any]:
    """The next answer on a connection."""
    answer = receive_head(connection, max_bytes=MAX_ANSWER_BYTES)
    if "error" in answer:
        code, text = answer["error"]
        raise OSError(code, text)  # becomes FileNotFoundError, FileExistsError, ... by its number
    return answer


class OwnKeeper:
    """The keeper of this host, which this process owns with the other ranks of its program, until it ends."""

    def __init__(self, name: str, session: str, *, key: bytes, starts: bool, patience_seconds: float) -> None:
        """Of the program `session`, whose ranks on other hosts prove themselves by `key`.

        starts: whether this process starts it where there is none. patience_seconds: how long it waits for another
        start of the program. Raises OSError where it cannot be had.
        """
        self._name = name
        self._key = key
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            connection = None
            try:
                connection = _connect_here(name, _ANSWER_SECONDS)
                answer = asked(connection, do="own", session=session, key=key.hex(), patience_seconds=patience_seconds)
                break
            except OSError as error:
                if connection is not None:
                    connection.close()
                # Refused or cut: there is none, or it just ends. Busy: ranks of an earlier start are still ending.
                passes = error.errno == errno.EBUSY or isinstance(error, ConnectionError)
                if not passes or time.monotonic() > deadline:
                    raise
                if starts and isinstance(error, ConnectionRefusedError):
                    _start(name)
                else:
                    time.sleep(_PAUSE_SECONDS)
        self._connection = connection
        self.before: str = answer["before"]
        """The program that it served before; empty for none."""
        # A worker that reads data may live on when its rank is killed; it is no owner.
        in_child = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (method := in_child()) and method())

    def listen(self, addresses: Sequence[str], ports: Sequence[int] | None = None) -> KeeperAddress:
        """Let other hosts reach it at these addresses of this host, and at one of these ports; how they do."""
        answer = asked(self._connection, do="listen", addresses=list(addresses), ports=list(ports or [0]))
        return KeeperAddress(addresses=tuple(answer["addresses"]), port=answer["port"], key=self._key)

    def clear(self) -> None:
        """Remove all files."""
        asked(self._connection, do="clear")

    def held(self) -> dict[str, int]:
        """Bytes that it holds, and the most that it held; its process."""
        return asked(self._connection, do="held")

    @property
    def here(self) -> KeeperAddress:
        """How it is reached on this host."""
        return KeeperAddress(name=self._name)

    def end(self, *, stops: bool = False) -> None:
        """This rank has ended well. The keeper ends with the last one of its host, if all do.

        stops: the program was stopped by hand, so that the keeper need not wait for it, however other ranks end.
        """
        with contextlib.suppress(OSError):
            asked(self._connection, do="end", stops=stops)
        self.close()

    def close(self) -> None:
        """Leave it; without `end`, it waits for the next program."""
        self._connection.close()


def _start(name: str) -> None:
    # A session of its own: signals to the group of the ranks do not reach it.
    command = [sys.executable, "-m", "shardwise.keepers.keeper", name]
    try:
        started = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=_START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, f"it did not start within {_START_SECONDS:g} s") from None
    if started.returncode:
        raise OSError(errno.ECHILD, f"it cannot be started: {started.stderr.strip() or started.returncode}")
