"""What all ranks have to hear, passed on from rank to rank; and the links that ranks make at first use.

A rank says to its neighbours (`relay_neighbours`) that it waits, fails or ends. Each passes on what it has not heard
before. Each number of a rank is taken once, whatever way it comes::

    rank 3 is killed     its neighbours see the connections end, and say LOST: rank 3
    0 - 1 - 2 - 3        rank 2 passes it on to 1, and 1 to 0
    |           |
    7 - 6 - 5 - 4        rank 4 to 5, 5 to 6, ...: rank 7 hears it from 6 and from 0, and takes what comes first

One thread per rank does so, also while the program computes. As long as all is well nothing is said, and it sleeps. A
rank that is stopped passes nothing on: the ring leads around it. The `Switchboard` acts upon it in its calls.

The same thread takes in the calls of ranks that have messages for this one. To call another rank may take long, so that
a further thread does it for each::

    rank 1 wants to send to rank 4                      rank 4 makes the same call
    the lower one gives the other 0.2 s to call         calls rank 1 at once

If both call all the same, the higher one refuses: its own call is the one that counts.
"""

import collections
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from shardwise.comm.call_log import parsed_calls
from shardwise.comm.hang_report import Whereabouts
from shardwise.comm.hosts import RankNames
from shardwise.comm.process.connections import Connected
from shardwise.comm.process.frames import ChannelVerdict, FrameKind, Header, Status, frame, lost
from shardwise.comm.process.link import Payload, PeerLink, flush_until
from shardwise.comm.process.reception import Reception
from shardwise.errors import ShardwiseError, in_words

GRACE_SECONDS = 0.2
"""How long the lower of two ranks waits for the call of the higher one, which usually makes the same call."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
"""Before a rank that did not answer is called again. Each time it is twice as long."""

_MOST_CALLS = 64
"""Ranks that are called at a time."""

FAREWELL_SECONDS = 1.0
"""How long a link that comes after the end is kept for its last words."""


class News(NamedTuple):
    """What a rank has said to all."""

    kind: int
    rank: int
    content: object
    """What `parsed_news` made of it."""


def parsed_news(kind: int, payload: Payload, size: int) -> object:
    """What one of `size` ranks says to all. Raises ValueError or TypeError for what is nothing of the kind."""
    content = bytes(payload)
    if kind == FrameKind.STATUS:
        status = Status.parsed(content)
        if not all(rank in range(size) for rank in status.awaited):
            raise ValueError(f"it waits for {status.awaited}")
        return status
    if kind == FrameKind.CALLS:
        return parsed_calls(content)
    if kind == FrameKind.WHERE:
        return Whereabouts.parsed(content)
    if kind == FrameKind.FAILED:
        return ChannelVerdict.parsed(content)
    if kind == FrameKind.LOST:
        verdict = ChannelVerdict.parsed(content)
        if verdict.culprit not in range(size):
            raise ValueError(f"it has lost {verdict.culprit}")
        return verdict
    if kind != FrameKind.BYE:
        raise ValueError("nothing that is said to all")
    return None


class Relay:
    """The neighbours of one rank, its listeners, and the thread that serves them."""

    def __init__(self, rank: int, connected: Connected, *, timeout_seconds: float) -> None:
        """timeout_seconds: how long a rank that has been called may take to answer."""
        self.lock = threading.RLock()
        """Held for short: while nothing waits."""
        self.problems: dict[int, str] = {}
        """By rank, why the last call of it has failed."""
        self.on_connection: Callable[[], None] = lambda: None
        """Called when a link is there, on any thread, with the lock."""
        self._rank = rank
        self._size = len(connected.hosts)
        self._names = RankNames(connected.hosts)
        self._timeout_seconds = timeout_seconds
        self.links: Mapping[int, PeerLink] = connected.links
        """By rank, where one is connected to this one."""
        self.listeners = connected.listeners
        """Where other ranks call."""
        self._connect_to = connected.call
        self._num_said = 0
        self._num_heard: collections.Counter[int] = collections.Counter()
        """By rank the number of the last that it has said. Each way keeps the order, so that no earlier one comes."""
        self._ended: set[int] = set()
        """Ranks that are lost, have failed, or have closed their channel."""
        self._wanted: set[int] = set()
        self._calling: set[int] = set()
        self._linked: set[int] = set()
        self.news: dict[tuple[int, int], News] = {}
        """By kind and rank, the last one: a rank that makes no call for long needs no more."""
        self._connections: collections.deque[tuple[int, socket.socket]] = collections.deque()
        self._last_words: bytes | None = None
        self._end = threading.Event()
        self._is_dropped = False
        self._calls = threading.BoundedSemaphore(_MOST_CALLS)
        self._poll = select.poll()
        self.by_descriptor = {link.fileno(): link for link in self.links.values()}
        """The links that have not ended."""
        for descriptor in self.by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        self._reception = Reception(
            self.listeners,
            connected.key,
            rank,
            self._poll,
            admits=self._admits,
            welcome=lambda of, caller: self._join(of, caller.connection),
        )
        # Two bells: the first one wakes the thread, the second one a call of the program.
        self._bell, self._ring_end = _pipe()
        self._told, self._tell_end = _pipe()
        self._is_told = False
        self._poll.register(self._bell, select.POLLIN)
        # A daemon: a program that forgets `close` must end all the same.
        self._thread = threading.Thread(target=self._run, name="shardwise relay", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """For poll: readable while there is something to take."""
        return self._told

    def spread(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Say this to all ranks."""
        with self.lock:
            if self._is_dropped:
                return
            self._spread(kind, payload)
            if any(link.wants_to_write for link in self.links.values()):
                self._ring()

    def call(self, rank: int) -> None:
        """Make a link to a rank, unless one is there or on its way."""
        with self.lock:
            if rank in self._wanted or rank in self._linked or self._last_words is not None:
                return
            self._wanted.add(rank)
            is_caller = rank < self._rank
            if is_caller:
                self._calling.add(rank)  # from now on: see `_admits`
            pause_seconds = 0.0 if is_caller else GRACE_SECONDS
            arguments = (rank, pause_seconds)
            threading.Thread(target=self._call, args=arguments, name="shardwise call", daemon=True).start()

    def taken(self) -> tuple[list[tuple[int, socket.socket]], list[News]]:
        """The links that have come, and what was heard. The links come first: what was said at their end is later."""
        with self.lock:
            if self._is_dropped:
                return [], []
            if self._is_told:
                self._is_told = False
                os.read(self._told, 1)
            news = list(self.news.values())
            self.news.clear()
            return self.take_connections(), news

    def take_connections(self) -> list[tuple[int, socket.socket]]:
        """The links that have come, alone."""
        with self.lock:
            connections = list(self._connections)
            self._connections.clear()
            return connections

    def end(self, last_words: bytes) -> None:
        """Make no more links; those under way get a last frame. What was said is still passed on."""
        with self.lock:
            if self._last_words is None and not self._is_dropped:
                self._last_words = last_words
                self._end.set()
                self._reception.close()
                for listener in self.listeners:
                    self._poll.unregister(listener)
                    listener.close()

    def linger(self, deadline: float) -> None:
        """Let the last words leave this host."""
        with self.lock:
            if not self._is_dropped:
                flush_until(deadline, self.links.values())
                for link in self.links.values():
                    link.linger(deadline)

    def drop(self) -> None:
        """Close everything without a word."""
        if not self._thread.is_alive():
            self.lock = threading.RLock()  # in a forked child, where the thread that holds the other one is not
        with self.lock:
            if self._is_dropped:
                return
            self.end(b"")
            self._is_dropped = True
            for link in self.links.values():
                link.close()
            for _, connection in self._connections:
                connection.close()
            self._ring()
            for descriptor in (self._ring_end, self._tell_end, self._told):
                os.close(descriptor)
            if not self._thread.is_alive():  # as in a forked child; else it closes what it waits for
                os.close(self._bell)

    # The thread.

    def _run(self) -> None:
        while True:
            with self.lock:
                if self._is_dropped:
                    os.close(self._bell)
                    return
                patience_seconds = self._reception.patience_seconds()
                for descriptor, link in self.by_descriptor.items():
                    self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if link.wants_to_write else 0))
            events = self._poll.poll(None if patience_seconds is None else patience_seconds * 1000)
            with self.lock:
                if self._is_dropped:
                    continue
                for descriptor, _ in events:
                    self._attend(descriptor)
                self._reception.drop_late()

    def _attend(self, descriptor: int) -> None:
        link = self.by_descriptor.get(descriptor)
        if descriptor == self._bell:
            os.read(descriptor, 1 << 10)
        elif link is None:
            self._reception.take_in(descriptor)
        else:
            link.flush()
            link.receive(self._take)
            if link.ended:
                self._poll.unregister(descriptor)
                del self.by_descriptor[descriptor]
                # A rank that closes drops what it reads (`PeerLink.linger`), and with it the other side's goodbye.
                if link.rank not in self._ended and self._last_words is None:
                    verdict = lost(link.rank, link.garbled, self._names)
                    self._spread(FrameKind.LOST, verdict.packed())
                    self._note(News(FrameKind.LOST, self._rank, verdict))

    def _take(self, link: PeerLink, header: Header, payload: Payload) -> None:
        kind, _, _, _, origin, _, _, _, number, _ = header
        try:
            if origin not in range(self._size):
                raise ValueError(f"words of rank {origin}")
            if origin == self._rank or number <= self._num_heard[origin]:
                return
            news = News(kind, origin, parsed_news(kind, payload, self._size))
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            link.refuse(f"a frame of kind {kind} that means nothing here ({in_words(error)})")
            return
        self._num_heard[origin] = number
        self._pass_on(frame(FrameKind(kind), lane=origin, number=number, payload=bytes(payload)), link)
        self._note(news)

    def _spread(self, kind: FrameKind, payload: bytes) -> None:
        self._num_said += 1
        self._pass_on(frame(kind, lane=self._rank, number=self._num_said, payload=payload), None)

    def _pass_on(self, content: bytes, source: PeerLink | None) -> None:
        for link in self.links.values():
            if link is not source:
                link.put(content)
                link.flush()

    def _note(self, news: News) -> None:
        if news.kind in (FrameKind.FAILED, FrameKind.BYE):
            self._ended.add(news.rank)
        elif isinstance(news.content, ChannelVerdict) and news.content.culprit is not None:
            self._ended.add(news.content.culprit)
        self.news.pop((news.kind, news.rank), None)
        self.news[news.kind, news.rank] = news
        self._tell()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of rings
            os.write(self._ring_end, b".")

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            os.write(self._tell_end, b".")

    # Links at first use.

    def _admits(self, rank: int) -> bool:
        # Where this rank calls too, both know which of the two calls counts: that of the higher rank.
        return rank not in self._linked and not (rank in self._calling and rank < self._rank)

    def _join(self, rank: int, connection: socket.socket) -> None:
        self._linked.add(rank)
        self._connections.append((rank, connection))
        self._tell()
        self.on_connection()

    def _call(self, rank: int, pause_seconds: float) -> None:
        """Call a rank until there is a link, or one of the two has ended."""
        while not self._end.wait(pause_seconds):
            with self.lock:
                if rank in self._linked or rank in self._ended:
                    break
                self._calling.add(rank)
            connection = None
            try:
                with self._calls:
                    connection = self._connect_to(rank, time.monotonic() + self._timeout_seconds)
            except (OSError, ShardwiseError) as error:
                self.problems[rank] = in_words(error)
            with self.lock:
                self._calling.discard(rank)
                last_words = self._last_words
                if connection is not None and last_words is None:
                    self._join(rank, connection)
                    break
            if connection is not None and last_words is not None:
                _say_last(connection, last_words)
            pause_seconds = min(max(_FIRST_PAUSE_SECONDS, 2 * pause_seconds), _LONGEST_PAUSE_SECONDS)
        with self.lock:
            self._calling.discard(rank)


def _say_last(connection: socket.socket, last_words: bytes) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(FAREWELL_SECONDS)
        connection.sendall(last_words)
        # A close over unread bytes would take the words back.
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 10):
            pass


def _pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    return read_end, write_end
