"""Messages in chunks of 1 MiB within a host and 4 MiB beyond, and the transfers of one call that they make up.

A call becomes one `TransferInFlight`: some `Outbound` messages and one intake, which takes `Inbound` messages to where
their bytes belong. The bytes of a message travel in one of four ways::

    message                     where the bytes are             the tensor is the caller's again
    up to 16 KiB (see below)    in the frame                    at once
    same host, lent memory      where they are (IN_PLACE)       when each reader has given CREDIT for all chunks
    same host, other memory     in slots, for all readers       when the last chunk is in a slot
    other host                  gloo sends them (BY_GLOO)       when the reader has given CREDIT for all chunks

To another host up to 512 KiB travel in the frame. Lent memory is what `Channel.allocate` gives. A message of `send`
never travels in place, and gloo sends a copy of it. Its sender may write the tensor again as soon as `wait` has
returned, and that must not depend on the receiver.

[Note: why no order of calls can deadlock] Every message holds back its sender at most for itself: it has its own window
of chunks, and when it has no chunk on its way, the slot pool grows instead of refusing one. So the first unconsumed
chunk of every message always arrives, whatever other messages wait for, and a transfer depends on no transfer but
itself. `send` goes further: it publishes the whole message at once. So two ranks may both send first, and the receiver
needs nothing more from the sender.
"""

import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.comm.channel import Signature
from shardwise.comm.digests import number_of
from shardwise.comm.process.frames import (
    ASKS,
    BY_GLOO,
    GLOO_CHUNK_BYTES,
    IN_PLACE,
    IN_SLOT,
    PLACE,
    FrameKind,
    Header,
    frame,
)
from shardwise.comm.process.gloo_pairs import GlooPair, GlooPairs
from shardwise.comm.process.link import Payload, PeerLink
from shardwise.comm.process.shared_memory import BASE_SLOTS, SLOT_BYTES, SlotPool

INLINE_BYTES = 16 << 10
"""Messages up to this size travel in the frame: two copies by the kernel cost less than a slot and its return."""

INLINE_BYTES_BETWEEN_HOSTS = 512 << 10
"""The same between hosts. Up to this size gloo takes twice the processor time (measured), mostly to wake threads."""

_MOST_AHEAD = 4
"""Chunks of one message that gloo is asked for ahead, where they need memory until they are used."""

_MIN_WINDOW = 2
"""Chunks of one message under way at least: one to be read while the next is copied."""

_GLOO_WINDOW = BASE_SLOTS * SLOT_BYTES // GLOO_CHUNK_BYTES
"""Chunks of gloo under way for all messages of a call: as many bytes as there are in slots. Where all chunks of all are
under way at once, some connections of a link get ahead, and a sum waits for the last ones.
"""

_GROWTH_SLOTS = 4
"""Slots of the segment that a message without a free slot adds: it needs one, and will soon need the next."""


def fits_in_frame(num_bytes: int, *, local: bool) -> bool:
    """Whether a message travels in its frame, to a rank of this host (`local`) or of another one."""
    return num_bytes <= (INLINE_BYTES if local else INLINE_BYTES_BETWEEN_HOSTS)


def bytes_of_chunk(num_bytes_left: int, *, local: bool) -> int:
    """Of the next chunk of a message, to a rank of this host (`local`) or of another one."""
    return min(SLOT_BYTES if local else GLOO_CHUNK_BYTES, num_bytes_left)


def window(num_messages: int, *, by_gloo: bool) -> int:
    """How many chunks of one of so many messages may be under way."""
    return max(_MIN_WINDOW, (_GLOO_WINDOW if by_gloo else BASE_SLOTS) // num_messages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """A signature as it travels: 64 bits with every message, the text once per link."""

    digest: int
    text: str

    @classmethod
    def of(cls, signature: Signature) -> "Stamp":
        """The stamp of a call; equal for the `send` and the `receive` that fit."""
        # Not `hash`: Python seeds it anew in every process.
        digest = number_of(repr(signature.compared))
        return cls(digest=digest, text=str(signature))


class MessageChunk:
    """A part of a message that has arrived; `consumed` lets the sender use its place again."""

    __slots__ = ("_acknowledgement", "content", "link", "offset")

    is_here = True
    """Whether its bytes are here, and not only its frame."""

    def __init__(self, link: PeerLink, offset: int, content: torch.Tensor | Payload, acknowledgement: bytes) -> None:
        self.offset = offset
        self.content = content
        self.link = link
        self._acknowledgement = acknowledgement

    def fetch(self, target: torch.Tensor | None) -> None:
        """Have its bytes brought here, once; into their place in `target`, memory of the whole message, if given."""

    def tensor(self) -> torch.Tensor:
        """The content as flat bytes."""
        if isinstance(self.content, torch.Tensor):
            return self.content
        # torch warns of memory that it may not write, and the payload of a frame that came whole is `bytes`.
        writable = self.content if isinstance(self.content, memoryview) else bytearray(self.content)
        return torch.frombuffer(writable, dtype=torch.uint8) if len(writable) else torch.empty(0, dtype=torch.uint8)

    def consumed(self) -> None:
        """The content has been read and is not touched again."""
        # From here on the sender may overwrite the bytes: a reader copies what it needs before.
        if self._acknowledgement:
            self.link.put(self._acknowledgement)


class GlooChunk(MessageChunk):
    """A part of a message whose bytes come through gloo, once they are asked for."""

    __slots__ = ("_memory", "_num_bytes", "_pair", "_tag", "is_here")

    def __init__(
        self, link: PeerLink, offset: int, acknowledgement: bytes, *, pair: GlooPair, tag: int, num_bytes: int
    ) -> None:
        super().__init__(link, offset, b"", acknowledgement)
        self._pair = pair
        self._tag = tag
        self._num_bytes = num_bytes
        self._memory: torch.Tensor | None = None
        self.is_here = False

    def fetch(self, target: torch.Tensor | None) -> None:
        """See `MessageChunk`."""
        if target is None:
            self._memory = self._pair.pairs.take_memory()
            self.content = self._memory[: self._num_bytes]
        else:
            self.content = target[self.offset : self.offset + self._num_bytes]
        self._pair.receive(self._tag, self.content, self._arrive)

    def consumed(self) -> None:
        """See `MessageChunk`."""
        super().consumed()
        if self._memory is not None:
            self._pair.pairs.give_memory(self._memory)
            self._memory = None

    def _arrive(self) -> None:
        self.is_here = True


def chunk_of(link: PeerLink, header: Header, payload: Payload, num_bytes: int, pairs: GlooPairs | None) -> MessageChunk:
    """The chunk that a frame brings. Raises LookupError, ValueError or struct.error where it can bring none."""
    # The reply is made here, with the frame that it answers at hand, and sent when the chunk is consumed.
    _, flags, segment, slot, lane, _, offset, _, number, _ = header
    if flags & IN_SLOT:
        content = link.shared(segment, slot * SLOT_BYTES, num_bytes)
        return MessageChunk(link, offset, content, frame(FrameKind.CONSUMED, segment=segment, slot=slot))
    credit = frame(FrameKind.CREDIT, lane=lane, number=number)
    if flags & IN_PLACE:
        (start,) = PLACE.unpack(payload)
        return MessageChunk(link, offset, link.shared(segment, start, num_bytes), credit)
    if flags & BY_GLOO:
        (tag,) = PLACE.unpack(payload)
        return GlooChunk(link, offset, credit, pair=_pair_of(link, pairs), tag=tag, num_bytes=num_bytes)
    return MessageChunk(link, offset, payload, b"")


def _pair_of(link: PeerLink, pairs: GlooPairs | None) -> GlooPair:
    if pairs is None or link.local:
        raise ValueError("gloo moves nothing between ranks that share memory")
    pair = pairs.pair(link.rank, lambda: link.own_address)
    pair.open()  # while the other side does, although the message may be expected much later
    return pair


class Inbound:
    """A message from one rank: a call expects it and frames bring it, in either order."""

    __slots__ = (
        "asked",
        "chunks",
        "digest",
        "expected",
        "has_arrived",
        "is_refused",
        "lane",
        "num_arrived",
        "num_fetched",
        "num_received",
        "number",
        "source",
        "total",
    )

    def __init__(self, source: int, lane: int, number: int) -> None:
        self.source = source
        self.lane = lane
        self.number = number
        # The call sets `expected`, the first frame `digest` and `total`. They are compared when both are there.
        self.expected: Stamp | None = None
        self.digest: int | None = None
        self.total = -1
        self.num_arrived = 0
        self.num_fetched = 0  # of the chunks that have come and are not taken
        self.num_received = 0
        self.asked = False
        self.has_arrived = False
        self.is_refused = False
        self.chunks: collections.deque[MessageChunk] = collections.deque()

    def check_next(self, *, digest: int, offset: int, total: int, num_bytes: int, local: bool) -> None:
        """Raise ValueError for a chunk that is not the next one of this message, cut as every rank cuts it."""
        if self.has_arrived or (self.digest is not None and (self.digest, self.total) != (digest, total)):
            raise ValueError("a chunk of another message")
        if offset != self.num_arrived or num_bytes != bytes_of_chunk(total - offset, local=local):
            raise ValueError(f"{num_bytes} of {total} bytes at {offset}, after {self.num_arrived}")

    def add(self, chunk: MessageChunk, num_bytes: int) -> None:
        """Take in the next chunk."""
        self.chunks.append(chunk)
        self.num_arrived += num_bytes
        self.has_arrived = self.num_arrived == self.total

    def fits(self, num_bytes: int, itemsize: int = 1, *, target: torch.Tensor | None = None) -> bool:
        """Whether there is a chunk to take, of a message of so many bytes; else its sender is refused.

        target: where the bytes of the message belong; by default they get new memory.
        """
        if not self.chunks:
            return False
        first = self.chunks[0]
        start = first.content.storage_offset() if isinstance(first.content, torch.Tensor) and target is None else 0
        if self.total == num_bytes and start % itemsize == 0:
            return self.is_next_here(target)
        first.link.refuse(f"{self.total} bytes at {start} for {num_bytes} in items of {itemsize}")
        self.refuse()
        return False

    def is_next_here(self, target: torch.Tensor | None = None) -> bool:
        """Whether there is a chunk whose bytes are here; those that follow are asked for."""
        limit = _MOST_AHEAD if target is None else len(self.chunks)
        for chunk in itertools.islice(self.chunks, self.num_fetched, limit):
            chunk.fetch(target)
            self.num_fetched += 1
        return bool(self.chunks) and self.chunks[0].is_here

    def take(self) -> MessageChunk:
        """The next chunk; the caller consumes it."""
        chunk = self.chunks.popleft()
        self.num_fetched -= 1
        self.num_received += len(chunk.content)
        return chunk

    @property
    def is_complete(self) -> bool:
        """Whether every byte has been taken."""
        return self.num_received == self.total and not self.is_refused

    def refuse(self) -> None:
        """It is not what was expected: nothing of it is delivered, so the call that waits for it never completes."""
        # Chunks are dropped without an acknowledgement: the channel ends with this message, for the sender too.
        self.is_refused = True
        self.chunks.clear()


class Outbound:
    """One message to one rank, or the same message to several ranks that share memory with this one."""

    def __init__(
        self,
        source: torch.Tensor,
        targets: list[tuple[PeerLink, int]],
        *,
        lane: int,
        stamp: Stamp,
        pool: SlotPool,
        window: int,
        buffered: bool,
        constant: bool = False,
        passed_on: bool = False,
        pairs: GlooPairs | None = None,
    ) -> None:
        """constant: no one writes to the source again. passed_on: the source is still to come (`has_come`). pairs: for
        a message to one rank of another host that does not fit into a frame."""
        self.targets = targets
        self.lane = lane
        self.num_on_the_way = 0
        """Chunks published and not yet consumed."""
        self.answered = True
        """False until the receiver of a first message of its signature has matched it, or waits elsewhere."""
        self.total = source.numel()  # `len` of a tensor costs three times as much
        self._source = source
        self._digest = stamp.digest
        self._pool = pool
        self._window = window
        self._buffered = buffered
        self._constant = constant
        self._num_published = 0
        self._num_here = 0 if passed_on else self.total
        self._pair = None if pairs is None else _pair_of(targets[0][0], pairs)
        self._tags: collections.deque[int] = collections.deque()
        self._begun = False
        for link, _ in targets:
            # A collective finds out about a difference by itself: each rank waits for messages of all others. The
            # sender of a `send` waits for nobody, and would go on with a wrong program. So the first message of each
            # signature on a link asks for an answer, and only later ones are free.
            if link.tell_signature(stamp.digest, stamp.text) and buffered:
                self.answered = False
        self._flags = 0 if self.answered else ASKS
        is_local = targets[0][0].local
        self._is_inline = fits_in_frame(self.total, local=is_local)
        self._place = pool.locate(source) if is_local and not buffered and not self._is_inline else None
        self.is_credited = not self._is_inline and (self._place is not None or not is_local)
        """Whether readers acknowledge by the message, not by the slot."""
        # A credit names its message, which has one number per reader. A slot frees itself, for all readers together.
        self._num_unread = dict.fromkeys((link.rank for link, _ in targets), 0)
        """Chunks in place or of gloo that a reader has not consumed yet."""
        self._copy: Callable[[], bool] = self._put_by_gloo
        if is_local:
            self._copy = self._put_in_slot if self._place is None else self._put_in_place

    @property
    def is_published(self) -> bool:
        """Whether the source tensor is not needed any more; a buffered message has its own."""
        is_out = self._begun and self._num_published == self.total
        return is_out and (self._buffered or not any(self._num_unread.values()))

    @property
    def awaited(self) -> list[int]:
        """The ranks whose reading or answer this message waits for."""
        if self.is_published and self.answered:
            return []
        unread = [rank for rank, num_chunks in self._num_unread.items() if num_chunks]
        if not unread and not self._is_next_here():
            return []  # the intake of its transfer waits for it
        return unread or [link.rank for link, _ in self.targets]

    def has_come(self, num_bytes: int) -> None:
        """So much of the source is here, which another rank sends: it may be passed on."""
        self._num_here = num_bytes

    def _is_next_here(self) -> bool:
        return min(self._num_published + SLOT_BYTES, self.total) <= self._num_here

    def credit(self, rank: int) -> bool:
        """A reader has consumed a chunk; whether this was its last. Raises ValueError where it has read them all."""
        if not self._num_unread[rank]:
            raise ValueError("no chunk is on its way")
        self.num_on_the_way -= 1
        self._num_unread[rank] -= 1
        if self._pair is not None:
            self._pair.release(self._tags.popleft())
        return self._num_published == self.total and not self._num_unread[rank]

    def advance(self) -> bool:
        """Publish as many chunks as there is room for; whether there were any."""
        # `_begun` and not the number of bytes: a message may be empty, and is sent all the same.
        if self._begun and self._num_published == self.total:
            return False
        if self._is_inline:
            self._put_inline()
            return True
        moved = False
        while self._num_published < self.total and self._is_next_here() and self._copy():
            moved = True
            # After every chunk: a reader copies the first while this rank copies the second.
            for link, _ in self.targets:
                link.flush()
        return moved

    def _header(self, number: int, *, flags: int = 0, segment: int = 0, slot: int = 0, length: int = 0) -> bytes:
        return frame(
            FrameKind.CHUNK,
            flags=flags | (0 if self._begun else self._flags),
            segment=segment,
            slot=slot,
            lane=self.lane,
            digest=self._digest,
            offset=self._num_published,
            total=self.total,
            number=number,
            length=length,
        )

    def _put_inline(self) -> None:
        content = self._source.numpy().data
        for link, number in self.targets:
            header = self._header(number, length=self.total)
            if self._constant:
                link.put(header, content)
            else:
                link.put(b"".join((header, content)))  # a copy, so that the tensor is the caller's again at once
            link.flush()
        self._begun = True
        self._num_published = self.total

    def _put_in_slot(self) -> bool:
        num_left = -(-(self.total - self._num_published) // SLOT_BYTES)
        # How far the pool may grow for this chunk. A buffered message leaves as a whole, whatever its size. Another one
        # stays within its window, and grows the pool only for its first chunk: then it always moves (see the note).
        if self._buffered:
            grow = num_left
        elif self.num_on_the_way < self._window:
            grow = 0 if self.num_on_the_way else _GROWTH_SLOTS
        else:
            return False
        slot = self._pool.take(grow=grow)
        if slot is None:
            return False
        num_bytes = min(SLOT_BYTES, self.total - self._num_published)
        slot.memory[:num_bytes].copy_(self._source[self._num_published : self._num_published + num_bytes])
        # The order matters: the frame is queued after the copy, and a reader looks at a slot only after its frame. The
        # socket between them orders the two, so that the memory needs no lock and no atomic counter.
        slot.readers = {link.rank for link, _ in self.targets}
        slot.outbound = self
        for link, number in self.targets:
            link.tell_segment(slot.segment)
            link.put(self._header(number, flags=IN_SLOT, segment=slot.segment.number, slot=slot.index))
        self._advanced(num_bytes)
        return True

    def _put_in_place(self) -> bool:
        assert self._place is not None
        segment, start = self._place
        # No window: nothing is copied, so chunks on their way take no memory. They are cut all the same, because the
        # sum of several messages goes on chunk by chunk.
        num_bytes = min(SLOT_BYTES, self.total - self._num_published)
        for link, number in self.targets:
            link.tell_segment(segment)
            place = PLACE.pack(start + self._num_published)
            link.put(self._header(number, flags=IN_PLACE, segment=segment.number, length=len(place)) + place)
            self._num_unread[link.rank] += 1
        self._advanced(num_bytes, num_chunks=len(self.targets))
        return True

    def _put_by_gloo(self) -> bool:
        assert self._pair is not None
        # A message of `send` is given to gloo as a whole: it needs nothing more from this rank.
        if not self._buffered and self.num_on_the_way >= self._window:
            return False
        ((link, number),) = self.targets
        num_bytes = bytes_of_chunk(self.total - self._num_published, local=False)
        content = self._source[self._num_published : self._num_published + num_bytes]
        # `send` gives the tensor back at once, but gloo reads it until the other side has received all of it. On this
        # host the slots are that copy.
        tag = self._pair.send(content, copied=self._buffered)
        self._tags.append(tag)
        place = PLACE.pack(tag)
        link.put(self._header(number, flags=BY_GLOO, length=len(place)) + place)
        self._num_unread[link.rank] += 1
        self._advanced(num_bytes)
        return True

    def _advanced(self, num_bytes: int, *, num_chunks: int = 1) -> None:
        self._begun = True
        self._num_published += num_bytes
        self.num_on_the_way += num_chunks
        if self._num_published == self.total:
            # Transfers live in lists and dicts until their last acknowledgement, and would keep the memory alive.
            self._source = torch.empty(0, dtype=torch.uint8)


class Intake(Protocol):
    """The receiving side of a transfer."""

    def advance(self) -> bool:
        """Use the chunks that have come; whether there were any."""

    @property
    def awaited(self) -> list[int]:
        """World ranks that have not sent everything yet; empty when complete."""


class TransferInFlight:
    """A call in flight: the `Work` of the process channel. `wait` is the switchboard's, which moves all messages."""

    __slots__ = ("_intake", "_outbounds", "_wait", "signature")

    def __init__(
        self,
        signature: Signature,
        outbounds: Sequence[Outbound],
        intake: Intake | None,
        wait: Callable[["TransferInFlight"], None],
    ) -> None:
        self.signature = signature
        self._outbounds = outbounds
        self._intake = intake
        self._wait = wait

    def advance(self) -> bool:
        """Do what can be done now; whether there was anything."""
        moved = self._publish()
        if self._intake is not None and self._intake.advance():
            self._publish()  # what has come is passed on at once
            moved = True
        return moved

    def _publish(self) -> bool:
        moved = False
        for outbound in self._outbounds:
            moved |= outbound.advance()
        return moved

    @property
    def awaited(self) -> list[int]:
        """World ranks that the transfer waits for; empty when it is complete."""
        ranks = [] if self._intake is None else self._intake.awaited
        return ranks + [rank for outbound in self._outbounds for rank in outbound.awaited]

    @property
    def is_done(self) -> bool:
        """Whether the tensors are the caller's again."""
        if self._intake is not None and self._intake.awaited:
            return False
        return all(each.is_published and each.answered for each in self._outbounds)

    def wait(self) -> None:
        """See `Work.wait`."""
        self._wait(self)
