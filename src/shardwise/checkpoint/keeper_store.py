"""KeeperStore: a store in the memory of several hosts, each with a keeper that outlives the programs.

    write   a rank's file              to the keeper of its host, and to that of its buddy host
    create  manifests and reports      to the keeper of rank 0's host, which decides who is first, and to its buddy's
    names, open, delete                all keepers: after a loss a file may be anywhere

Two keepers have each file, so that it survives the loss of any one host. With one host there is one keeper.
"""

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from shardwise.checkpoint.local import check_complete, check_not_longer, checked_name, cut_off, naming
from shardwise.keepers.keeper_host import KeeperAddress, answered, asked
from shardwise.keepers.keeper_talk import receive_into, send_head


class KeeperStore:
    """A `Store` over the keepers of a program's hosts.

    location: what it is, for messages. keepers: of all hosts, in their order; hosts are a ring, and the next one is
    the buddy. own: the number of this rank's host. timeout_seconds: how long a keeper may be silent.
    """

    parallel_reads = 1
    """See `Store.parallel_reads`."""

    def __init__(self, location: str, keepers: Sequence[KeeperAddress], own: int, *, timeout_seconds: float) -> None:
        self._location = location
        self._links = [_Link(each, timeout_seconds) for each in keepers]
        self._own = own
        self._prefix = ""

    @property
    def location(self) -> str:
        """What it is; no path leads to it."""
        return f"{self._location}/{self._prefix}".rstrip("/")

    def within(self, folder: str) -> "KeeperStore":
        """The store that one folder of this one is."""
        inner = KeeperStore.__new__(KeeperStore)
        inner._location, inner._links, inner._own = self._location, self._links, self._own
        inner._prefix = f"{self._prefix}{checked_name(folder)}/"
        return inner

    def names(self, folder: str = "") -> Iterator[str]:
        """Names of all files below `folder`, on any host."""
        below = self._prefix + (f"{checked_name(folder)}/" if folder else "")
        found = {name for answer in self._of_all({"do": "names"}) for name in answer["names"]}
        return iter(sorted(name.removeprefix(self._prefix) for name in found if name.startswith(below)))

    def open(self, name: str) -> "KeeperReader":
        """Open a file, on this host if it is here; raises FileNotFoundError."""
        own = self._links[self._own]
        for link in sorted(self._links, key=lambda each: each is not own):
            with contextlib.suppress(FileNotFoundError):
                return KeeperReader(link, self._path(name), self._place(name))
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._place(name))

    def write(self, name: str, *, num_bytes: int) -> "KeeperWriter":
        """Begin a new file; it appears, on both hosts, when all its bytes have come."""
        return KeeperWriter(self._pair(self._own), self._path(name), self._place(name), num_bytes)

    def create(self, name: str, data: bytes) -> None:
        """Make a whole file in one act; raises FileExistsError, changing nothing, if there is one."""
        path, place = self._path(name), self._place(name)
        # All write to the same keeper first, so that it decides.
        for link in self._pair(0):
            with naming(place), link.talking() as connection:
                asked(connection, do="write", name=path, bytes=len(data))
                connection.sendall(data)
                answered(connection)

    def delete(self, name: str) -> None:
        """Remove a file on all hosts; nothing happens when it is not there."""
        self._of_all({"do": "delete", "name": self._path(name)})

    def cut(self) -> None:
        """Break all connections: what another thread waits for ends with an error, and nothing can be begun."""
        for link in self._links:
            link.cut()

    def close(self) -> None:
        """Break and give back all connections."""
        for link in self._links:
            link.end()

    def _path(self, name: str) -> str:
        return self._prefix + checked_name(name)

    def _place(self, name: str) -> str:
        return f"{self.location}/{name}"

    def _pair(self, first: int) -> list["_Link"]:
        """A host's keeper and its buddy's."""
        return [self._links[each] for each in dict.fromkeys((first, (first + 1) % len(self._links)))]

    def _of_all(self, head: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of all keepers to one head."""
        with contextlib.ExitStack() as held:
            connections = [held.enter_context(link.talking()) for link in self._links]
            # All are asked before one is heard: the slowest alone is waited for.
            for connection in connections:
                send_head(connection, head)
            return [answered(connection) for connection in connections]


class _Link:
    """The way to one keeper: a connection for short questions, which is kept, and others for files."""

    def __init__(self, address: KeeperAddress, timeout_seconds: float) -> None:
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_cut = False
        self._kept: socket.socket | None = None

    def connect(self) -> socket.socket:
        """A new connection, which the caller gives to `close`."""
        if self._is_cut:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the program ends, and copies no more")
        connection = self._address.connect(self._timeout_seconds)
        self._open.add(connection)
        return connection

    def close(self, connection: socket.socket) -> None:
        """Close a connection."""
        self._open.discard(connection)
        connection.close()

    @contextlib.contextmanager
    def talking(self) -> Iterator[socket.socket]:
        """The connection for short questions; one thread has it at a time."""
        with self._lock:
            if self._kept is None:
                self._kept = self.connect()
            try:
                yield self._kept
            except BaseException:
                # An answer may be under way, which the next question would take for its own.
                self.close(self._kept)
                self._kept = None
                raise

    def end(self) -> None:
        """Break all connections, and close the kept one when no thread uses it any more."""
        self.cut()
        with self._lock:
            if self._kept is not None:
                self.close(self._kept)
                self._kept = None

    def cut(self) -> None:
        """Break all connections."""
        self._is_cut = True
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class KeeperReader:
    """One file, open for reading at any place."""

    def __init__(self, link: _Link, path: str, place: str) -> None:
        self._link = link
        self._place = place
        self._lock = threading.Lock()
        self._connection: socket.socket | None = link.connect()
        try:
            self.size: int = asked(self._connection, do="open", name=path)["bytes"]
            """Bytes of the file."""
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start` on; raises EOFError when the file ends before."""
        if buffer.nbytes and start + buffer.nbytes > self.size:
            raise cut_off(self._place, buffer.nbytes, start, max(0, self.size - start))
        if self._connection is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self._place)
        if not buffer.nbytes:
            return
        with self._lock:
            asked(self._connection, do="read", start=start, bytes=buffer.nbytes)
            receive_into(self._connection, buffer.cast("B"))

    def close(self) -> None:
        """Give the file back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._link.close(connection)


class KeeperWriter:
    """A new file on some keepers, from its context's begin to its end."""

    def __init__(self, links: Sequence[_Link], path: str, place: str, num_bytes: int) -> None:
        self._links = links
        self._path = path
        self._place = place
        self._num_bytes = num_bytes
        self._num_written = 0
        self._connections: list[tuple[_Link, socket.socket]] = []

    def __enter__(self) -> Self:
        try:
            for link in self._links:
                self._connections.append((link, link.connect()))
            for _, connection in self._connections:
                send_head(connection, {"do": "write", "name": self._path, "bytes": self._num_bytes})
            # All keepers have the room before the first byte goes to one of them.
            self._hear_all()
        except BaseException:
            self._close()
            raise
        return self

    def write(self, data: memoryview) -> None:
        """Append; raises ValueError beyond the announced size."""
        check_not_longer(self._place, self._num_bytes, self._num_written, data.nbytes)
        if data.nbytes:
            part = data.cast("B")
            for _, connection in self._connections:
                connection.sendall(part)
        self._num_written += data.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # A keeper forgets what did not come as a whole, as soon as the connection is closed.
            if kind is None:
                check_complete(self._place, self._num_bytes, self._num_written)
                self._hear_all()
        finally:
            self._close()

    def _hear_all(self) -> None:
        for _, connection in self._connections:
            with naming(self._place):
                answered(connection)

    def _close(self) -> None:
        for link, connection in self._connections:
            link.close(connection)
        self._connections = []
