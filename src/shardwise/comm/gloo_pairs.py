"""Tensors between hosts: gloo moves them, between two ranks at a time.

A frame on the connection announces each chunk of a message, with the tag under which gloo has it. The receiver compares
the signature first, and then asks gloo for the chunk. So sizes that differ never meet in gloo, which would end the
process. Rank 0 sends a chunk to rank 1 on another host::

    rank 0, program   gloo.send(chunk, tag 7)   CHUNK, tag 7 ...................................  CREDIT: done with it
    rank 1, program                             CHUNK, tag 7: expected, gloo.recv(tag 7) ... uses it, CREDIT
    rank 1, thread of the pair                                             waits in gloo, wakes the program

Gloo's own threads carry the bytes. A receive of gloo completes only in its `wait`, which neither calls back nor can be
polled or given up. So each pair has a thread that waits there, in the order of the receives. The sends of what it waits
for have all begun, so it waits for no call of another program.

Two ranks connect when the first chunk is announced between them. The thread of the pair does it, so that a program
sends and computes on although its peer comes much later.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.comm.communicators import looked_for
from shardwise.comm.torch_private import gloo_device, gloo_group
from shardwise.errors import in_words

_TAGS = 1 << 31
"""Gloo takes tags below this."""

GRACE_SECONDS = 3.0
_GRACE_SHARE = 0.25
"""How long a pair may be broken before its rank is blamed, at most, and as a part of the time limit.

The connection of a rank that is lost says more.
"""

_CONNECT_SHARE = 0.75
"""Of the time limit: a connection that fails is reported before the wait for its tensors ends."""


_Looked = TypeVar("_Looked")


class _PairGroup(Protocol):
    """What is used of `ProcessGroupGloo`."""

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int, /) -> dist.Work:
        """Begin to send; the tensor is gloo's until the other side has received it."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int, /) -> dist.Work:
        """Begin to receive."""


class _PatientStore(Store):
    """A store for gloo to meet in, which waits for a key without keeping the store from other threads."""

    # A store carries out one request after the other. One that blocks would keep this rank from publishing what the
    # awaited rank waits for itself.

    def __init__(self, store: Store, has_ended: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._has_ended = has_ended

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._store.get(key)
        return found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # Without a limit: the other rank may compute for long before it looks at its connections. A call that waits
        # for it has its own limit.
        _found(lambda: self._store.check(list(keys)), self._has_ended)


class GlooPairs:
    """All pairs that this rank is one of, and what has arrived from them."""

    def __init__(self, rank: int, store: Store, *, timeout_seconds: float) -> None:
        """store: of this channel alone."""
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.has_ended = False
        self.broken: dict[int, tuple[str, float]] = {}
        """By world rank what gloo says of a pair that broke, and when (on the monotonic clock)."""
        self._store = store
        self._pairs: dict[int, GlooPair] = {}
        self._devices: dict[str, object] = {}
        self._arrived: deque[Callable[[], None]] = deque()
        # Readable when something has arrived: the program polls it together with its connections.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Reentrant, as that of a pair: whatever thread collects a board that nobody holds closes its pairs.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """For poll."""
        return self._bell

    def pair(self, rank: int, address: Callable[[], str]) -> "GlooPair":
        """The pair with a world rank. address: of this host, on the way to that rank; empty until it is known."""
        if rank not in self._pairs:
            self._pairs[rank] = GlooPair(self, rank, address)
        return self._pairs[rank]

    def take_in(self) -> None:
        """Note what has arrived and what has broken since the last time."""
        with suppress(BlockingIOError):  # another thread's call was here first
            os.eventfd_read(self._bell)
        while self._arrived:
            self._arrived.popleft()()

    def note_broken(self, rank: int, text: str) -> None:
        """The pair with this rank carries nothing any more."""
        self.broken.setdefault(rank, (text, time.monotonic()))

    def is_lost(self, rank: int) -> bool:
        """Whether the pair with this rank broke a while ago."""
        grace_seconds = min(GRACE_SECONDS, _GRACE_SHARE * self.timeout_seconds)
        return rank in self.broken and time.monotonic() - self.broken[rank][1] > grace_seconds

    def lost(self, has_closed: Callable[[int], bool]) -> tuple[int, str] | None:
        """A rank whose pair broke a while ago, and not since it has closed its channel; and what gloo says of it."""
        broken = ((rank, text) for rank, (text, _) in self.broken.items() if self.is_lost(rank))
        return next((each for each in broken if not has_closed(each[0])), None)

    def tell(self, event: Callable[[], None]) -> None:
        """For the threads of pairs: let the program call this in its next look."""
        with self._lock:
            if not self.has_ended:
                self._arrived.append(event)
                os.eventfd_write(self._bell, 1)

    def connect(self, peer: int, address: str) -> _PairGroup:
        """The group of two; returns when both are connected. Raises RuntimeError where they cannot be."""
        with self._lock:
            # One device for all pairs on a way: it has a port and a thread.
            if address not in self._devices:
                self._devices[address] = gloo_device(address)
            device = self._devices[address]
        ends = sorted((self.rank, peer))
        store = _PatientStore(PrefixStore(f"gloo/{ends[0]}-{ends[1]}", self._store), lambda: self.has_ended)
        timeout = timedelta(seconds=_CONNECT_SHARE * self.timeout_seconds)
        group: _PairGroup = gloo_group(store, ends.index(self.rank), 2, device, timeout=timeout)
        return group

    def close(self) -> None:
        """Give back what the pairs hold; what they wait for still ends by its own limit."""
        if self.has_ended:
            return
        with self._lock:
            self.has_ended = True
            os.close(self._bell)
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()
        self._devices.clear()
        self._arrived.clear()

    def leave_to_parent(self) -> None:
        """In a forked child: touch nothing. The threads of gloo are not in this process, nor who holds the locks."""
        self.has_ended = True


class GlooPair:
    """This rank and one of another host."""

    def __init__(self, pairs: GlooPairs, rank: int, address: Callable[[], str]) -> None:
        self._pairs = pairs
        self._rank = rank
        self._address = address
        self._at = int(rank > pairs.rank)  # the place of the other rank in the group of two
        self._group: _PairGroup | None = None
        self._waiting: deque[Callable[[_PairGroup], None]] = deque()
        """What begins when the two are connected."""
        self._sent: dict[int, dist.Work | None] = {}
        """By tag the sends that the other side may not have received: gloo drops one without a reference."""
        self._received: SimpleQueue[tuple[dist.Work, torch.Tensor, Callable[[], None]] | None] = SimpleQueue()
        self._next_tag = 0
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin to connect, unless that has begun."""
        if self._thread is None:
            # A daemon: a program whose peer never comes must end all the same.
            self._thread = threading.Thread(target=self._run, name="shardwise gloo pair", daemon=True)
            self._thread.start()

    def send(self, content: torch.Tensor) -> int:
        """Begin to send; the tag of it. The memory must not change before the tag is released."""
        tag = self._next_tag
        self._next_tag = (tag + 1) % _TAGS
        self._sent[tag] = None

        def begin(group: _PairGroup) -> None:
            if tag in self._sent:
                self._sent[tag] = group.send([content], self._at, tag)

        self._start(begin)
        return tag

    def release(self, tag: int) -> None:
        """The other side has received what was sent under this tag."""
        del self._sent[tag]

    def receive(self, tag: int, memory: torch.Tensor, on_arrival: Callable[[], None]) -> None:
        """Receive what the other side has sent under this tag, as many bytes as `memory` has."""
        self._start(lambda group: self._received.put((group.recv([memory], self._at, tag), memory, on_arrival)))

    def close(self) -> None:
        """Let the thread end."""
        self._received.put(None)
        with self._lock:
            self._waiting.clear()
            self._sent.clear()
            self._group = None

    def _start(self, begin: Callable[[_PairGroup], None]) -> None:
        self.open()
        with self._lock:
            if self._group is None:
                self._waiting.append(begin)
                return
            group = self._group
        try:
            begin(group)
        except RuntimeError as error:
            self._break(error)

    def _run(self) -> None:
        try:
            # The connection of the two ranks may not be there yet, and it says which way leads to the other one.
            address = _found(self._address, lambda: self._pairs.has_ended)
            group = self._pairs.connect(self._rank, address)
            with self._lock:
                while self._waiting:
                    self._waiting.popleft()(group)
                if not self._pairs.has_ended:
                    self._group = group
            del group
            # Far beyond our own limit, which says more: with its limit gloo closes the pair.
            limit = timedelta(seconds=2 * self._pairs.timeout_seconds + 60)
            while (receive := self._received.get()) is not None:
                work, memory, on_arrival = receive
                work.wait(limit)
                self._pairs.tell(on_arrival)
                del receive, work, memory, on_arrival
        except RuntimeError as error:  # what the errors of torch.distributed have in common
            self._break(error)

    def _break(self, error: RuntimeError) -> None:
        self._pairs.tell(partial(self._pairs.note_broken, self._rank, in_words(error)))


def _found(look: Callable[[], _Looked], has_ended: Callable[[], bool]) -> _Looked:
    found = looked_for(look, has_ended)
    if not found:
        raise RuntimeError("the channel has ended")
    return found
