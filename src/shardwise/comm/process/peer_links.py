"""The links of one rank to those that it exchanges messages with, each made for the first message between the two.

A frame can be queued for any rank at any time. Where there is no connection yet, the `relay` makes one, and the frames
leave when it is there: within a call, or between calls by the `Flusher`. What all ranks are to hear goes to every link,
and through the relay to the ranks that have none with this one.
"""

import select
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from shardwise.comm.process.frames import FrameKind, frame
from shardwise.comm.process.gloo_pairs import GlooPairs
from shardwise.comm.process.known_ranks import KnownRanks
from shardwise.comm.process.link import Flusher, PeerLink, Taker, flush_until
from shardwise.comm.process.relay import Relay

Hearer = Callable[[int, int, object], None]
"""Given what came through the relay: the rank that says it, the kind of frame, and what `parsed_news` made of it."""


class PeerLinks:
    """By world rank. The caller of every method holds the lock, but for those that say otherwise."""

    def __init__(
        self,
        rank: int,
        links: dict[int, PeerLink],
        relay: Relay | None,
        *,
        kernels: Sequence[int],
        known: KnownRanks,
        lock: AbstractContextManager[bool],
    ) -> None:
        """links: those that are there. relay: makes the others; without one, these are all."""
        self.relay = relay
        self.ended: list[PeerLink] = []
        """Whose connections the other side has closed."""
        self._rank = rank
        self._links = links
        self._kernels = kernels
        self._known = known
        self._poll = select.poll()
        self._by_descriptor: dict[int, PeerLink] = {}
        self._bells: dict[int, Callable[[], None]] = {}
        # What most links do not need at most times is done for few: a rank may have many.
        self._queued: set[PeerLink] = set()
        # Sockets are polled for room only while something waits for it: most have room all the time, and a poll for it
        # would return at once.
        self._writers: set[int] = set()
        for link in links.values():
            self._watch(link)
        # The flusher takes the same lock, so that it never writes into the middle of a frame of a call.
        self._flusher = Flusher(lock, links.values(), self._welcome)
        if relay is not None:
            self._poll.register(relay, select.POLLIN)
            relay.on_connection = self._flusher.ring

    def __getitem__(self, rank: int) -> PeerLink:
        """The link to a rank; one without a connection is made where there is none."""
        link = self._links.get(rank)
        return self._made(rank) if link is None else link

    def values(self) -> Collection[PeerLink]:
        """All that there are."""
        return self._links.values()

    def is_local(self, rank: int) -> bool:
        """Whether a rank shares memory with this one."""
        link = self._links.get(rank)
        return self._kernels[rank] == self._kernels[self._rank] if link is None else link.local

    def has_connection(self, rank: int) -> bool:
        """Whether frames go straight to a rank, or went until one of the two ended."""
        link = self._links.get(rank)
        return link is not None and link.is_connected

    def said_bye(self, rank: int) -> bool:
        """Whether a rank has closed its channel, after all messages of it that came here."""
        return self._links[rank].said_bye if self.has_connection(rank) else self._known[rank].said_bye

    def sends_no_more(self, rank: int) -> bool:
        """Whether a rank has ended, and nothing of what it has sent is still to come."""
        if self.has_connection(rank):
            link = self._links[rank]
            return link.ended or link.said_bye or link.has_failed
        return self._known[rank].has_ended or self._known[rank].said_bye

    def has_gone(self, rank: int) -> bool:
        """Whether a rank reads nothing more."""
        return self._links[rank].ended if self.has_connection(rank) else self.sends_no_more(rank)

    def problems(self) -> dict[int, str]:
        """By rank, why there is no connection to it, although this rank has called it."""
        found = {} if self.relay is None else self.relay.problems
        return {rank: problem for rank, problem in found.items() if not self.has_connection(rank)}

    # Moving frames.

    def listen_to(self, bell: GlooPairs, on_ring: Callable[[], None]) -> None:
        """Call this when something has come on another way."""
        self._bells[bell.fileno()] = on_ring
        self._poll.register(bell, select.POLLIN)

    def wait(self, patience_seconds: float) -> list[tuple[int, int]]:
        """Wait until something has come or a socket has room; what `read` needs."""
        return self._poll.poll(patience_seconds * 1000)

    def read(self, events: Sequence[tuple[int, int]], take: Taker, hear: Hearer) -> None:
        """Read what has come."""
        for descriptor, _ in events:
            link = self._by_descriptor.get(descriptor)
            if (ring := self._bells.get(descriptor)) is not None:
                ring()
                continue
            if link is None:
                self._hear_relay(hear)
                continue
            link.receive(take)
            if link.ended:
                # A closed socket is always readable: the poll would never wait again.
                self._poll.unregister(descriptor)
                self._writers.discard(descriptor)
                self.ended.append(link)

    def flush(self) -> None:
        """Write what there is room for."""
        for link in list(self._queued):
            if not link.is_connected:
                self._queued.discard(link)  # until it is
                continue
            if link.wants_to_write:
                link.flush()
            waits = link.wants_to_write
            if not link.ended and waits != ((descriptor := link.fileno()) in self._writers):
                self._writers ^= {descriptor}
                self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if waits else 0))
            if not waits:
                self._queued.discard(link)

    def leave(self) -> None:
        """The call ends; what did not fit into the sockets is the flusher's."""
        if self._writers:
            self._flusher.wake()

    def tell_all(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Say this to all ranks."""
        content = frame(kind, payload=payload)
        for link in self._links.values():
            link.put(content)
        self.flush()
        if self.relay is not None:
            self.relay.spread(kind, payload)

    # The end.

    def end(self, last_words: bytes) -> None:
        """Make no more links. One that comes all the same says this frame, and no more."""
        if self.relay is not None:
            self.relay.end(last_words)
            self._welcome()

    def fail(self, payload: bytes) -> None:
        """Say to all why this rank ends, before all that has not begun to leave."""
        last_words = frame(FrameKind.FAILED, payload=payload)
        self.end(last_words)
        if self.relay is not None:
            self.relay.spread(FrameKind.FAILED, payload)
        for link in self._links.values():
            link.put_last(last_words)

    def is_leaving(self) -> bool:
        """Whether frames wait for room, or for a connection that may still come."""
        return any(link.wants_to_write and not self.sends_no_more(rank) for rank, link in self._links.items())

    def linger(self, deadline: float) -> None:
        """Let everything leave this host."""
        flush_until(deadline, self._links.values())
        if self.relay is not None:
            self.relay.linger(deadline)
        for link in self._links.values():
            link.linger(deadline)

    def close(self) -> None:
        """Close all without a word, with or without the lock."""
        self._flusher.stop()
        for link in self._links.values():
            link.close()
        if self.relay is not None:
            self.relay.drop()

    # Connections that come.

    def _made(self, rank: int) -> PeerLink:
        if self.relay is None:
            raise LookupError(f"no link to rank {rank}")
        link = self._links[rank] = PeerLink(rank=rank, local=self.is_local(rank))
        link.queued = self._queued
        self._flusher.start()  # the connection may come between calls
        self.relay.call(rank)
        return link

    def _watch(self, link: PeerLink) -> None:
        link.queued = self._queued
        if link.wants_to_write:
            self._queued.add(link)
        self._by_descriptor[link.fileno()] = link
        self._poll.register(link.fileno(), select.POLLIN)

    def _hear_relay(self, hear: Hearer) -> None:
        assert self.relay is not None
        connections, news = self.relay.taken()
        self._attach(connections)
        for kind, rank, content in news:
            # What a rank says on its link is in the order of its messages: it waits after those that came before.
            if kind not in (FrameKind.STATUS, FrameKind.WHERE) or not self.has_connection(rank):
                hear(rank, kind, content)

    def _welcome(self) -> None:
        if self.relay is not None:
            self._attach(self.relay.take_connections())

    def _attach(self, connections: Sequence[tuple[int, socket.socket]]) -> None:
        for rank, connection in connections:
            link = self._links.setdefault(rank, PeerLink(rank=rank, local=self.is_local(rank)))
            link.attach(connection)
            self._watch(link)
        if connections:
            self.flush()
