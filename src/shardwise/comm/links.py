"""One connection to one other rank: frames out of a queue that never blocks, frames in as they come.

Sockets do not block and writers never wait: what the socket does not take stays in the queue of its link, and is
written by the next call, or between calls by the `Flusher`. A queue holds frames, and payloads apart from them, which
may be views of tensors::

    put(header) put(payload, whole=False)   put(SEGMENT, descriptor=9)   put(CREDIT)
    [ header ][ payload, 0.7 of 1 MiB out ] [ SEGMENT + descriptor 9 ] [ CREDIT ]
                ^ put_last(FAILED) keeps up to here, or the reader could not find the next frame,
                  drops the rest, and closes the queue: ... payload ][ FAILED ]
"""

import array
import collections
import contextlib
import fcntl
import os
import select
import socket
import termios
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager

import torch

from shardwise.comm.frames import (
    FORMAT,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    ChannelVerdict,
    FrameKind,
    Header,
    Status,
    frame,
)
from shardwise.comm.shared_memory import SharedSegment, map_segment

READ_BYTES = 64 << 10
_MAX_DESCRIPTORS = 8
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
_MAX_BUFFERS = 32
"""Entries of a queue that are given to the kernel with one call; small frames often wait in numbers."""

_KINDS = frozenset(map(int, FrameKind))
_LINGER_LOOK_UP_SECONDS = 0.01

Payload = bytes | memoryview
Taker = Callable[["PeerLink", Header, Payload], None]


class _Outgoing:
    """Bytes that wait for room in the socket, perhaps with a descriptor, or a function to call when they have left."""

    __slots__ = ("begun", "content", "descriptor", "on_sent", "whole")

    def __init__(
        self, content: Payload, *, descriptor: int | None, whole: bool, on_sent: Callable[[], None] | None
    ) -> None:
        self.content = memoryview(content)
        self.descriptor = descriptor
        self.on_sent = on_sent
        self.whole = whole  # the start of a frame, not the payload of the one before
        self.begun = False


class PeerLink:
    """The connection to world rank `rank`; `local` when descriptors can pass and memory is shared."""

    def __init__(self, connection: socket.socket, *, rank: int, local: bool) -> None:
        # A rank that blocked in a write would not read meanwhile, and two such ranks would wait for each other.
        connection.setblocking(False)
        self.rank = rank
        self.local = local
        self.ended = False
        """The other side has closed the connection, on purpose or by dying."""
        self.said_bye = False
        self.garbled = ""
        """What came that is no frame of ours; nothing more is read then."""
        self.has_failed = False
        """The other side has sent its verdict and sends nothing more."""
        self.texts: dict[int, str] = {}
        """Digest to text, for the signatures that the other side has used."""
        self.status: Status | None = None
        """Where the other side waits, if it has said so since its last message."""
        self.last_digest: int | None = None
        self.last_heard = time.monotonic()
        self._connection = connection
        self._said_last = False
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        # What the other side knows by now: signatures, segments of ours. What this side has mapped of its segments.
        self._sent_digests: set[int] = set()
        self._announced: set[int] = set()
        self._mapped: dict[int, torch.Tensor] = {}
        # Descriptors come with the first byte of the frame that announces them, so both are in the same order.
        self._descriptors: collections.deque[int] = collections.deque()
        # What has been read beyond the last whole frame: a part of a header, or a payload that is filled in place.
        self._rest = b""
        self._partial: tuple[Header, memoryview] | None = None
        self._num_filled = 0

    def fileno(self) -> int:
        """For poll."""
        return self._connection.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._outgoing)

    def put(
        self,
        content: Payload,
        *,
        whole: bool = True,
        descriptor: int | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a frame (`whole`) or the payload of the frame queued before; its memory is the queue's until sent."""
        # No error: that the other side has gone shows when this rank waits for it, where it can be said why.
        if not (self.ended or self._said_last):
            self._outgoing.append(_Outgoing(content, whole=whole, descriptor=descriptor, on_sent=on_sent))

    def put_last(self, content: Payload) -> None:
        """Queue a frame before all that has not begun to leave, which is dropped, as is all that is queued later."""
        self.drop_queue()
        self.put(content)
        self._said_last = True

    def tell_signature(self, digest: int, text: str) -> bool:
        """Queue the text of a digest before its first use; whether this was the first."""
        if digest in self._sent_digests:
            return False
        self._sent_digests.add(digest)
        self.put(frame(FrameKind.SIGNATURE, digest=digest, payload=text.encode()))
        return True

    def tell_segment(self, segment: SharedSegment) -> None:
        """Queue the descriptor of a segment before its first use."""
        if segment.number not in self._announced:
            self._announced.add(segment.number)
            announcement = frame(FrameKind.SEGMENT, segment=segment.number, total=segment.num_bytes)
            # The queue gets a descriptor of its own: the segment may be gone before there is room in the socket.
            self.put(announcement, descriptor=os.dup(segment.descriptor))

    def forget_segment(self, number: int) -> None:
        """Queue the end of a segment of ours."""
        if number in self._announced:
            self._announced.remove(number)
            self.put(frame(FrameKind.RELEASE, segment=number))

    def flush(self) -> None:
        """Write as much of the queue as the socket takes now."""
        while self._outgoing and not self.ended:
            first = self._outgoing[0]
            try:
                if first.descriptor is not None:
                    # On its own: the descriptor goes with the first byte of the call, which has to be that of its
                    # frame.
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [first.descriptor]))]
                    num_sent = self._connection.sendmsg([first.content], rights)
                    os.close(first.descriptor)
                    first.descriptor = None
                elif len(self._outgoing) == 1:
                    num_sent = self._connection.send(first.content)
                else:
                    num_sent = self._connection.sendmsg(self._plain_buffers())
            except BlockingIOError:
                return
            except OSError:
                # The reading side says what became of the peer; what it sent before its end has not been read yet.
                self.drop_queue()
                return
            self._advance_queue(num_sent)

    def _plain_buffers(self) -> list[memoryview]:
        buffers: list[memoryview] = []
        for outgoing in self._outgoing:
            if outgoing.descriptor is not None or len(buffers) == _MAX_BUFFERS:
                break
            buffers.append(outgoing.content)
        return buffers

    def _advance_queue(self, num_sent: int) -> None:
        while self._outgoing:
            first = self._outgoing[0]
            first.begun = True
            if num_sent < len(first.content):
                first.content = first.content[num_sent:]
                return
            num_sent -= len(first.content)
            self._outgoing.popleft()
            if first.on_sent is not None:
                first.on_sent()
            if not num_sent:
                return

    def drop_queue(self) -> None:
        """Forget the frames that have not begun to leave, so that the next one goes out soon."""
        # A frame that is cut would make the reader take what follows for its payload.
        kept: collections.deque[_Outgoing] = collections.deque()
        if self._outgoing and not self.ended and (self._outgoing[0].begun or not self._outgoing[0].whole):
            kept.append(self._outgoing.popleft())
            while self._outgoing and not self._outgoing[0].whole:
                kept.append(self._outgoing.popleft())
        for outgoing in self._outgoing:
            if outgoing.descriptor is not None:
                os.close(outgoing.descriptor)
        self._outgoing = kept

    def receive(self, take: Taker) -> None:
        """Read what has come, up to about one chunk, and give each whole frame to `take`."""
        # Not until the socket is empty: one rank that sends without end would keep this rank from all others.
        if self._partial is not None:
            self._fill(take)
            return
        try:
            content, rights, _, _ = self._connection.recvmsg(READ_BYTES, _DESCRIPTOR_SPACE)
        except BlockingIOError:
            return
        except OSError:
            # A reset, as from a killed process of another host, is an end like any other. The switchboard judges it.
            self._end()
            return
        for level, kind, packed in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(packed[: len(packed) - len(packed) % received.itemsize])
                self._descriptors.extend(received)
        # No bytes mean that the other side has closed. It said BYE before, or died.
        if not content:
            self._end()
            return
        self._split(self._rest + content if self._rest else content, take)

    def refuse(self, what: str) -> None:
        """The other side has sent what cannot be understood: nothing more is taken from it."""
        self.garbled = self.garbled or what
        self._end()

    def _end(self) -> None:
        self.ended = True
        self.drop_queue()

    def _split(self, content: bytes, take: Taker) -> None:
        position = 0
        while len(content) - position >= HEADER_BYTES:
            header: Header = FORMAT.unpack_from(content, position)
            start, length = position + HEADER_BYTES, header[-1]
            if header[0] not in _KINDS or length > MAX_PAYLOAD_BYTES:  # before memory is taken for it
                self.refuse(f"a frame of kind {header[0]} and {length} bytes")
                return
            if start + length > len(content):
                # Payloads that are cut by the end of the read are received in place, without a further copy.
                body = torch.empty(length, dtype=torch.uint8).numpy().data
                self._num_filled = len(content) - start
                body[: self._num_filled] = content[start:]
                self._partial = (header, body)
                self._rest = b""
                return
            position = start + length
            take(self, header, content[start:position])
            if self.garbled:
                return
        self._rest = content[position:]

    def _fill(self, take: Taker) -> None:
        assert self._partial is not None
        header, body = self._partial
        # Never beyond the payload: so no byte of a SEGMENT frame is read here, whose descriptor would be lost.
        try:
            num_read = self._connection.recv_into(body[self._num_filled :])
        except BlockingIOError:
            return
        except OSError:
            num_read = 0
        if not num_read:
            self._end()
            return
        self._num_filled += num_read
        if self._num_filled == len(body):
            self._partial = None
            take(self, header, body)

    def map_announced(self, number: int, num_bytes: int) -> None:
        """Map the segment whose descriptor came with its announcement."""
        self._mapped[number] = map_segment(self._descriptors.popleft(), num_bytes)

    def unmap(self, number: int) -> None:
        """Forget a segment of the other side."""
        self._mapped.pop(number, None)

    def shared(self, segment: int, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes in a segment of the other side."""
        return self._mapped[segment][start : start + num_bytes]

    def linger(self, deadline: float) -> None:
        """Let the other host take what was written; closing TCP over unread input would throw it away."""
        if self.local or self.ended:
            return
        # Three steps: say that nothing more comes, wait until the other host has acknowledged what was sent, and read
        # all that it sent meanwhile. A close over unread bytes is a reset, upon which the other host drops what it has
        # not read yet: the last messages, and the reason for the end.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(_LINGER_LOOK_UP_SECONDS)
            while self._num_unacknowledged_bytes() and time.monotonic() < deadline:
                with contextlib.suppress(TimeoutError):
                    if not self._connection.recv(READ_BYTES):
                        return
            self._connection.setblocking(False)
            while self._connection.recv(READ_BYTES):
                pass

    def _num_unacknowledged_bytes(self) -> int:
        # The kernel of this host knows what the other one has acknowledged. (Linux; elsewhere an OSError ends the
        # wait.)
        count = array.array("i", [0])
        fcntl.ioctl(self._connection, termios.TIOCOUTQ, count)
        return count[0]

    def close(self) -> None:
        """Close the connection and unmap the other side's memory."""
        self.ended = True
        self.drop_queue()
        self._connection.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._mapped.clear()


def flush_until(deadline: float, links: Collection[PeerLink]) -> None:
    """Write until every queue is empty or the deadline has passed."""
    while True:
        poll = select.poll()
        is_empty = True
        for link in links:
            link.flush()
            if link.wants_to_write:
                poll.register(link.fileno(), select.POLLOUT)
                is_empty = False
        left = deadline - time.monotonic()
        if is_empty or left <= 0:
            return
        poll.poll(left * 1000)


def stuck(awaited: int, links: Mapping[int, PeerLink], *, own_rank: int, timeout_seconds: float) -> ChannelVerdict:
    """The verdict on the rank at the end of the chain of waiting ranks that begins with `awaited`.

    Each rank that waits for a while says so to all (STATUS). With these, rank 0 of 4 follows the chain::

        0 --waits for--> 1 --waits for--> 2 --waits for--> 3, which has said nothing: rank 3 made no progress

    That rank 1 did not answer is true, but rank 3 is where to look for the cause.
    """
    culprit = awaited
    chain = []
    passed = {own_rank}  # where ranks wait in a circle the walk ends before it comes round
    while (status := links[culprit].status) is not None:
        passed.add(culprit)
        following = [rank for rank in status.awaited if rank not in passed]
        if not following:
            break
        chain.append(f"rank {culprit} waits for rank {following[0]} in {status.operation} for {status.purpose!r}")
        culprit = following[0]
    seen = "; ".join([_last_seen(links[culprit]), *chain])
    return ChannelVerdict(fact=f"rank {culprit} made no progress for {timeout_seconds:g} s ({seen})", culprit=culprit)


def _last_seen(link: PeerLink) -> str:
    if link.status is not None:
        awaited = ", ".join(map(str, link.status.awaited))
        return f"it waits for rank {awaited} in {link.status.operation} for {link.status.purpose!r}"
    if link.last_digest is None:
        return "it has made no call yet"
    return f"last seen in {link.texts[link.last_digest]}, {time.monotonic() - link.last_heard:.0f} s ago"


_LOOK_UP_SECONDS = 0.5


class Flusher:
    """One thread, started when first needed, that empties the queues of the links between the calls.

    Without it a peer would wait for a message, or for a slot, until this rank makes its next call. It only writes: what
    comes in is for the calls. It takes `lock`, which calls hold, whenever it touches a link.
    """

    def __init__(self, lock: AbstractContextManager[bool], links: Collection[PeerLink]) -> None:
        self._lock = lock
        self._links = links
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def wake(self) -> None:
        """There are queues to empty. The caller holds the lock."""
        if self._thread is None:
            # A daemon: a program that forgets `close` must end all the same.
            self._thread = threading.Thread(target=self._run, name="shardwise flusher", daemon=True)
            self._thread.start()
        self._work.set()

    def stop(self) -> None:
        """End the thread soon. The caller holds the lock."""
        self._stopped = True
        self._work.set()

    def _run(self) -> None:
        while True:
            self._work.wait()
            with self._lock:
                if self._stopped:
                    return
                poll = select.poll()
                self._work.clear()
                for link in self._links:
                    link.flush()
                    if link.wants_to_write:
                        poll.register(link.fileno(), select.POLLOUT)
                        self._work.set()
            # Outside the lock, which a call may want; a socket that has room by then is found writable at once.
            if self._work.is_set():
                # A link that is closed meanwhile ends the poll as well.
                poll.poll(_LOOK_UP_SECONDS * 1000)
