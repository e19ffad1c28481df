"""How the processes find each other: the rank, the size and a store of keys and values, before any connection.

All come through the store of torch.distributed, which rank 0 or torchrun serves. `connections` makes links out of it.
Keys of two ranks that make their second channel::

    shardwise/process/0           boot id, pid namespace, pid, start: who rank 0 is, for those who wait for it
    shardwise/1                   2: how many channels rank 1 has begun, which numbers this one
    shardwise/channel/2/token/0   what rank 0 publishes while channel 2 is made, under the key `token`
    shardwise/channel/2/host/1    what rank 1 publishes under the key `host`
    shardwise/channel/2/host/all  what all ranks have published there, as rank 0 collected it (`gather`)
    shardwise/channel/2/failed    the first rank that failed while channel 2 was made, and why

Until there is a connection nothing tells of a peer's death. So a rank that waits for a key of another one looks each
second whether the process that published `process/N` still runs.
"""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from shardwise.comm.devices import group_device, own_device
from shardwise.comm.handshake import secret_of_the_run
from shardwise.comm.interfaces import listener_of_the_store
from shardwise.comm.torch_private import default_store
from shardwise.errors import PeerError, PlanError, in_words
from shardwise.launchers import Announced, announced, listening_ports

LIFE_SECONDS = 1.0
"""A rank that waits looks so often whether the other one is still there."""

FAREWELL_SECONDS = 3.0
"""How long rank 0, which may serve the store, waits after a failure for others that ask for its reason."""

START_SECONDS = 60.0
"""Least patience at the start, when processes still import and compile."""


_CONNECTED, _FAILED = "connected", "failed"
"""Keys of the store: what each rank says last, and the first failure."""


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
    secret: bytes | None = None
    """What the launcher has given to all ranks, to prove themselves by."""
    interface: str | None = None
    """The name or address of the only interface to listen on; None for the way to the store."""
    ports: range | None = None
    """The ports to listen on; None where the kernel chooses."""

    def publish(self, key: str, value: str) -> None:
        """Let the other ranks read a value of this rank."""
        self.store.set(f"{key}/{self.rank}", value)

    def read(self, key: str, rank: int) -> str:
        """The value of another rank; raises `PeerError` when it does not come."""
        return self._read(f"{key}/{rank}", key, rank)

    def _read(self, name: str, key: str, rank: int) -> str:
        # In short waits: the store has no way to wake this rank when the other one has ended.
        deadline = time.monotonic() + self.patience_seconds
        while True:
            # The store counts in whole milliseconds: of much less than 20 they would be more than a tenth.
            patience = min(LIFE_SECONDS, max(0.02, deadline - time.monotonic()))
            asked = time.monotonic()
            try:
                self.store.wait([name], timedelta(seconds=patience))
                return self.store.get(name).decode()
            except (RuntimeError, ValueError) as error:
                is_late = time.monotonic() - asked >= 0.9 * patience  # else the store itself has failed
                if is_late:
                    self.raise_if_failed(key)
                gone = is_late and self._is_gone(rank)
                if is_late and not gone and time.monotonic() < deadline:
                    continue
                if is_late and not gone:
                    # Rank 0, which collects for all, may itself wait for a rank that has not come.
                    rank = self._first_missing(key, rank)
                text = f"rank {rank} did not appear within {self.patience_seconds:g} s at the start ({key}): {error}"
                if not is_late:
                    text = f"the store of rank 0 or of the launcher has ended at the start ({key}): {error}"
                if gone:
                    text = f"rank {rank} has ended while other ranks wait for it at the start ({key})"
                raise PeerError(text, rank=rank, operation="start", purpose=key) from error

    def fail(self, text: str) -> None:
        """Tell the other ranks why this one stops, unless another one has stopped before."""
        with contextlib.suppress(RuntimeError, ValueError):  # the store is gone
            self.store.compare_set(_FAILED, "", json.dumps([self.rank, text]))

    def raise_if_failed(self, key: str) -> None:
        """Raise PeerError with the reason of the first rank that has failed, if one has."""
        try:
            rank, text = json.loads(self.store.get(_FAILED)) if self.store.check([_FAILED]) else (self.rank, "")
            rank, text = int(rank), str(text)
        except (RuntimeError, TypeError, ValueError, ArithmeticError):  # a RecursionError is a RuntimeError
            return
        if rank != self.rank:
            raise PeerError(text, rank=rank, operation="start", purpose=key)

    def leave(self, reason: str = "") -> None:
        """The last request of this rank. Rank 0, which may serve the store, stays until all others have made theirs."""
        if not reason:
            self.publish(_CONNECTED, "")
            if self.rank == 0 and any(self.read_all(_CONNECTED)):
                self.raise_if_failed(_CONNECTED)
            return
        with contextlib.suppress(RuntimeError, ValueError):
            self.publish(_CONNECTED, reason)
            if self.rank == 0:
                names = [f"{_CONNECTED}/{rank}" for rank in range(self.size)]
                self.store.wait(names, timedelta(seconds=FAREWELL_SECONDS))

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank that had a channel before is no more; asks the store and this host."""
        if self.processes is None:
            return False
        try:
            known = self.processes.check([str(rank)])
            return bool(known) and is_gone(self.processes.get(str(rank)).decode())
        except (RuntimeError, ValueError):
            return False

    def read_all(self, key: str) -> list[str]:
        """The values of all ranks, for one rank that asks for all."""
        names = [f"{key}/{rank}" for rank in range(self.size)]
        while True:
            # Two requests instead of two per rank: a request is some 0.2 ms.
            with contextlib.suppress(RuntimeError, ValueError):
                self.store.wait(names, timedelta(seconds=LIFE_SECONDS))
                return [value.decode() for value in self.store.multi_get(names)]
            missing = self._first_missing(key, self.size)
            if missing == self.size:  # a store without `multi_get`, such as a file
                return [self.read(key, rank) for rank in range(self.size)]
            self.read(key, missing)  # raises where the rank never comes

    def gather(self, key: str, value: str) -> list[str]:
        """The values of all ranks, for all ranks, with as few requests per rank as if they were two.

        Rank 0 reads all and publishes one table; where it finds that a rank is missing, it publishes that instead.
        """
        self.publish(key, value)
        if self.rank:
            return values_in(self._read(f"{key}/all", key, 0), self.size, key)
        try:
            values = self.read_all(key)
        except PeerError as error:
            self.store.set(f"{key}/all", json.dumps({"rank": error.rank, "text": str(error)}))
            raise
        # Each text once: every rank reads the table, and ranks of one host say the same.
        numbered = {text: number for number, text in enumerate(dict.fromkeys(values))}
        self.store.set(f"{key}/all", json.dumps([list(numbered), [numbered[text] for text in values]]))
        return values

    def _first_missing(self, key: str, otherwise: int) -> int:
        """The lowest rank that has not published the key, or `otherwise`; found by halving."""
        low, high = 0, self.size  # all below `low` have
        try:
            while low < high:
                middle = (low + high) // 2
                if self.store.check([f"{key}/{rank}" for rank in range(low, middle + 1)]):
                    low = middle + 1
                else:
                    high = middle
        except (RuntimeError, ValueError):  # the store is gone: nothing more is known
            return otherwise
        return low if low < self.size else otherwise


def values_in(table: str, size: int, key: str) -> list[str]:
    """What rank 0 has published for `gather`. Raises PeerError where it says that a rank is missing, or nothing."""
    try:
        found = json.loads(table)
        if isinstance(found, dict):
            rank, text = found["rank"], str(found["text"])
            missing = PeerError(text, rank=None if rank is None else int(rank), operation="start", purpose=key)
        else:
            texts, numbers = found
            values = [texts[number] for number in numbers]
            if len(values) != size or not all(isinstance(each, str) for each in values):
                raise ValueError(f"{len(values)} values of {size} ranks")
            return values
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        text = f"what rank 0 says of all ranks in the store cannot be read ({key}: {in_words(error)})"
        raise PeerError(text, rank=0, operation="start", purpose=key) from error
    raise missing


def meet(
    *, timeout_seconds: float, device: torch.device | None, interface: str | None = None, ports: str | None = None
) -> Rendezvous:
    """Join the default process group, or the processes that the environment announces.

    interface, ports: where to listen, if the environment does not say.
    Raises `PlanError` when there is neither, or when torch cannot move tensors between devices like the one asked for.
    """
    secret = secret_of_the_run(os.environ)
    interface = os.environ.get("SHARDWISE_INTERFACE") or interface
    port_range = listening_ports(os.environ, otherwise=ports)
    # A short timeout is meant for a peer that hangs in a step, not for one that still compiles.
    patience = max(timeout_seconds, START_SECONDS)
    # The store is enough: a process group is not made, and stays the program's to make. An initialised one wins over
    # the environment, for the program has said who takes part.
    if not dist.is_initialized():
        world = announced(os.environ)
        if world is None:
            _check_environment()
            local_rank = os.environ.get("LOCAL_RANK")
            device = own_device(device, None if local_rank is None else int(local_rank))
            store, rank, size = meet_at("env://", patience)
        else:
            device = own_device(device, world.checked().local_rank)
            store, rank, size = _meet_announced(world, patience)
    else:
        device = group_device(device)
    if dist.is_initialized():
        rank, size, store = dist.get_rank(), dist.get_world_size(), default_store()
    # Every rank makes its channels in the same order, so the n-th ones belong together.
    number = store.add(f"shardwise/{rank}", 1)
    processes = PrefixStore("shardwise/process", store)
    processes.set(str(rank), own_record())
    return Rendezvous(
        rank=rank,
        size=size,
        device=device,
        store=PrefixStore(f"shardwise/channel/{number}", store),
        processes=processes,
        store_host=_store_host(store),
        patience_seconds=patience,
        secret=secret,
        interface=interface,
        ports=port_range,
    )


def meet_at(address: str, patience_seconds: float, *, rank: int = -1, size: int = -1) -> tuple[Store, int, int]:
    """The store at an address, with this process's rank in it and the number of ranks."""
    patience = timedelta(seconds=patience_seconds)
    try:
        return _served(address, patience, rank, size) or next(iter(rendezvous(address, rank, size, timeout=patience)))
    except dist.DistError as error:
        if address == "env://":
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        text = f"the processes did not meet at {address}: {error}"
        raise PeerError(text, operation="start", purpose="rendezvous") from error


def _served(address: str, patience: timedelta, rank: int, size: int) -> tuple[Store, int, int] | None:
    """The store of rank 0, which serves it where the others look for it; None where `rendezvous` has to."""
    # `rendezvous` would listen on every interface of the host.
    if address == "env://":
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or os.environ["RANK"] != "0":
            return None
        size, host = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
    else:
        place = urlsplit(address)
        host, port = place.hostname or "", place.port or 0
    listener = listener_of_the_store(host, port) if rank in (-1, 0) else None
    if listener is None:
        return None
    store = TCPStore(
        host, port, size, is_master=True, timeout=patience, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return store, 0, size


def _meet_announced(world: Announced, patience_seconds: float) -> tuple[Store, int, int]:
    """Meet where the environment of another launcher than torchrun says."""
    host = f"[{world.host}]" if ":" in world.host else world.host
    try:
        store, rank, size = meet_at(f"tcp://{host}:{world.port}", patience_seconds, rank=world.rank, size=world.size)
    except PeerError as error:
        raise PeerError(f"{error}. {world.way_out()}", operation="start", purpose="rendezvous") from error
    # Processes of another job that come to the same port find nothing of this one.
    return PrefixStore(f"shardwise/{world.job}", store), rank, size


def _check_environment() -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise PlanError(
            "a channel over processes was asked for, but no process group is initialised and the environment lacks "
            f"{', '.join(missing)}. Start with torchrun, srun, mpirun or `shardwise train --nproc N`, or call "
            "torch.distributed.init_process_group first"
        )


def _store_host(store: Store) -> str | None:
    # A store without a host, such as one in a file, says nothing of the network between the ranks.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def store_host_here() -> str | None:
    """The host that serves the store of this program, as far as that is known."""
    if dist.is_initialized():
        return _store_host(default_store())
    world = announced(os.environ)
    return os.environ.get("MASTER_ADDR") if world is None else world.host or None


def own_record() -> str:
    """This process, as others of its host know it; "" where the system does not say."""
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return json.dumps([host, os.readlink("/proc/self/ns/pid"), os.getpid(), _start_of(os.getpid())])
    except (OSError, ValueError, IndexError):
        return ""


def is_gone(record: str) -> bool:
    """Whether the process of a record was on this host and is no more; False where that cannot be known."""
    # In doubt it lives: to give up a rank that only starts slowly would end a run that is well.
    own = own_record()
    if not record or not own:
        return False
    try:
        *place, process, start = json.loads(record)
        return place == json.loads(own)[:2] and _start_of(int(process)) != str(start)
    except FileNotFoundError:
        return True
    except (OSError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        return False


def _start_of(process: int) -> str:
    """When a process was started, which tells it from a later one with its number. Zombies are gone."""
    # The name of the program, in brackets, may hold spaces and brackets of its own; the fields come after the last one.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
