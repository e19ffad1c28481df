"""How the processes find each other: the rank, the size and a store of keys and values, before any connection.

All come through the store of torch.distributed, which rank 0 or torchrun serves. `connections` makes one link per pair
out of it. Keys of two ranks that make their second channel::

    shardwise/process/0           boot id, pid namespace, pid, start: who rank 0 is, for those who wait for it
    shardwise/1                   2: how many channels rank 1 has begun, which numbers this one
    shardwise/channel/2/token/0   what rank 0 publishes while channel 2 is made, under the key `token`
    shardwise/channel/2/host/1    what rank 1 publishes under the key `host`

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

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from shardwise.errors import PeerError, PlanError
from shardwise.launchers import Announced, announced

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
        # In short waits: the store has no way to wake this rank when the other one has ended.
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
        names = [f"{key}/{rank}" for rank in range(self.size)]
        # Two requests instead of two per rank: a request is some 0.2 ms, and a call without a channel makes three of
        # these. Stores without `multi_get` (files) and ranks that are late go the slow way, which says who is missing.
        with contextlib.suppress(RuntimeError, ValueError):
            self.store.wait(names, timedelta(seconds=_LIFE_SECONDS))
            return [value.decode() for value in self.store.multi_get(names)]
        return [self.read(key, rank) for rank in range(self.size)]


def meet(*, timeout_seconds: float, device: torch.device | None) -> Rendezvous:
    """Join the default process group, or the processes that the environment announces.

    Raises `PlanError` when there is neither, or when the device asked for needs another backend.
    """
    # A short timeout is meant for a peer that hangs in a step, not for one that still compiles.
    patience = max(timeout_seconds, START_SECONDS)
    wants_nccl = (torch.cuda.is_available() and dist.is_nccl_available()) if device is None else device.type == "cuda"
    # An initialised group wins over the environment: the program has said who takes part.
    if not dist.is_initialized():
        world = announced(os.environ)
        if world is None:
            _check_environment()
            if wants_nccl:
                torch.cuda.set_device(device or torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
                # Not bound to the device: groups of a bound one can be made by all ranks only.
                dist.init_process_group("nccl", timeout=timedelta(seconds=timeout_seconds))
            else:
                # On the CPU the store is enough; a process group is not made, and stays the program's to make.
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
    # A store without a host, such as one in a file, says nothing of the network between the ranks.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


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
    *place, process, start = json.loads(record)
    if place != json.loads(own)[:2]:
        return False
    try:
        return _start_of(int(process)) != str(start)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):
        return False


def _start_of(process: int) -> str:
    """When a process was started, which tells it from a later one with its number. Zombies are gone."""
    # The name of the program, in brackets, may hold spaces and brackets of its own; the fields come after the last one.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
