"""The keeper of a host: a process that holds files in memory while programs are killed and started again.

    owners        each rank of the host keeps one connection open, under the session of its program
    all end well  the keeper ends at once, and its memory with it; so it does when one of them was stopped by hand
    one is lost   the keeper waits for the next program, so long as it was asked to, and then ends
    a stranger    other users are turned away on the Unix socket, and callers without the key of the owners on TCP

Files are anonymous memory of this process. They have no name in /dev/shm or elsewhere, so nothing is left behind
however it ends. A file appears when all its bytes have come; a writer that dies before leaves nothing.

Run as a program: `python -m shardwise.keepers.keeper NAME`, where NAME is that of its Unix socket.
"""

import contextlib
import errno
import mmap
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.keepers.keeper_talk import (
    MAX_REQUEST_BYTES,
    SECRET_BYTES,
    checked_peer,
    prove_to_caller,
    receive_head,
    receive_into,
    send_head,
)

_FIRST_OWNER_SECONDS = 120.0
"""A keeper that got no owner by then was started by a rank that has died meanwhile."""

_PROOF_SECONDS = 5.0
"""How long a caller may take to prove that it knows the key."""

_MAX_STRANGERS = 1024
"""Callers that may be proving it at a time; more are turned away."""


class _RefusalError(OSError):
    """What a keeper answers instead of doing what it was asked for."""


def _refusal(code: int, text: str = "") -> _RefusalError:
    return _RefusalError(code, text or os.strerror(code))


class _Files:
    """Files in memory, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, mmap.mmap | bytes] = {}
        self.num_bytes = self.peak_bytes = 0

    def names(self) -> list[str]:
        with self._lock:
            return list(self._files)

    def find(self, name: str) -> mmap.mmap | bytes:
        with self._lock:
            if name not in self._files:
                raise _refusal(errno.ENOENT)
            return self._files[name]

    @contextlib.contextmanager
    def room(self, name: str, num_bytes: int) -> Iterator[mmap.mmap | bytes]:
        """Memory for a new file, which is there once the caller has filled it. Else the memory is given back."""
        with self._lock:
            if name in self._files:
                raise _refusal(errno.EEXIST)
            # The kernel promises more memory than there is, and kills a process when it is used. So it is asked first.
            if num_bytes > (free := _available_bytes()):
                raise _refusal(errno.ENOMEM, f"{num_bytes:,} bytes do not fit in {free:,} bytes of free memory")
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        try:
            # Private: shared memory without a name would count as that of /dev/shm, which containers often bound.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, num_bytes, flags=flags) if num_bytes else b""
            yield memory
            with self._lock:
                if name in self._files:
                    raise _refusal(errno.EEXIST)
                self._files[name] = memory
        except BaseException:
            with self._lock:
                self.num_bytes -= num_bytes
            raise

    def delete(self, name: str) -> None:
        with self._lock:
            self.num_bytes -= len(self._files.pop(name, b""))


def _available_bytes() -> int:
    """What the system can give without swapping; without /proc no bound is known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return sys.maxsize


class KeeperProcess:
    """The process's state: files, owners, listeners. `run` returns when it has to end."""

    def __init__(self, listener: socket.socket) -> None:
        self.files = _Files()
        """What it holds."""
        self._key = secrets.token_bytes(SECRET_BYTES)  # of the owners, once there are some
        self._lock = threading.Lock()
        self._session = self._before = ""
        """Of the owners, and of those before them, who may have left files."""
        self._num_owners = 0
        self._lost_one = False
        self._is_stopped = False
        self._is_ending = False
        self._patience_seconds = 0.0
        self._deadline = time.monotonic() + _FIRST_OWNER_SECONDS
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        self._bound: list[str] = []
        self._port = 0
        self._selector = selectors.DefaultSelector()
        self._listeners = [listener]
        self._selector.register(listener, selectors.EVENT_READ, partial(self._meet, proves=False))
        # Threads wake the loop when owners come and go, and when it is to listen elsewhere too.
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda woken: woken.recv(4096))

    def run(self) -> None:
        """Answer callers until all owners have ended well, or were away for too long."""
        try:
            while (left_seconds := self._left_seconds()) is None or left_seconds > 0:
                for key, _ in self._selector.select(left_seconds):
                    key.data(key.fileobj)
        finally:
            # Callers that come now are refused, and start another keeper.
            with self._lock:
                self._selector.close()
                for each in (*self._listeners, self._woken, self._waker):
                    each.close()

    def _left_seconds(self) -> float | None:
        """None while there are owners. Once it is over, no owner is taken any more."""
        with self._lock:
            if self._num_owners:
                return None
            left_seconds = self._deadline - time.monotonic()
            self._is_ending = left_seconds <= 0
            return left_seconds

    def _meet(self, listener: socket.socket, *, proves: bool) -> None:
        try:
            connection, _ = listener.accept()
            # An answer and the bytes after it are two messages: the second must not wait for the first to be confirmed.
            if proves:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            return
        threading.Thread(target=self._serve, args=(connection, proves), daemon=True).start()

    def _serve(self, connection: socket.socket, proves: bool) -> None:
        """Answer one caller until it goes. A caller that says anything else is left."""
        caller = _Conversation(self, connection)
        # What a caller may do wrong has one answer: its connection is closed.
        with connection, contextlib.suppress(OSError, KeyError, TypeError, ValueError, OverflowError):
            try:
                if proves:
                    self._prove(connection)
                else:
                    checked_peer(connection)
                while True:
                    caller.answer(receive_head(connection, max_bytes=MAX_REQUEST_BYTES))
            finally:
                if caller.is_owner:
                    self.leave(well=caller.ends_well)

    def _prove(self, connection: socket.socket) -> None:
        if not self._strangers.acquire(blocking=False):
            raise ConnectionError("too many callers")
        try:
            # One limit for all of it, however slowly bytes come: a timer, since a timeout begins anew at each byte.
            timer = threading.Timer(_PROOF_SECONDS, _cut, [connection])
            timer.start()
            try:
                prove_to_caller(connection, self._key)
            finally:
                timer.cancel()
        finally:
            self._strangers.release()

    def own(self, session: str, key: bytes, patience_seconds: float) -> dict[str, Any]:
        """Another rank of a program is there, whose ranks on other hosts prove themselves by this key."""
        with self._lock:
            if self._is_ending:
                raise ConnectionError("it ends")  # the caller sees its connection closed, and starts another keeper
            # Two programs would remove each other's files.
            if self._num_owners and session != self._session:
                raise _refusal(errno.EBUSY, "another program, which still runs, has its replicas here")
            if session != self._session:
                self._before, self._session = self._session, session
                self._lost_one = self._is_stopped = False
            self._key, self._patience_seconds = key, patience_seconds
            self._num_owners += 1
            return {"before": self._before}

    def stop(self) -> None:
        """The program was stopped by hand: whatever becomes of its other ranks, none comes back."""
        with self._lock:
            self._is_stopped = True

    def leave(self, *, well: bool) -> None:
        """A rank has ended, or was killed."""
        with self._lock:
            self._num_owners -= 1
            self._lost_one |= not well
            if not self._num_owners:
                waits = self._lost_one and not self._is_stopped
                self._deadline = time.monotonic() + (self._patience_seconds if waits else 0.0)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._waker.send(b"w")

    def listen(self, addresses: list[str], ports: list[int]) -> dict[str, Any]:
        """Let other hosts reach it, at one port of these addresses; where they do already, nothing changes.

        ports: to choose from; 0 is any.
        """
        problems: list[str] = []
        with self._lock:
            for port in [self._port] if self._port else ports:
                for address in addresses:
                    if address not in self._bound:
                        self._bind(address, self._port or port, problems)
                if self._port:
                    break
            bound = [each for each in addresses if each in self._bound]
        if not bound:
            raise _refusal(errno.EADDRNOTAVAIL, "; ".join(problems[-4:]) or "this host has no address")
        self._wake_up()
        return {"addresses": bound, "port": self._port}

    def _bind(self, address: str, port: int, problems: list[str]) -> None:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            problems.append(f"{address} port {port}: {error.strerror}")
            return
        self._port = listener.getsockname()[1]
        self._bound.append(address)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, partial(self._meet, proves=True))


class _Conversation:
    """One connection, and what it was granted."""

    def __init__(self, keeper: KeeperProcess, connection: socket.socket) -> None:
        self._keeper = keeper
        self._connection = connection
        self._opened: mmap.mmap | bytes = b""
        self.is_owner = False
        self.ends_well = False

    def answer(self, head: dict[str, Any]) -> None:
        """Do what a head asks for, and say how it went."""
        try:
            _VERBS[head["do"]](self, head)
        except _RefusalError as refusal:
            send_head(self._connection, {"error": [refusal.errno, refusal.strerror]})

    def own(self, head: dict[str, Any]) -> None:
        """Become an owner."""
        session, key = str(head["session"]), bytes.fromhex(head["key"])
        answer = self._keeper.own(session, key, float(head["patience_seconds"]))
        self.is_owner = True
        send_head(self._connection, answer)

    def end(self, head: dict[str, Any]) -> None:
        """Say that this owner ends well."""
        self.ends_well = True
        if head["stops"]:
            self._keeper.stop()
        send_head(self._connection, {})

    def listen(self, head: dict[str, Any]) -> None:
        """Let other hosts reach the keeper."""
        send_head(self._connection, self._keeper.listen(list(head["addresses"]), list(head["ports"])))

    def names(self, head: dict[str, Any]) -> None:
        """List all files."""
        send_head(self._connection, {"names": self._keeper.files.names()})

    def held(self, head: dict[str, Any]) -> None:
        """Say how much memory the files have."""
        files = self._keeper.files
        send_head(self._connection, {"bytes": files.num_bytes, "peak_bytes": files.peak_bytes, "process": os.getpid()})

    def write(self, head: dict[str, Any]) -> None:
        """Take a new file."""
        with self._keeper.files.room(str(head["name"]), _size(head["bytes"])) as memory:
            send_head(self._connection, {})
            if memory:
                with memoryview(memory) as view:
                    receive_into(self._connection, view)
        send_head(self._connection, {})

    def delete(self, head: dict[str, Any]) -> None:
        """Remove a file, if it is there."""
        self._keeper.files.delete(str(head["name"]))
        send_head(self._connection, {})

    def clear(self, head: dict[str, Any]) -> None:
        """Remove all files."""
        for name in self._keeper.files.names():
            self._keeper.files.delete(name)
        send_head(self._connection, {})

    def open(self, head: dict[str, Any]) -> None:
        """Choose the file that `read` reads."""
        # It stays this caller's after it was deleted, as an open file of a disk does.
        self._opened = self._keeper.files.find(str(head["name"]))
        send_head(self._connection, {"bytes": len(self._opened)})

    def read(self, head: dict[str, Any]) -> None:
        """Give a part of it."""
        start, num_bytes = _size(head["start"]), _size(head["bytes"])
        with memoryview(self._opened) as view:
            if start + num_bytes > len(view):
                raise _refusal(errno.EINVAL, "more bytes than the file has")
            send_head(self._connection, {})
            self._connection.sendall(view[start : start + num_bytes])


_VERBS: dict[str, Callable[[_Conversation, dict[str, Any]], None]] = {
    name: getattr(_Conversation, name)
    for name in ("own", "end", "listen", "names", "held", "write", "delete", "clear", "open", "read")
}


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ConnectionError(f"{value!r} is no number of bytes")
    return value


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def main(name: str) -> int:
    """Be the keeper of this name, in another process; where one is there already, nothing is done."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return 0
        print(error.strerror, file=sys.stderr)
        return 1
    # Who started this waits for its end, and may connect then. The keeper has another parent, which reaps it.
    if os.fork():
        return 0
    # A pipe of the starter that stayed open here would keep its readers waiting.
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silence, descriptor)
    # The terminal's Ctrl-C and hang-up mean the program, whose ranks then say what becomes of the files.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    KeeperProcess(listener).run()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    # Threads of callers that are still connected are not waited for.
    os._exit(code)
