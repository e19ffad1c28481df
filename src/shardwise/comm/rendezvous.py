"""How the processes find each other: through the store to their addresses, from the addresses to one link per pair.

    store:   token (1) -> host records (2) -> TCP addresses, where a pair needs them (3) -> verdicts (4)
    sockets: each rank connects to every lower rank, then accepts every higher one; a hello proves the token

(1) Rank 0 draws a secret; who does not know it is turned away. (2) Ranks whose records are equal share a kernel and
its Unix sockets. (3) Listening ports are opened only then. (4) If a local connection failed anywhere, all connect
through TCP.
"""

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from shardwise.comm.frames import WIRE
from shardwise.comm.hellos import HELLO_SECONDS, TOKEN_BYTES, accept, say_hello
from shardwise.comm.life import is_gone, own_record
from shardwise.comm.links import PeerLink
from shardwise.errors import MismatchError, PeerError, PlanError, in_words
from shardwise.launchers import Announced, announced

_SHOWN_RANKS = 8

_LIFE_SECONDS = 1.0
"""A rank that waits looks so often whether the other one is still there."""

START_SECONDS = 60.0
"""Least patience at the start, when processes still import and compile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """The processes that were started together, as one of them sees it."""

    rank: int
    size: int
    device: torch.device
    store: Store
    """Of this channel alone."""
    store_host: str | None
    """Where the store is served; other hosts reach us on the interface that leads there."""
    patience_seconds: float
    processes: Store | None = None
    """Who each rank is, since its first channel."""

    def publish(self, key: str, value: str) -> None:
        """Let the other ranks read a value of this rank."""
        self.store.set(f"{key}/{self.rank}", value)

    def read(self, key: str, rank: int) -> str:
        """The value of another rank; raises `PeerError` when it does not come."""
        name = f"{key}/{rank}"
        deadline = time.monotonic() + self.patience_seconds
        while True:
            patience = min(_LIFE_SECONDS, max(0.001, deadline - time.monotonic()))
            asked = time.monotonic()
            try:
                self.store.wait([name], timedelta(seconds=patience))
                return self.store.get(name).decode()
            except (RuntimeError, ValueError) as error:
                is_late = time.monotonic() - asked >= 0.9 * patience  # else the store itself has failed
                gone = is_late and self._is_gone(rank)
                if is_late and not gone and time.monotonic() < deadline:
                    continue
                text = f"rank {rank} did not appear within {self.patience_seconds:g} s at the start ({key}): {error}"
                if gone:
                    text = f"rank {rank} has ended, and is waited for at the start of what ranks do together ({key})"
                raise PeerError(text, rank=rank, operation="start", purpose=key) from error

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank that had a channel before is no more; asks the store and this host."""
        if self.processes is None:
            return False
        try:
            known = self.processes.check([str(rank)])
            return bool(known) and is_gone(self.processes.get(str(rank)).decode())
        except (RuntimeError, ValueError):
            return False

    def has_published(self, key: str, rank: int) -> bool:
        """Whether the value of another rank is there."""
        return bool(self.store.check([f"{key}/{rank}"]))

    def read_all(self, key: str) -> list[str]:
        """The values of all ranks."""
        return [self.read(key, rank) for rank in range(self.size)]


def meet(*, timeout_seconds: float, device: torch.device | None) -> Rendezvous:
    """Join the default process group, or the processes that the environment announces.

    Raises `PlanError` when there is neither, or when the device asked for needs another backend.
    """
    patience = max(timeout_seconds, START_SECONDS)
    wants_nccl = (torch.cuda.is_available() and dist.is_nccl_available()) if device is None else device.type == "cuda"
    if not dist.is_initialized():
        world = announced(os.environ)
        if world is None:
            _check_environment()
            if wants_nccl:
                torch.cuda.set_device(device or torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
                # Not bound to the device: groups of a bound one can be made by all ranks only.
                dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_seconds))
            else:
                store, rank, size = _meet_at("env://", patience)
        else:
            store, rank, size = _meet_announced(world.checked(), patience)
            if wants_nccl:
                torch.cuda.set_device(device or _own_gpu(world))
                dist.init_process_group(
                    "nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_seconds)
                )
    if dist.is_initialized():
        rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    # Every rank makes its channels in the same order, so the n-th ones belong together.
    number = store.add(f"shardwise/{rank}", 1)
    processes = PrefixStore("shardwise/process", store)
    processes.set(str(rank), own_record())
    return Rendezvous(
        rank=rank,
        size=size,
        device=_device(device),
        store=PrefixStore(f"shardwise/channel/{number}", store),
        processes=processes,
        store_host=_store_host(store),
        patience_seconds=patience,
    )


def _meet_at(address: str, patience_seconds: float, *, rank: int = -1, size: int = -1) -> tuple[Store, int, int]:
    try:
        store, rank, size = next(iter(rendezvous(address, rank, size, timeout=timedelta(seconds=patience_seconds))))
    except dist.DistError as error:
        if address == "env://":
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        text = f"the processes did not meet at {address}: {error}"
        raise PeerError(text, operation="start", purpose="rendezvous") from error
    return store, rank, size


def _meet_announced(world: Announced, patience_seconds: float) -> tuple[Store, int, int]:
    """Meet where the environment of another launcher than torchrun says."""
    host = f"[{world.host}]" if ":" in world.host else world.host
    try:
        store, rank, size = _meet_at(f"tcp://{host}:{world.port}", patience_seconds, rank=world.rank, size=world.size)
    except PeerError as error:
        raise PeerError(f"{error}. {world.way_out()}", operation="start", purpose="rendezvous") from error
    # Processes of another job that come to the same port find nothing of this one.
    return PrefixStore(f"shardwise/{world.job}", store), rank, size


def _own_gpu(world: Announced) -> torch.device:
    """The GPU of this rank: the one that its launcher lets it see, or the one of its number on this host."""
    num_seen = torch.cuda.device_count()
    if world.local_rank is None and num_seen > 1:
        raise PlanError(
            f"{world.launcher} does not say which of the {num_seen} GPUs here is that of rank {world.rank}; "
            "export LOCAL_RANK (the rank among those of this host) to each process, or let each see one GPU"
        )
    return torch.device("cuda", 0 if num_seen == 1 else world.local_rank or 0)


def _check_environment() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise PlanError(
            "a channel over processes was asked for, but no process group is initialised and the environment lacks "
            f"{', '.join(missing)}; start with torchrun, srun, mpirun or `shardwise train --nproc N`, or call "
            "torch.distributed.init_process_group first"
        )


def _device(asked: torch.device | None) -> torch.device:
    has_nccl = dist.is_initialized() and "nccl" in str(dist.get_backend())
    if asked is None:
        return torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
    if asked.type not in ("cpu", "cuda") or (asked.type == "cuda" and not has_nccl):
        holds = f"the process group has {dist.get_backend()}" if dist.is_initialized() else "there is no process group"
        raise PlanError(f"a channel for {asked} was asked for, but {holds}; give cpu, or cuda with an NCCL group")
    return asked


def _store_host(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def connect(meeting: Rendezvous, *, shared_memory: bool) -> dict[int, PeerLink]:
    """One link to every other rank, by world rank; raises `PeerError` when one cannot be had."""
    if meeting.rank == 0:
        meeting.publish("token", secrets.token_hex(TOKEN_BYTES // 2))
    token = meeting.read("token", 0).encode()
    with contextlib.ExitStack() as listeners:
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
            try:
                links = _connect_pairs(meeting, token, local, [unix], _unix_connector(meeting.rank, token))
            except OSError as error:
                failure = in_words(error)
        if any(hosts):
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
    local = listeners[0].family == socket.AF_UNIX
    deadline = time.monotonic() + meeting.patience_seconds
    connections: dict[int, socket.socket] = {}

    def look_up(missing: Collection[int]) -> None:
        if local and any(meeting.has_published("verdict", rank) for rank in missing):
            raise ConnectionError("another rank has given up")

    try:
        for rank in sorted(ranks):
            if rank < meeting.rank:
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


# Unix sockets in the abstract namespace: no file is made, and the name ends with its socket.


def _host_identity() -> str:
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
    """Whether it is said to be this host itself; a name of it that only leads to the loopback address is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tcp_connector(meeting: Rendezvous, token: bytes) -> Callable[[int, float], socket.socket]:
    def connect_to(rank: int, deadline: float) -> socket.socket:
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
