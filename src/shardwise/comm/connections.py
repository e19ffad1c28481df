"""From the addresses of the processes to one link per pair, among callers that may be anybody.

    store:   token (1) -> host records (2) -> TCP addresses, where a pair needs them (3) -> verdicts (4)
    sockets: each rank connects to every lower rank, then accepts every higher one; a hello proves the token

(1) Rank 0 draws a secret; who does not know it is turned away. (2) Ranks whose records are equal share a kernel and
its Unix sockets. (3) Listening ports are opened only then. (4) If a local connection failed anywhere, all connect
through TCP. The hello between two ranks::

    rank 3 calls rank 1                                    rank 1 answers
    token, 3, 1   (+ a descriptor of shared memory   -->   is the token ours, does it mean rank 1, can the memory
                   that holds the token, if local)         be read?  then "welcome", else the connection is closed

A caller has to send the token within a few seconds in all, however slowly its bytes come. Others are accepted
meanwhile, nothing is allocated for a caller but its hello, and a stranger is dropped without an answer.
"""

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from shardwise.comm.frames import WIRE
from shardwise.comm.links import PeerLink
from shardwise.comm.rendezvous import Rendezvous
from shardwise.comm.shared_memory import map_segment
from shardwise.errors import MismatchError, PeerError, in_words

HELLO_SECONDS = 5.0
"""How long a hello may take, and its answer."""

TOKEN_BYTES = 32

HELLO = struct.Struct(f"<{TOKEN_BYTES}sII")
"""Token, rank that calls, rank that is called: an address may lead to another rank of another host."""

_WELCOME = b"welcome"

_LOOK_UP_SECONDS = 0.2

_MAX_CALLERS = 1024
"""Callers whose hellos are awaited at a time; beyond, the one that has waited longest is dropped."""

_SHOWN_RANKS = 8


def connect(meeting: Rendezvous, *, shared_memory: bool) -> dict[int, PeerLink]:
    """One link to every other rank, by world rank; raises `PeerError` when one cannot be had."""
    if meeting.rank == 0:
        meeting.publish("token", secrets.token_hex(TOKEN_BYTES // 2))  # two letters per byte
    token = meeting.read("token", 0).encode()
    with contextlib.ExitStack() as listeners:
        # Before the record is published: who reads it may call at once.
        unix = _listen_on_unix(token, meeting.rank) if shared_memory else None
        if unix is not None:
            listeners.enter_context(unix)
        meeting.publish("host", _record("" if unix is None else _host_identity()))
        hosts = _hosts(meeting.read_all("host"), meeting.rank)
        local = {rank for rank, host in enumerate(hosts) if host and host == hosts[meeting.rank]} - {meeting.rank}
        links: dict[int, PeerLink] = {}
        failure = ""
        if local:
            assert unix is not None
            # A failure is not raised yet: two ranks may believe that they share a kernel and be kept apart, as in
            # containers. Then there is still TCP, and all ranks take it together.
            try:
                links = _connect_pairs(meeting, token, local, [unix], _unix_connector(meeting.rank, token))
            except OSError as error:
                failure = in_words(error)
        if any(hosts):
            # All ranks, not the pair alone: a rank that waits in `accept` for a peer that has given up must hear of it.
            meeting.publish("verdict", failure)
            if any(meeting.read_all("verdict")):
                for link in links.values():
                    link.close()
                links = {}
        remote = set(range(meeting.size)) - links.keys() - {meeting.rank}
        if remote:
            links |= _connect_through_tcp(meeting, token, remote)
    # The store may live in rank 0: it stays until everybody has read what it needs.
    meeting.publish("connected", "")
    if meeting.rank == 0:
        meeting.read_all("connected")
    return links


def _record(host: str) -> str:
    """What a rank says of itself: its version before anything that another version might say otherwise."""
    return f"wire format {WIRE} (shardwise {_own_version()})\n{host}"


@cache
def _own_version() -> str:
    """Found once: to parse what pip has installed takes longer than to meet."""
    try:
        return metadata.version("shardwise")
    except metadata.PackageNotFoundError:
        return "that is not installed"


def _hosts(records: Sequence[str], own_rank: int) -> list[str]:
    """The hosts of all ranks. Raises MismatchError, with the versions, where they do not speak as this one does."""
    # The host is the last line, so that a record of another version can still be taken apart.
    versions, _, hosts = zip(*(record.rpartition("\n") for record in records), strict=True)
    different = [rank for rank, version in enumerate(versions) if not version.startswith(f"wire format {WIRE} ")]
    if different:
        lines = [
            f"  - rank {rank}: {versions[rank] or 'an older version, which does not say its format'}"
            for rank in sorted({own_rank, *different[:_SHOWN_RANKS]})
        ]
        raise MismatchError(
            "ranks run versions of shardwise that cannot talk to each other; install the same one on all hosts:\n"
            + "\n".join(lines)
        )
    return list(hosts)


def _connect_through_tcp(meeting: Rendezvous, token: bytes, ranks: set[int]) -> dict[int, PeerLink]:
    with contextlib.ExitStack() as open_listeners:
        listeners = _listen_on_tcp(_own_addresses(meeting.store_host))
        for listener in listeners:
            open_listeners.enter_context(listener)
        # One port for all addresses, and only those that are bound: a caller need not guess.
        bound = [listener.getsockname()[:2] for listener in listeners]
        meeting.publish("address", json.dumps([[address for address, _ in bound], bound[0][1]]))
        try:
            return _connect_pairs(meeting, token, ranks, listeners, _tcp_connector(meeting, token))
        except OSError as error:
            text = f"rank {meeting.rank} could not connect to ranks {sorted(ranks)} through TCP: {error}"
            raise PeerError(text, operation="start", purpose="connections") from error


def _connect_pairs(
    meeting: Rendezvous,
    token: bytes,
    ranks: set[int],
    listeners: Sequence[socket.socket],
    connect_to: Callable[[int, float], socket.socket],
) -> dict[int, PeerLink]:
    # Each pair has one caller. Rank 0 calls nobody and answers first, then rank 1 is through with its calls and
    # answers, and so on: no circle of ranks can wait for each other's answers.
    local = listeners[0].family == socket.AF_UNIX
    deadline = time.monotonic() + meeting.patience_seconds
    connections: dict[int, socket.socket] = {}

    def look_up(missing: Collection[int]) -> None:
        # A verdict before the connection is a failure: who succeeds publishes after it has connected to all.
        if local and any(meeting.has_published("verdict", rank) for rank in missing):
            raise ConnectionError("another rank has given up")

    try:
        for rank in sorted(ranks):
            if rank < meeting.rank:  # its listener takes the call even before it comes to `accept`
                connections[rank] = connect_to(rank, deadline)
        higher = {rank for rank in ranks if rank > meeting.rank}
        connections |= accept(listeners, higher, token, meeting.rank, deadline=deadline, look_up=look_up)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return {rank: PeerLink(connection, rank=rank, local=local) for rank, connection in connections.items()}


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no connection in time")
    return left


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
    # Callers come in any order, and strangers between them: all are heard at once, none can hold up another.
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
    # The timeout of a socket counts anew with each byte; the deadline is for the whole answer.
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
        # A caller that says nothing costs a descriptor: too late or too many, and it is dropped.
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
        # In constant time: how long a comparison takes must not say how much of a guess was right.
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


# Unix sockets in the abstract namespace: no file is made, and the name ends with its socket.


def _host_identity() -> str:
    # The namespace of the network is that of abstract names: containers of one host need not share it.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _unix_name(token: bytes, rank: int) -> str:
    # The names of abstract sockets are public, the token is not.
    return f"\0shardwise-{hashlib.blake2b(token, digest_size=16).hexdigest()}-{rank}"


def _listen_on_unix(token: bytes, rank: int) -> socket.socket | None:
    """A listener, or None where memory cannot be shared this way."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Tried before anybody relies on it: a sandbox may forbid either.
        _host_identity()
        os.close(os.memfd_create("shardwise-probe"))
        listener.bind(_unix_name(token, rank))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    return listener


def _unix_connector(own_rank: int, token: bytes) -> Callable[[int, float], socket.socket]:
    def connect_to(rank: int, deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_left(deadline))
            connection.connect(_unix_name(token, rank))
            say_hello(connection, token, own_rank, rank)
        except BaseException:
            connection.close()
            raise
        return connection

    return connect_to


# TCP


def _listen_on_tcp(addresses: Sequence[str]) -> list[socket.socket]:
    """Listeners at one port, each bound to one of the addresses that are announced, as far as they are this host's."""
    listeners: list[socket.socket] = []
    problems = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            port = listeners[0].getsockname()[1] if listeners else 0
            listeners.append(socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN))
        except OSError as error:
            problems.append(f"{address}: {error}")
    if not listeners:
        raise PeerError(
            f"this rank cannot listen at any of its addresses ({'; '.join(problems) or 'it has none'})",
            operation="start",
            purpose="connections",
        )
    return listeners


def _own_addresses(store_host: str | None) -> list[str]:
    """Addresses under which others may reach this host: on the way to the store first, then those of its name.

    A store at the loopback address is on this host, and so are all that use it: then nobody else has to get in.
    """
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(store_host or "localhost", 9, type=socket.SOCK_DGRAM):
            # Connecting a datagram socket sends nothing; it only chooses the interface.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                addresses.append(str(probe.getsockname()[0]))
    if addresses and store_host is not None and _is_loopback(store_host):
        return list(dict.fromkeys(addresses))
    with contextlib.suppress(OSError):
        addresses += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    return list(dict.fromkeys(addresses))


def _is_loopback(host: str) -> bool:
    """Whether the address means this host itself; a name that only leads to the loopback address does not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tcp_connector(meeting: Rendezvous, token: bytes) -> Callable[[int, float], socket.socket]:
    def connect_to(rank: int, deadline: float) -> socket.socket:
        # One after the other: a host may announce addresses that lead nowhere from here.
        addresses, port = json.loads(meeting.read("address", rank))
        problems = []
        for address in addresses:
            connection = None
            try:
                connection = socket.create_connection((address, port), timeout=min(_left(deadline), HELLO_SECONDS))
                say_hello(connection, token, meeting.rank, rank)
            except OSError as error:
                problems.append(f"{address} port {port}: {error}")
                if connection is not None:
                    connection.close()
            else:
                return connection
        raise ConnectionError(f"rank {rank} cannot be reached at " + "; ".join(problems))

    return connect_to
