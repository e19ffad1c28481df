"""One connection to one other rank: frames out of a queue that never blocks, frames in as they come.

Sockets do not block and writers never wait. Bytes that the socket does not take stay in the queue of its link. The next
call writes them, or between calls the `Flusher`::

    put(CHUNK)                           put(SEGMENT, descriptor=9)   put(CREDIT)
    [ header, payload, 0.7 of it out ]   [ SEGMENT + descriptor 9 ]   [ CREDIT ]
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
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import torch

from shardwise.comm.process.frames import (
    FORMAT,
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameKind,
    Header,
    frame,
)
from shardwise.comm.process.shared_memory import SharedSegment, map_segment

READ_BYTES = 64 << 10
_MAX_DESCRIPTORS = 8
_MAX_WAITING_DESCRIPTORS = 64
"""Descriptors that have come before their frames, which at most one read of the socket separates."""
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
_MAX_BUFFERS = 32
"""Entries of a queue that are given to the kernel with one call; small frames often wait in numbers."""

_KINDS = frozenset(map(int, FrameKind))
_LINGER_LOOK_UP_SECONDS = 0.01

Payload = bytes | memoryview
Taker = Callable[["PeerLink", Header, Payload], None]


class _Outgoing:
    """A frame that waits for room in the socket, perhaps with a descriptor."""

    __slots__ = ("begun", "buffers", "descriptor")

    def __init__(self, buffers: Sequence[Payload], *, descriptor: int | None) -> None:
        self.buffers = [memoryview(each) for each in buffers]
        self.descriptor = descriptor
        self.begun = False


class PeerLink:
    """The connection to world rank `rank`; `local` when descriptors can pass and memory is shared.

    Frames may be queued before there is a connection, which comes later (`attach`).
    """

    def __init__(self, connection: socket.socket | None = None, *, rank: int, local: bool) -> None:
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
        self.queued: set[PeerLink] = set()
        """Where this link is as long as it may have to write; one for all links of a board."""
        self._socket: socket.socket | None = None
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
        if connection is not None:
            self.attach(connection)

    def attach(self, connection: socket.socket) -> None:
        """Here is the connection: what is queued can leave."""
        # A rank that blocked in a write would not read meanwhile, and two such ranks would wait for each other.
        connection.setblocking(False)
        self._socket = connection
        if self._outgoing:
            self.queued.add(self)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, or was one."""
        return self._socket is not None

    @property
    def _connection(self) -> socket.socket:
        assert self._socket is not None, "nothing is read or written without a connection"
        return self._socket

    def fileno(self) -> int:
        """For poll."""
        return self._connection.fileno()

    @property
    def own_address(self) -> str:
        """Of this host, on the way to the other side; empty where there is no connection. Needs no lock."""
        with contextlib.suppress(OSError):  # closed meanwhile
            if self._socket is not None:
                name = self._socket.getsockname()
                return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"
        return ""

    @property
    def wants_to_write(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._outgoing)

    def put(
        self,
        content: Payload,
        *more: Payload,
        descriptor: int | None = None,
    ) -> None:
        """Queue a frame, in one buffer or in several; their memory is the queue's until sent."""
        # No error: that the other side has gone shows when this rank waits for it, where it can be said why.
        if not (self.ended or self._said_last):
            self._outgoing.append(_Outgoing((content, *more), descriptor=descriptor))
            self.queued.add(self)

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

    def knows_signature(self, digest: int) -> bool:
        """Whether the other side knows the text of a digest."""
        return digest in self._sent_digests

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
        while self._outgoing and self.is_connected and not self.ended:
            first = self._outgoing[0]
            try:
                if first.descriptor is not None:
                    # On its own: the descriptor goes with the first byte of the call, which has to be that of its
                    # frame.
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [first.descriptor]))]
                    num_sent = self._connection.sendmsg(first.buffers, rights)
                    os.close(first.descriptor)
                    first.descriptor = None
                elif len(self._outgoing) == len(first.buffers) == 1:
                    num_sent = self._connection.send(first.buffers[0])
                else:
                    num_sent = self._connection.sendmsg(self._plain_buffers())
            except BlockingIOError:
                return
            except OSError:
                # The reading side says what became of the peer; what it sent before its end has not been read yet.
                # No part of a frame is kept: a poll for room in this socket would return at once, without end.
                self._said_last = True
                self.drop_queue(keeps_begun=False)
                return
            self._advance_queue(num_sent)

    def _plain_buffers(self) -> list[memoryview]:
        buffers: list[memoryview] = []
        for outgoing in self._outgoing:
            if outgoing.descriptor is not None or len(buffers) >= _MAX_BUFFERS:
                break
            buffers += outgoing.buffers
        return buffers

    def _advance_queue(self, num_sent: int) -> None:
        while self._outgoing:
            first = self._outgoing[0]
            first.begun = True
            while first.buffers and num_sent >= len(first.buffers[0]):
                num_sent -= len(first.buffers.pop(0))
            if first.buffers:
                first.buffers[0] = first.buffers[0][num_sent:]
                return
            self._outgoing.popleft()
            if not num_sent:
                return

    def drop_queue(self, *, keeps_begun: bool = True) -> None:
        """Forget the frames that have not begun to leave, so that the next one goes out soon."""
        # A frame that is cut would make the reader take what follows for its payload.
        kept: collections.deque[_Outgoing] = collections.deque()
        keeps_begun &= bool(self._outgoing) and not self.ended
        if keeps_begun and self._outgoing[0].begun:
            kept.append(self._outgoing.popleft())
        for outgoing in self._outgoing:
            if outgoing.descriptor is not None:
                os.close(outgoing.descriptor)
        self._outgoing = kept

    def receive(self, take: Taker) -> None:
        """Read what has come, up to about one chunk, and give each whole frame to `take`."""
        if self.ended:
            return
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
        if len(self._descriptors) > _MAX_WAITING_DESCRIPTORS:
            self.refuse(f"{len(self._descriptors)} descriptors without their frames")
            return
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
        """Bytes in a segment of the other side. Raises LookupError where it has none there."""
        memory = self._mapped[segment]
        if not 0 <= start <= start + num_bytes <= len(memory):
            raise IndexError(f"bytes {start} to {start + num_bytes} of a segment of {len(memory)}")
        return memory[start : start + num_bytes]

    def linger(self, deadline: float) -> None:
        """Let the other host take what was written; closing TCP over unread input would throw it away."""
        if self.local or self.ended or not self.is_connected:
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
        if self._socket is not None:
            self._socket.close()
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
            if link.wants_to_write and link.is_connected:
                poll.register(link.fileno(), select.POLLOUT)
                is_empty = False
        left = deadline - time.monotonic()
        if is_empty or left <= 0:
            return
        poll.poll(left * 1000)


_LOOK_UP_SECONDS = 0.5


class Flusher:
    """One thread, started when first needed, that empties the queues of the links between the calls.

    Without it a peer would wait for a message, or for a slot, until this rank makes its next call. It only writes: what
    comes in is for the calls. It takes `lock`, which calls hold, whenever it touches a link.
    """

    def __init__(
        self, lock: AbstractContextManager[bool], links: Collection[PeerLink], welcome: Callable[[], None]
    ) -> None:
        """welcome: called with the lock; gives their connections to links that have waited for them."""
        self._lock = lock
        self._links = links
        self._welcome = welcome
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        """The thread will be needed. The caller holds the lock."""
        if self._thread is None:
            # A daemon: a program that forgets `close` must end all the same.
            self._thread = threading.Thread(target=self._run, name="shardwise flusher", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """There are queues to empty. The caller holds the lock."""
        self.start()
        self._work.set()

    def ring(self) -> None:
        """A connection has come, for which queues may wait. From any thread, without the lock."""
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
                self._welcome()
                for link in self._links:
                    link.flush()
                    if link.wants_to_write and link.is_connected:
                        poll.register(link.fileno(), select.POLLOUT)
                        self._work.set()
            # Outside the lock, which a call may want; a socket that has room by then is found writable at once.
            if self._work.is_set():
                # A link that is closed meanwhile ends the poll as well.
                poll.poll(_LOOK_UP_SECONDS * 1000)
