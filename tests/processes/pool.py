"""Real processes for tests: started once per number of ranks, each call a function of the channel on every rank.

Workers are forked from an interpreter that has imported what they need, so that a poisoned group is replaced quickly.
They meet through a file, never through a port. The channel is kept from call to call until something fails.
"""

import contextlib
import faulthandler
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardwise.comm import Channel
from shardwise.comm.process.world import processes
from shardwise.errors import PeerError
from shardwise.testing import strict
from shardwise.testing.accelerator import LAST, NAME, behind, present
from tests.forks.calls import Call, Start

CALL_SECONDS = 100.0

_FOR_GOOD = contextlib.ExitStack()
"""What a process sees from its first call on such devices on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """How the ranks of a call are connected."""

    without_shared_memory: tuple[int, ...] | None = ()
    """Ranks that refuse shared memory; None for all."""

    timeout_seconds: float = 20.0
    """Of the channel."""

    device: Literal["cpu", "strict", "own"] = "cpu"
    """Of a rank. "strict": the fake device of its number, which its process finds from then on; the strict double of
    NCCL moves its tensors. "own": the accelerator of that number."""

    late: int = LAST
    """How the strict devices run behind the host: the seed of `behind`; -1 for at once."""

    def channel(self, rank: int) -> Channel:
        if self.device == "own":
            return processes(timeout_seconds=self.timeout_seconds, device=own_accelerator(rank))
        if self.device == "strict":
            _FOR_GOOD.enter_context(present())
            torch.accelerator.set_device_index(rank)
            return processes(timeout_seconds=self.timeout_seconds, device=torch.device(NAME, rank))
        refuses = self.without_shared_memory is None or rank in self.without_shared_memory
        return processes(timeout_seconds=self.timeout_seconds, shared_memory=not refuses, device=torch.device("cpu"))


def own_accelerator(rank: int) -> torch.device:
    """The accelerator of a rank of this host, which becomes its current one."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    torch.accelerator.set_device_index(rank)
    return torch.device(found.type, rank)


SHARED_MEMORY = Transport()
TCP = Transport(without_shared_memory=None)
STRICT_DEVICE = Transport(device="strict")
STRICT_AT_ONCE = Transport(device="strict", late=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What a rank raised."""

    kind: str
    message: str
    text: str
    """The whole traceback."""


class RankError(AssertionError):
    """A call failed on some rank; the traceback of the rank that caused it comes first."""

    def __init__(self, message: str, failures: dict[int, Failure]) -> None:
        super().__init__(message)
        self.failures = failures


class _Workers:
    """The processes of one group."""

    def __init__(self, size: int, start: Start) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pool-"))
        meeting = str(self.folder / "rendezvous")
        self.ranks = [Call(_serve, rank, size, meeting, start=start) for rank in range(size)]
        self.connections = [each.connection for each in self.ranks]

    def stop(self, *, patience_seconds: float) -> None:
        """Let them leave, or kill them."""
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + patience_seconds
        for each in self.ranks:
            each.end(patience_seconds=max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self.folder)


class Pool:
    """Groups of worker processes by their number of ranks."""

    def __init__(self, start: Start = "fork") -> None:
        self._start = start
        self._groups: dict[tuple[int, bool], _Workers] = {}
        """By the number of ranks, and whether they have devices: a process loads those before its first backward."""

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        transport: Transport | None = None,
        poisons: bool = False,
        lost: Sequence[int] = (),
        patience_seconds: float = CALL_SECONDS,
    ) -> list[Any]:
        """Call `function(channel, *arguments)` on every rank and return the results in rank order.

        `function` is importable by its name; with `poisons` the channel is not used again. Ranks in `lost` are expected
        to die or to stop for good; they give None, and the group is replaced. Raises `RankError` when a rank raises,
        dies or has no result after `patience_seconds`.
        """
        transport = transport or SHARED_MEMORY
        group = world_size, transport.device == "strict"
        if group not in self._groups:
            self._groups[group] = _Workers(world_size, self._start)
        workers = self._groups[group]
        for connection in workers.connections:
            connection.send((function, arguments, transport, poisons or bool(lost), patience_seconds))
        awaited = {rank: workers.connections[rank] for rank in range(world_size) if rank not in lost}
        results: dict[int, Any] = {}
        deadline = time.monotonic() + patience_seconds
        while awaited and (left := deadline - time.monotonic()) > 0:
            for ready in multiprocessing.connection.wait(list(awaited.values()), left):
                rank = next(rank for rank, connection in awaited.items() if connection is ready)
                results[rank] = _received(awaited.pop(rank), rank)
        dead = [rank for rank, result in results.items() if result is None]
        if awaited or dead or lost:
            self._groups.pop(group).stop(patience_seconds=0.0)
        _raise_failures(
            {r: result for r, result in results.items() if isinstance(result, Failure)}, dead, list(awaited)
        )
        return [results[rank][0] if rank in results else None for rank in range(world_size)]

    def close(self) -> None:
        """End all workers."""
        for workers in self._groups.values():
            workers.stop(patience_seconds=10.0)
        self._groups.clear()


def _received(connection: Connection, rank: int) -> Any:
    """A result in a tuple, a `Failure`, or None when the worker is gone."""
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return None


def _raise_failures(failures: dict[int, Failure], dead: list[int], late: list[int]) -> None:
    if not (failures or dead or late):
        return
    # A rank that lost a peer reports another's failure; the cause comes first.
    ordered = sorted(failures, key=lambda rank: (failures[rank].kind == PeerError.__name__, rank))
    lines = [f"rank {rank} died" for rank in dead] + [f"rank {rank} gave no result in time" for rank in late]
    if ordered:
        lines.append(f"rank {ordered[0]} raised:\n{failures[ordered[0]].text}")
        lines += [f"rank {rank}: {failures[rank].kind}: {failures[rank].message}" for rank in ordered[1:]]
    raise RankError("\n".join(lines), failures)


def _serve(connection: Connection, rank: int, size: int, rendezvous: str) -> None:
    """The life of a worker."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    channels: dict[Transport, Channel] = {}
    with contextlib.suppress(EOFError):
        while True:
            function, arguments, transport, poisons, patience_seconds = connection.recv()
            faulthandler.dump_traceback_later(patience_seconds, file=2)
            with _device(transport):
                result = _result_of(function, arguments, transport, channels, rank, poisons=poisons)
            connection.send(result)
            faulthandler.cancel_dump_traceback_later()
    for channel in channels.values():
        channel.close()
    # Leaving quietly: destroying the group would wait for ranks that have left already.
    os._exit(0)


@contextmanager
def _device(transport: Transport) -> Iterator[None]:
    """The strict devices run behind the host as long as anything of a call may travel."""
    if transport.device != "strict":
        yield
        return
    strict.register()
    strict.faults()  # of the call before
    with behind(transport.late):
        yield


def _result_of(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    transport: Transport,
    channels: dict[Transport, Channel],
    rank: int,
    *,
    poisons: bool,
) -> tuple[Any] | Failure:
    try:
        if transport not in channels:
            channels[transport] = transport.channel(rank)
        channel = channels[transport]
        result = function(channel, *arguments)
        if transport.device == "strict" and not poisons:
            strict.check()
        if poisons:
            channels.pop(transport).close()
        else:
            # All leave together, so that the next call finds the same channel everywhere, or nowhere.
            channel.exchange(b"", purpose="end of the call")
    except BaseException as error:
        text = traceback.format_exc()
        if transport in channels:
            failed = channels.pop(transport)
            failed.abort(f"{type(error).__name__}: {error}")
            failed.close()
        if transport.device == "strict" and (refused := strict.faults()):
            text = "\n".join(["refused by the strict device:", *refused, text])
        return Failure(kind=type(error).__name__, message=str(error), text=text)
    return (result,)
