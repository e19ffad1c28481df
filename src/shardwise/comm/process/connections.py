"""How the processes of a run get to each other: the links that all have from the start, and those made at first use.

    store:   token (1) -> host records (2) -> verdicts (4) -> TCP addresses, where ranks need them (3)
    sockets: links to the neighbours of `relay_neighbours`, at most seven; both sides prove themselves (`handshake`)

(1) Rank 0 draws what makes the key of this channel, with the secret of the run if there is one. (2) Ranks whose records
are equal share a kernel and its Unix sockets. (3) Listening ports are opened only then. (4) If a local connection
failed anywhere, all connect through TCP. Rank 0 collects the records, verdicts and addresses, and each rank reads a
table of all: a rank makes some 15 requests to the store, whatever the number of ranks.

These links carry what all ranks have to hear (`relay`). Two ranks that send messages to each other get a link for them
when they first do. So the listeners stay open, and each rank keeps the addresses of all.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.comm.hosts import RankNames
from shardwise.comm.process.frames import WIRE
from shardwise.comm.process.handshake import (
    HELLO_SECONDS,
    OTHER_FORMAT,
    format_and_version,
    key_of,
    say_hello,
)
from shardwise.comm.process.interfaces import is_loopback, listen, own_addresses, seen_from_here
from shardwise.comm.process.link import PeerLink
from shardwise.comm.process.reception import LONGEST_LOOK_UP_SECONDS, LOOK_UP_SECONDS, accept
from shardwise.comm.process.rendezvous import Rendezvous
from shardwise.comm.process.tree import relay_neighbours
from shardwise.errors import MismatchError, PeerError, VersionsWarning, in_words

_TOKEN_BYTES = 16

_SHOWN_RANKS = 8

_GIVEN_UP = "given up"
"""The key of the store that is there once a local connection has failed anywhere."""


Connector = Callable[[int, float], socket.socket]
"""A connection to a rank, which both have proved, before a deadline on the monotonic clock; raises OSError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecord:
    """The first words of a rank: what it is and where."""

    kernel: str
    """Equal for ranks that can share memory; empty for one that does not."""
    name: str
    """Of its host."""
    way: str
    """Its first address on the way to the store."""
    store: list[str]
    """The addresses of the store, as its host knows them."""
    has_secret: bool
    """Whether its launcher has given it a secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connected:
    """What one rank has once it is connected to its neighbours."""

    links: dict[int, PeerLink]
    """To its `relay_neighbours`, by world rank."""
    hosts: tuple[str, ...]
    """The name of each world rank's host."""
    kernels: tuple[int, ...]
    """Per world rank a number, equal for those that share memory; the same on all ranks."""
    key: bytes
    """By which ranks prove themselves."""
    listeners: tuple[socket.socket, ...]
    """Where other ranks call this one later."""
    call: Connector
    """Calls any other rank."""

    def close(self) -> None:
        """Close all, where it is not used."""
        for link in self.links.values():
            link.close()
        for listener in self.listeners:
            listener.close()


def connect(meeting: Rendezvous, *, shared_memory: bool) -> Connected:
    """Links to a few ranks, and the way to all others; raises `PeerError` when a link cannot be had.

    What one rank raises reaches the others through the store: they would wait for it, and not know why.
    """
    try:
        connected = _connect(meeting, shared_memory=shared_memory)
    except BaseException as error:
        is_about_a_rank = isinstance(error, PeerError) and error.rank is not None
        meeting.fail(str(error) if is_about_a_rank else f"rank {meeting.rank} stopped: {in_words(error)}")
        meeting.leave(in_words(error))
        raise
    try:
        meeting.leave()
    except BaseException:
        connected.close()
        raise
    return connected


def _connect(meeting: Rendezvous, *, shared_memory: bool) -> Connected:
    if meeting.rank == 0:
        meeting.publish("token", secrets.token_hex(_TOKEN_BYTES))
    key = key_of(meeting.read("token", 0).encode(), meeting.secret)
    with contextlib.ExitStack() as opened:
        # Before the record is published: who reads it may call at once.
        unix = _listen_on_unix(key, meeting.rank) if shared_memory else None
        if unix is not None:
            opened.enter_context(unix)
        own = _own_record(meeting, kernel="" if unix is None else host_identity())
        records = compared_records(meeting.gather("host", packed_record(own)), meeting.rank)
        first: dict[str, int] = {}
        kernels = [first.setdefault(each.kernel or f"of {rank}", rank) for rank, each in enumerate(records)]
        call = call_locally = _unix_connector(meeting.rank, key)
        links: dict[int, PeerLink] = {}
        failure = ""
        if local := _local(relay_neighbours(meeting.rank, kernels), kernels, meeting.rank):
            assert unix is not None
            # A failure is not raised yet: two ranks may believe that they share a kernel and be kept apart, as in
            # containers. Then there is still TCP, and all ranks take it together.
            try:
                links = _connect_pairs(meeting, key, local, [unix], call_locally)
            except OSError as error:
                failure = in_words(error)
                meeting.store.set(_GIVEN_UP, "")
        # All ranks, not the pair alone: a rank that waits in `accept` for a peer that has given up must hear of it.
        if any(each.kernel for each in records) and any(meeting.gather("verdict", failure)):
            for link in links.values():
                link.close()
            links = {}
            kernels = list(range(meeting.size))
        listeners = [unix] if unix is not None and _local(range(meeting.size), kernels, meeting.rank) else []
        if len(set(kernels)) > 1:  # the same on all ranks: rank 0 collects the addresses of all
            remote = set(relay_neighbours(meeting.rank, kernels)) - links.keys()
            further, bound, call_remotely = _connect_through_tcp(meeting, key, remote, records)
            links |= further
            listeners += bound
            call = _either(kernels, meeting.rank, call_locally, call_remotely)
        if unix in listeners:
            opened.pop_all()
    return Connected(
        links=links,
        hosts=host_names(records),
        kernels=tuple(kernels),
        key=key,
        listeners=tuple(listeners),
        call=call,
    )


def _local(ranks: Iterable[int], kernels: Sequence[int], own_rank: int) -> set[int]:
    """Those of the ranks, without this one, that share memory with it."""
    return {rank for rank in ranks if kernels[rank] == kernels[own_rank]} - {own_rank}


def _either(kernels: Sequence[int], own_rank: int, call_locally: Connector, call_remotely: Connector) -> Connector:
    """Calls a rank on its way."""

    def connect_to(rank: int, deadline: float) -> socket.socket:
        return (call_locally if kernels[rank] == kernels[own_rank] else call_remotely)(rank, deadline)

    return connect_to


def _own_record(meeting: Rendezvous, *, kernel: str) -> HostRecord:
    addresses = own_addresses(meeting.store_host, meeting.interface)
    return HostRecord(
        kernel=kernel,
        name=socket.gethostname(),
        way=addresses[0] if addresses else "",
        store=seen_from_here(meeting.store_host),
        has_secret=meeting.secret is not None,
    )


def packed_record(record: HostRecord) -> str:
    """As it travels through the store."""
    # The versions come before anything that differs between versions.
    return f"{format_and_version()}, torch {torch.__version__}\n{json.dumps(dataclasses.astuple(record))}"


def compared_records(texts: Sequence[str], own_rank: int) -> list[HostRecord]:
    """The records of all ranks. Raises MismatchError, with the versions, where they do not speak as this one does.

    Rank 0 and the ranks with other versions than its own warn of them.
    """
    # The rest is the last line, so that a record of another version can still be taken apart.
    versions, _, facts = zip(*(text.rpartition("\n") for text in texts), strict=True)
    different = [rank for rank, version in enumerate(versions) if not version.startswith(f"wire format {WIRE} ")]
    if different:
        lines = [
            f"  - rank {rank}: {versions[rank] or 'an older version, which does not say its format'}"
            for rank in sorted({own_rank, *different[:_SHOWN_RANKS]})
        ]
        raise MismatchError("\n".join([OTHER_FORMAT, *lines]))
    try:
        records = [_unpacked(each) for each in facts]
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        text = f"what ranks say of their hosts in the store cannot be read ({in_words(error)})"
        raise PeerError(text, operation="start", purpose="host") from error
    others = [rank for rank, version in enumerate(versions) if version != versions[0]]
    if others and own_rank in (0, *others):
        shown = "; ".join(f"rank {rank}: {versions[rank]}" for rank in (0, *others[:_SHOWN_RANKS]))
        warnings.warn(
            f"{len(others)} of {len(versions)} ranks have other versions than rank 0, and may compute, plan or save "
            f"in another way: {shown}. Install the same versions on all hosts",
            VersionsWarning,
            stacklevel=2,
        )
    without = [rank for rank, each in enumerate(records) if not each.has_secret]
    if without and len(without) < len(records):
        having = next(rank for rank, each in enumerate(records) if each.has_secret)
        raise MismatchError(
            f"rank {having} on {records[having].name} has a secret of the run, and rank {without[0]} on "
            f"{records[without[0]].name} has none ({len(without)} of {len(records)} ranks have none). Set "
            "SHARDWISE_SECRET or SHARDWISE_SECRET_FILE for all ranks, to the same secret"
        )
    return records


def _unpacked(text: str) -> HostRecord:
    kernel, name, way, store, has_secret = json.loads(text)
    texts = [kernel, name, way, *store]
    if not all(isinstance(each, str) for each in texts) or not isinstance(has_secret, bool):
        raise TypeError("no record of a host")
    return HostRecord(kernel=kernel, name=name, way=way, store=list(store), has_secret=has_secret)


def host_names(records: Sequence[HostRecord]) -> tuple[str, ...]:
    """The host of each rank; with an address where several hosts, such as containers, have one name."""
    kernels: dict[str, set[str]] = {}
    for each in records:
        kernels.setdefault(each.name, set()).add(each.kernel)
    return tuple(f"{each.name} at {each.way}" if len(kernels[each.name] - {""}) > 1 else each.name for each in records)


def _connect_through_tcp(
    meeting: Rendezvous, key: bytes, ranks: set[int], records: Sequence[HostRecord]
) -> tuple[dict[int, PeerLink], list[socket.socket], Connector]:
    """Links to these ranks, the listeners, and what calls any rank."""
    addresses = own_addresses(meeting.store_host, meeting.interface)
    if meeting.interface is None and all(map(is_loopback, addresses)) and len({each.name for each in records}) > 1:
        # Here the name of the store leads to the loopback address, so the store is on this host. Other hosts know
        # an address of it that they can reach.
        addresses += list(dict.fromkeys(address for each in records for address in each.store))
    with contextlib.ExitStack() as open_listeners:
        listeners = listen(addresses, meeting.ports, first=meeting.rank)
        for listener in listeners:
            open_listeners.enter_context(listener)
        # Only those that are bound: a caller need not guess.
        bound = [listener.getsockname()[:2] for listener in listeners]
        own = json.dumps([[address for address, _ in bound], bound[0][1]])
        names = RankNames(host_names(records))
        connector = _tcp_connector(meeting.rank, key, meeting.gather("address", own), names)
        try:
            links = _connect_pairs(meeting, key, ranks, listeners, connector)
        except OSError as error:
            to = ", ".join(names[rank] for rank in sorted(ranks))
            text = f"rank {names[meeting.rank]} could not connect to ranks [{to}] through TCP: {error}"
            meeting.raise_if_failed("connections")  # of two that fail, one has failed because of the other
            meeting.fail(text)  # before the listeners close, which makes others fail
            raise PeerError(text, operation="start", purpose="connections") from error
        open_listeners.pop_all()
    return links, listeners, connector


def _connect_pairs(
    meeting: Rendezvous, key: bytes, ranks: set[int], listeners: Sequence[socket.socket], connect_to: Connector
) -> dict[int, PeerLink]:
    # Each pair has one caller, the higher rank. A rank calls and answers at the same time: else each would wait for the
    # one below it in the ring, and that one for the next.
    local = listeners[0].family == socket.AF_UNIX
    deadline = time.monotonic() + meeting.patience_seconds
    called: dict[int, socket.socket] = {}
    problems: list[BaseException] = []
    # A daemon: a rank that gives up ends although another one does not answer.
    lower = sorted(rank for rank in ranks if rank < meeting.rank)
    calls = threading.Thread(target=_call_all, args=(lower, connect_to, deadline, called, problems), daemon=True)
    calls.start()

    def look_up(missing: Collection[int]) -> None:
        meeting.raise_if_failed("connections")
        if local and meeting.store.check([_GIVEN_UP]):
            raise ConnectionError("another rank has given up")

    accepted: dict[int, socket.socket] = {}
    try:
        accepted = accept(
            listeners, ranks - set(lower), key, meeting.rank, deadline=deadline, look_up=look_up, problems=problems
        )
        interval = LOOK_UP_SECONDS
        while calls.is_alive():
            calls.join(interval)
            interval = min(2 * interval, LONGEST_LOOK_UP_SECONDS)
            if calls.is_alive():
                look_up(lower)
        if problems:
            raise problems[0]
    except BaseException:
        problems.append(ConnectionError("this rank has given up"))
        for connection in (*accepted.values(), *called.values()):
            connection.close()
        raise
    connections = accepted | called
    return {rank: PeerLink(connection, rank=rank, local=local) for rank, connection in connections.items()}


def _call_all(
    ranks: Sequence[int],
    connect_to: Connector,
    deadline: float,
    called: dict[int, socket.socket],
    problems: list[BaseException],
) -> None:
    for rank in ranks:
        try:
            connection = connect_to(rank, deadline)
        except BaseException as error:
            problems.append(error)
            return
        if problems:
            connection.close()
            return
        called[rank] = connection


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no connection in time")
    return left


# Unix sockets in the abstract namespace: no file is made, and the name ends with its socket.


def host_identity() -> str:
    """What processes of one host have in common, and those of others have not; raises OSError if it is unknown."""
    # The namespace of the network is that of abstract names: containers of one host need not share it.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _unix_name(key: bytes, rank: int) -> str:
    # The names of abstract sockets are public, the key is not.
    return f"\0shardwise-{hmac.digest(key, b'name of a socket', hashlib.sha256).hex()[:32]}-{rank}"


def _listen_on_unix(key: bytes, rank: int) -> socket.socket | None:
    """A listener, or None where memory cannot be shared this way."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Tried before anybody relies on it: a sandbox may forbid either.
        host_identity()
        os.close(os.memfd_create("shardwise-probe"))
        listener.bind(_unix_name(key, rank))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    return listener


def _unix_connector(own_rank: int, key: bytes) -> Connector:
    def connect_to(rank: int, deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_left(deadline))
            connection.connect(_unix_name(key, rank))
            say_hello(connection, key, own_rank, rank)
        except BaseException:
            connection.close()
            raise
        return connection

    return connect_to


# TCP


def _tcp_connector(own_rank: int, key: bytes, known: Sequence[str], names: RankNames) -> Connector:
    def connect_to(rank: int, deadline: float) -> socket.socket:
        # One after the other: a host may announce addresses that lead nowhere from here.
        addresses, port = announced(known[rank])
        problems = []
        for address in addresses:
            connection = None
            try:
                connection = socket.create_connection((address, port), timeout=min(_left(deadline), HELLO_SECONDS))
                say_hello(connection, key, own_rank, rank)
            except OSError as error:
                problems.append(f"{address} port {port}: {error}")
                if connection is not None:
                    connection.close()
            else:
                return connection
        raise ConnectionError(f"rank {names[rank]} cannot be reached at " + "; ".join(problems))

    return connect_to


def announced(text: str) -> tuple[list[str], int]:
    """The addresses of a rank and its port, as it says them in the store. Raises ConnectionError for anything else."""
    try:
        addresses, port = json.loads(text)
        if isinstance(port, int) and 0 < port < 1 << 16 and all(isinstance(each, str) for each in addresses):
            return addresses, port
    except (TypeError, ValueError, RecursionError):
        pass
    raise ConnectionError("its address in the store cannot be read")
