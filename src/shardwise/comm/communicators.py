"""Communicators between devices: made by the channel itself, over its own store, each under its own name.

`torch.distributed.new_group` is not used. It names a group by how many the process has, so that ranks with other
histories wait for each other under different names. It keeps every group until the program ends. Where the process
group is bound to a device, only all ranks together can call it. Here a name says who talks, which every member knows::

    collectives of world ranks 0 2 3       0.2.3             made when they are first called
    messages from rank 2 to rank 0 there   0.2.3/2>0         made when the first one is sent

NCCL connects a communicator at the first call, and the host waits there until every member has come: see `DeviceLine`.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.comm.devices import backend_of
from shardwise.comm.torch_private import OneTensorCalls, can_make_backend, made_backend
from shardwise.errors import PeerError, PlanError

_SHORT_WAIT_SECONDS = 0.001
_LONG_WAIT_SECONDS = 0.05
"""The first and the longest pause between two looks for the other side."""

_Found = TypeVar("_Found")


class Communicator(OneTensorCalls, Protocol):
    """What is used of `torch.distributed.Backend`. Ranks are those of the communicator."""

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], /) -> dist.Work:
        """Parts of any sizes, one per rank."""

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], /) -> dist.Work:
        """Parts of any sizes, one per rank."""

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], /) -> dist.Work:
        """A part from each rank, and one for each, of any sizes; empty ones are not sent."""

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int, /) -> dist.Work:
        """One tensor."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int, /) -> dist.Work:
        """One tensor."""

    def abort(self) -> None:
        """End all operations, wherever they wait."""

    def shutdown(self) -> None:
        """Give back what it holds."""


MakeCommunicator = Callable[[Store, int, int], Communicator]
"""From a store, the rank and the number of ranks."""


def maker(device: torch.device, *, timeout_seconds: float) -> MakeCommunicator:
    """What makes communicators for tensors on `device`; raises PlanError where torch has no backend for it."""
    kind = backend_of(device)
    if not can_make_backend(kind):
        raise PlanError(f"a channel for {device} was asked for, but this torch cannot make {kind} communicators itself")
    # Our own watch ends what waits too long, and says why. The clock of the backend must not strike before: it may end
    # the process.
    timeout = timedelta(seconds=2 * timeout_seconds + 60)

    def make(store: Store, rank: int, size: int) -> Communicator:
        with _no_teardown():
            made: Communicator = made_backend(kind, store, rank, size, timeout)
        return made

    return make


@contextmanager
def _no_teardown() -> Iterator[None]:
    """Communicators made inside leave the process alive when a peer is lost: NCCL's own answer is to end it."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a communicator is made, and by no option of it
    given = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


class Communicators:
    """All that a channel and its parts have made, so that they end together."""

    def __init__(self, make: MakeCommunicator, store: Store) -> None:
        self.has_ended = False
        self._make = make
        self._store = store
        self._made: dict[str, Communicator] = {}
        self._lock = threading.Lock()

    def connect(self, name: str, rank: int, size: int) -> Communicator:
        """The communicator of this name, which each member makes once; returns when all are about to make it.

        Raises PeerError when the channel ends before.
        """
        # Over a connection of its own: a store carries out one request after the other, and a rank that waits there for
        # what another one publishes would keep this rank's other threads from publishing.
        store = PrefixStore(name, self._store.clone() if hasattr(self._store, "clone") else self._store)
        self._meet(store, rank, size)
        made = self._make(store, rank, size)
        with self._lock:
            if not self.has_ended:
                self._made[name] = made
                return made
        made.abort()
        raise _ended_before(name)

    def _meet(self, store: PrefixStore, rank: int, size: int) -> None:
        # Not a blocking `get`, which would not notice that the channel ends.
        store.set(f"here/{rank}", "")
        everybody = [f"here/{each}" for each in range(size)]
        if not looked_for(lambda: store.check(everybody), lambda: self.has_ended):
            raise _ended_before("all ranks came")

    def abort(self) -> None:
        """End all operations on the device, wherever they wait."""
        for each in self._taken():
            each.abort()

    def close(self) -> None:
        """Give back what the communicators hold."""
        # In one order on all ranks: to take one down, its members may wait for each other.
        for each in self._taken():
            each.shutdown()

    def _taken(self) -> Sequence[Communicator]:
        with self._lock:
            self.has_ended = True
            taken, self._made = self._made, {}
        return [taken[name] for name in sorted(taken)]


def looked_for(look: Callable[[], _Found], has_ended: Callable[[], bool]) -> _Found | None:
    """What a look finds in the end, ever more seldom; None where the channel ends before."""
    pause_seconds = _SHORT_WAIT_SECONDS
    while not (found := look()):
        if has_ended():
            return None
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _LONG_WAIT_SECONDS)
    return found


def _ended_before(what: str) -> PeerError:
    return PeerError(f"the channel has ended before {what}", operation="start", purpose="communicators")


class Launch:
    """An operation that begins on the device now or, where its communicator is not connected yet, later."""

    def __init__(self, begin: Callable[[Communicator], dist.Work], follower: Callable[[], Callable[[], None]]) -> None:
        """follower: asked at the call, for what makes another thread go on behind the stream of the call."""
        self.done = threading.Event()
        self.work: dist.Work | None = None
        self.error: BaseException | None = None
        self._begin = begin
        self._follower = follower
        self._follow: Callable[[], None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended on the device."""
        return self.done.is_set() and self.work is not None and self.work.is_completed()

    def postpone(self) -> None:
        """It will begin on another thread."""
        self._follow = self._follower()

    def begin(self, communicator: Communicator) -> None:
        """Begin it."""
        if self._follow is not None:
            self._follow()
        self.work = self._begin(communicator)
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """It will not begin; its `wait` raises."""
        self.error = error
        self.done.set()


class DeviceLine:
    """One communicator, which is connected when it is first used: that of collectives, or of messages in one direction.

    To connect, all hosts have to come, and wait for each other. But two ranks may both send first, and neither may
    wait. So a thread connects, and begins what is called meanwhile::

        rank 0, program     send x to 1    receive y .............. wait    send z: begins at once
        rank 0, line 0>1    wait for rank 1 ..., connect, begin x
        rank 0, line 1>0    wait for rank 1 ..., connect, begin y
        rank 1, program     (computes)        send y to 0    receive x: both lines of rank 1 come, too

    A communicator carries out its operations in order. Were both directions on one, two sends that come first on both
    sides would wait for ever. So each has its own stream, and NCCL carries out those of several streams together
    as long as their kernels fit on the device.
    """

    def __init__(self, connect: Callable[[], Communicator]) -> None:
        self._connect = connect
        self._communicator: Communicator | None = None
        self._waiting: deque[Launch] = deque()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_connected(self) -> bool:
        """Whether what is started begins in its call."""
        return self._communicator is not None

    def start(self, launch: Launch) -> None:
        """Begin it after those that were started before."""
        with self._lock:
            if self._error is not None:
                launch.fail(self._error)
            elif self._communicator is not None:
                try:
                    launch.begin(self._communicator)
                except RuntimeError as error:
                    launch.fail(error)
            else:
                launch.postpone()
                self._waiting.append(launch)
                if self._thread is None:
                    # A daemon: a rank whose peer never comes must end all the same.
                    self._thread = threading.Thread(target=self._run, name="shardwise connector", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        try:
            communicator = self._connect()
            while True:
                with self._lock:
                    if not self._waiting:
                        self._communicator = communicator
                        return
                    launch = self._waiting[0]
                launch.begin(communicator)
                self._waiting.popleft()
        except BaseException as error:  # whatever it is, those that wait for a message must learn of it
            with self._lock:
                self._error = error
                for launch in self._waiting:
                    launch.fail(error)
