"""All connections of this process, and the loop that moves every message while a call waits for one.

Progress is made inside calls, which costs the training step nothing while it computes; only what did not fit into a
socket is written by a thread between the calls. A message is known by (rank, lane, number), on both sides without
asking: a lane is a digest of the members and the kind of call, and the numbers count the messages of a lane::

    rank 0 calls                                     lane, number      rank 1 calls
    all_gather "weights" on ranks 0 1          ----  c01, 0     ----   all_gather "weights" on ranks 0 1
    send "activation" to rank 1                ----  m01, 0     ----   receive "activation" from rank 0
    reduce_scatter "gradients" on ranks 0 1 2  ----  c012, 0    ----   reduce_scatter "gradients" ...
    all_gather "buffers" on ranks 0 1          ----  c01, 1     --/-   all_gather "weights": MismatchError on both
"""

import collections
import json
import select
import struct
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import torch

from shardwise.comm.channel import Signature
from shardwise.comm.frames import (
    ASKS,
    IN_PLACE,
    IN_SLOT,
    PLACE,
    ChannelVerdict,
    FrameKind,
    Header,
    Status,
    different,
    frame,
    garbled,
    gone,
)
from shardwise.comm.links import Flusher, Payload, PeerLink, flush_until, stuck
from shardwise.comm.messages import INLINE_BYTES, Inbound, Intake, MessageChunk, Outbound, Stamp, TransferInFlight
from shardwise.comm.shared_memory import BASE_SLOTS, SLOT_BYTES, SlotPool
from shardwise.errors import CallMismatchError, PeerError, in_words

_NUMBERS = 1 << 32
"""Messages of a lane are counted modulo this: a frame has 32 bits for the number, and never so many are under way."""

_MIN_WINDOW = 2
"""Chunks of one message under way at least: one to be read while the next is copied."""

_INTERRUPT_SECONDS = 0.5
"""How soon a Ctrl-C is noticed that comes just before the poll blocks: Python handles it when the poll returns."""

_LAST_WORDS_SECONDS = 1.0
"""How long a rank that ends tries to tell peers that do not read."""


class Switchboard:
    """Messages between this process, world rank `rank`, and every other one, over `links` by world rank.

    [Note: how a failure spreads]
    The first failure that a rank sees or hears of is its verdict for good, so that all ranks name the same culprit. A
    transfer that needs none of the ranks that are lost may still complete. The first call that cannot complete, and
    every call begun after that, raises the verdict and passes it on.
    """

    def __init__(self, rank: int, links: dict[int, PeerLink], *, timeout_seconds: float) -> None:
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.verdict: ChannelVerdict | None = None
        self._links = links
        self._pool = SlotPool()
        self._poll = select.poll()
        self._by_descriptor = {link.fileno(): link for link in links.values()}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        # Sockets are polled for room only while something waits for it: most have room all the time, and a poll for it
        # would return at once.
        self._writers: set[int] = set()
        self._stamps: dict[Signature, Stamp] = {}
        self._sent_numbers: collections.Counter[tuple[int, int]] = collections.Counter()
        self._expected_numbers: collections.Counter[tuple[int, int]] = collections.Counter()
        # By (rank, lane, number). An inbound message leaves when a call has met it and its last chunk has come.
        self._inbounds: dict[tuple[int, int, int], Inbound] = {}
        self._unanswered: dict[tuple[int, int, int], Outbound] = {}
        self._credited: dict[tuple[int, int, int], Outbound] = {}
        """Messages sent as bytes or read in place whose chunks have not all been consumed."""
        self._asking: list[Inbound] = []
        self._active: list[TransferInFlight] = []
        self._has_ended = False
        """The verdict was raised here, or this rank decided it: nothing more is sent or taken in."""
        self._raised: tuple[str, str, str] | None = None
        # Reentrant: the channel holds it over several calls of the board, such as expect and start, whose order on the
        # lanes must not be broken by another thread.
        self.lock = threading.RLock()
        """Held during every call, so that threads take turns."""
        # The flusher takes the same lock, so that it never writes into the middle of a frame of a call.
        self._flusher = Flusher(self.lock, links.values())

    # Building transfers. Messages of one lane between two ranks are matched in order; lanes do not affect each other.

    def send(
        self,
        source: torch.Tensor,
        destinations: Sequence[int],
        lane: int,
        signature: Signature,
        *,
        window_share: int = 1,
        buffered: bool = False,
    ) -> list[Outbound]:
        """Messages with the same bytes to some world ranks; `window_share` such messages share the slots."""
        stamp = self._stamp(signature)
        targets = [(self._links[rank], self._count(self._sent_numbers, lane, rank)) for rank in destinations]
        small = len(source) <= INLINE_BYTES
        # Readers on this host share one copy in a slot. A large message between hosts has a queue of its own per link.
        together = [target for target in targets if small or target[0].local]
        groups = ([together] if together else []) + [[target] for target in targets if target not in together]
        outbounds = []
        for group in groups:
            remote = not group[0][0].local
            # `send` gives the tensor back at once, but the queue of a link reads it until the socket has taken all of
            # it. On this host the slots are that copy.
            outbound = Outbound(
                source.clone() if remote and buffered and not small else source,
                group,
                lane=lane,
                stamp=stamp,
                pool=self._pool,
                window=max(_MIN_WINDOW, BASE_SLOTS // window_share),
                buffered=buffered,
            )
            key = (group[0][0].rank, lane, group[0][1])
            if not outbound.answered:
                self._unanswered[key] = outbound
            if outbound.is_credited:
                self._credited |= {(link.rank, lane, number): outbound for link, number in group}
            outbounds.append(outbound)
        return outbounds

    def expect(self, source: int, lane: int, signature: Signature) -> Inbound:
        """The next message of a lane from a world rank, compared with the signature as soon as it is there."""
        number = self._count(self._expected_numbers, lane, source)
        inbound = self._inbound(source, lane, number)
        inbound.expected = self._stamp(signature)
        self._match(inbound)
        self._forget_if_met(inbound)
        return inbound

    def start(self, signature: Signature, outbounds: Sequence[Outbound], intake: Intake | None) -> TransferInFlight:
        """Put a transfer under way and do what can be done at once."""
        transfer = TransferInFlight(signature, outbounds, intake, self.wait)
        # Peers get what there is room for now, although this rank may compute before it waits.
        transfer.advance()
        if not transfer.is_done:
            self._active.append(transfer)
        self._flush()
        self._leave()
        return transfer

    def shares_memory_with(self, ranks: Sequence[int]) -> bool:
        """Whether one of these world ranks can read the memory of this one."""
        return any(self._links[rank].local for rank in ranks)

    def shares_memory_with_all(self, ranks: Sequence[int]) -> bool:
        """Whether all of these world ranks can read the memory of this one."""
        return all(self._links[rank].local for rank in ranks)

    def tell_place(self, memory: torch.Tensor, ranks: Sequence[int]) -> bytes:
        """Let these ranks map the segment that holds lent memory; return its place in words for `memory_of`."""
        found = self._pool.locate(memory)
        assert found is not None, "lent memory is part of a segment"
        segment, start = found
        for rank in ranks:
            self._links[rank].tell_segment(segment)
        return json.dumps([segment.number, start]).encode()

    def memory_of(self, rank: int, place: bytes, num_bytes: int) -> torch.Tensor:
        """The memory of a peer at the place that its `tell_place` gave."""
        number, start = json.loads(place)
        return self._links[rank].shared(number, start, num_bytes)

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Zeroed bytes that peers on this host read in place."""
        return self._pool.lend(num_bytes)

    def check(self, signature: Signature) -> None:
        """Take in what has come; raise if the board has ended. Every call begins with it."""
        # A failure is raised by the next call, even one that could complete: the sooner all ranks stop, the less they
        # compute for nothing. It also empties the sockets now and then, on which senders may wait.
        with self.lock:
            if self.verdict is None:
                self._turn(0)
                self._note_ended()
            if self.verdict is not None:
                self._raise(signature)

    def _stamp(self, signature: Signature) -> Stamp:
        stamp = self._stamps.get(signature)
        if stamp is None:
            stamp = self._stamps[signature] = Stamp.of(signature)
        return stamp

    @staticmethod
    def _count(numbers: collections.Counter[tuple[int, int]], lane: int, rank: int) -> int:
        number = numbers[lane, rank]
        numbers[lane, rank] = (number + 1) % _NUMBERS
        return number

    # Progress.

    def wait(self, transfer: TransferInFlight) -> None:
        """Move all messages until this transfer is done; raise `PeerError` or `MismatchError` when it cannot be."""
        with self.lock:
            if not transfer.is_done:
                self._wait(transfer)
                self._leave()

    def _wait(self, transfer: TransferInFlight) -> None:
        # The deadline counts from the last chunk that moved, in any transfer: a large message may take as long as it
        # needs. Ranks tell where they wait well before it, so that the first rank at its deadline knows the chain.
        #
        #     0 s    last movement
        #     1 s    STATUS to all: I wait for rank 2 in all_gather for 'weights'
        #    60 s    verdict on the rank at the end of the chain, FAILED to all, PeerError
        last_movement = time.monotonic()
        notice_after = min(1.0, self.timeout_seconds / 4)
        has_asked = False
        while True:
            if self._has_ended or (self.verdict is not None and self._is_hopeless(transfer)):
                self._raise(transfer.signature)
            # Before the poll: the rank that asks may be the one that this rank waits for.
            self._answer_asking()
            idle = time.monotonic() - last_movement
            limit = self.timeout_seconds if has_asked else notice_after
            moved = self._turn(min(max(0.0, limit - idle), _INTERRUPT_SECONDS))
            if transfer.is_done:
                return
            # Not at once: a rank that has ended may have sent all that this transfer needs. Only one that waits for
            # such a rank gives up, at the top of the loop.
            self._note_ended()
            if self._is_hopeless(transfer):
                continue
            if moved:
                last_movement = time.monotonic()
            elif time.monotonic() - last_movement >= self.timeout_seconds:
                self._judge_stuck(transfer)
            elif not has_asked and time.monotonic() - last_movement >= notice_after:
                self._send_status(transfer)
                has_asked = True

    def _turn(self, patience_seconds: float) -> bool:
        """Wait for the sockets, read them, let every transfer go on, write; whether any transfer moved."""
        events = self._poll.poll(patience_seconds * 1000)
        if not events and patience_seconds == 0 and not self._active:
            return False
        for descriptor, _ in events:
            link = self._by_descriptor[descriptor]
            link.receive(self._take)
            if link.ended:
                # A closed socket is always readable: the poll would never wait again.
                self._poll.unregister(descriptor)
                self._writers.discard(descriptor)
        # All transfers, not only the one that is waited for: another rank may need a later one first.
        moved = False
        still_active = []
        for transfer in self._active:
            moved |= transfer.advance()
            if not transfer.is_done:
                still_active.append(transfer)
        self._active = still_active
        self._release_idle()
        self._flush()
        return moved

    def _flush(self) -> None:
        for descriptor, link in self._by_descriptor.items():
            if link.wants_to_write:
                link.flush()
            if link.wants_to_write != (descriptor in self._writers) and not link.ended:
                self._writers ^= {descriptor}
                self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if link.wants_to_write else 0))

    def _leave(self) -> None:
        """The call ends; what did not fit into the sockets is the flusher's."""
        if self._writers:
            self._flusher.wake()

    def _release_idle(self) -> None:
        for number in self._pool.release_idle():
            for link in self._links.values():
                link.forget_segment(number)

    def _answer_asking(self) -> None:
        """Answer the peers that ask, although this rank waits itself and has not called what they ask about."""
        # Two ranks that both send first, with a signature that is new, would otherwise wait for each other's answers.
        # An answer from here says less (the message is not matched yet), and a difference is then found by the
        # receiver.
        for inbound in self._asking:
            self._links[inbound.source].put(frame(FrameKind.ANSWER, lane=inbound.lane, number=inbound.number))
        self._asking.clear()
        self._flush()

    # What frames do.

    def _take(self, link: PeerLink, header: Header, payload: Payload) -> None:
        try:
            self._act(link, header, payload)
        except (LookupError, TypeError, ValueError, OSError, struct.error) as error:
            # It names what was never announced, or its text is none: not what this version would send.
            link.refuse(f"a frame of kind {header[0]} that means nothing here ({in_words(error)})")

    def _act(self, link: PeerLink, header: Header, payload: Payload) -> None:
        kind, _, segment, slot, lane, digest, _, total, number, _ = header
        # What comes after the end would call up messages that are gone.
        if self._has_ended:
            return
        if kind == FrameKind.CHUNK:
            self._take_chunk(link, header, payload)
        elif kind == FrameKind.CONSUMED:
            self._take_consumed(segment, slot)
        elif kind == FrameKind.CREDIT:
            self._take_credit(link.rank, lane, number)
        elif kind == FrameKind.SIGNATURE:
            link.texts[digest] = bytes(payload).decode()
        elif kind == FrameKind.ANSWER:
            self._unanswered.pop((link.rank, lane, number)).answered = True
        elif kind == FrameKind.SEGMENT:
            link.map_announced(segment, total)
        elif kind == FrameKind.RELEASE:
            link.unmap(segment)
        elif kind == FrameKind.STATUS:
            link.status = Status.parsed(bytes(payload))
        elif kind == FrameKind.FAILED:
            # Noted, not raised: this rank may be in a transfer that it can complete (see the note on failures).
            verdict = ChannelVerdict.parsed(bytes(payload))
            link.has_failed = True
            self.verdict = self.verdict or verdict
        else:
            link.said_bye = True

    def _take_chunk(self, link: PeerLink, header: Header, payload: Payload) -> None:
        _, flags, segment, slot, lane, digest, offset, total, number, length = header
        inbound = self._inbound(link.rank, lane, number)
        if inbound.digest is None:
            inbound.digest = digest
            inbound.total = total
            inbound.asked = bool(flags & ASKS)
            if inbound.asked:
                self._asking.append(inbound)
            self._match(inbound)
        if inbound.is_refused:
            return
        # The reply is made here, with the frame that it answers at hand, and sent when the chunk is consumed.
        num_bytes = min(SLOT_BYTES, total - offset) if flags & (IN_SLOT | IN_PLACE) else length
        content: torch.Tensor | Payload
        if flags & IN_SLOT:
            content = link.shared(segment, slot * SLOT_BYTES, num_bytes)
            reply = frame(FrameKind.CONSUMED, segment=segment, slot=slot)
        elif flags & IN_PLACE:
            (start,) = PLACE.unpack(payload)
            content = link.shared(segment, start, num_bytes)
            reply = frame(FrameKind.CREDIT, lane=lane, number=number)
        else:
            content = payload
            reply = frame(FrameKind.CREDIT, lane=lane, number=number) if total > INLINE_BYTES else b""
        inbound.chunks.append(MessageChunk(link, offset, content, reply))
        inbound.has_arrived = offset + num_bytes >= total
        self._forget_if_met(inbound)
        # A rank that sends has left the call in which it said that it waits.
        link.status = None
        link.last_digest = digest
        link.last_heard = time.monotonic()

    def _take_consumed(self, segment: int, index: int) -> None:
        slot = self._pool.find(segment, index)
        slot.readers -= 1
        if not slot.readers:
            assert isinstance(slot.outbound, Outbound)
            slot.outbound.num_on_the_way -= 1
            self._pool.give_back(slot)

    def _take_credit(self, rank: int, lane: int, number: int) -> None:
        if self._credited[rank, lane, number].credit(rank):
            del self._credited[rank, lane, number]

    def _inbound(self, source: int, lane: int, number: int) -> Inbound:
        key = (source, lane, number)
        if key not in self._inbounds:
            self._inbounds[key] = Inbound(source, lane, number)
        return self._inbounds[key]

    def _forget_if_met(self, inbound: Inbound) -> None:
        if inbound.has_arrived and inbound.expected is not None:
            del self._inbounds[inbound.source, inbound.lane, inbound.number]

    def _match(self, inbound: Inbound) -> None:
        if inbound.expected is None or inbound.digest is None:
            return
        if inbound.expected.digest != inbound.digest:
            # The error shows both texts: the sender's came as a SIGNATURE frame before the chunk.
            inbound.refuse()
            theirs = self._links[inbound.source].texts[inbound.digest]
            self.fail(different({self.rank: inbound.expected.text, inbound.source: theirs}))
        elif inbound in self._asking:
            self._asking.remove(inbound)
            self._links[inbound.source].put(frame(FrameKind.ANSWER, lane=inbound.lane, number=inbound.number))

    # Failures.

    def fail(self, verdict: ChannelVerdict) -> None:
        """End the board, unless it has ended, and tell everybody."""
        # The first verdict stays. A rank that fails because another one did would else blame the messenger.
        self.verdict = self.verdict or verdict
        if not self._has_ended:
            self._has_ended = True
            for link in self._links.values():
                link.put_last(frame(FrameKind.FAILED, payload=self.verdict.packed()))
            flush_until(time.monotonic() + _LAST_WORDS_SECONDS, self._links.values())

    def _raise(self, signature: Signature) -> NoReturn:
        assert self.verdict is not None
        self.fail(self.verdict)
        if self.verdict.culprit is None:
            raise CallMismatchError(self.verdict.fact)
        # Later calls raise the same text: what the rank was doing when it learnt of the failure, not when it asked
        # again.
        if self._raised is None:
            where = f"while rank {self.rank} was in {signature.operation} for {signature.purpose!r}"
            text = f"{self.verdict.fact}, {where}"
            self._raised = (text, signature.operation, signature.purpose)
        text, operation, purpose = self._raised
        raise PeerError(text, rank=self.verdict.culprit, operation=operation, purpose=purpose)

    def _note_ended(self) -> None:
        for link in self._links.values():
            if link.ended and not (link.said_bye or link.has_failed) and self.verdict is None:
                self.verdict = garbled(link.rank, link.garbled) if link.garbled else gone(link.rank)

    def _is_hopeless(self, transfer: TransferInFlight) -> bool:
        """Whether the transfer waits for a rank that will not go on."""
        for rank in transfer.awaited:
            link = self._links[rank]
            if link.said_bye and self.verdict is None:
                self.verdict = ChannelVerdict(fact=f"rank {rank} has closed its channel", culprit=rank)
            if link.ended or link.said_bye or link.has_failed:
                return True
        return False

    def _judge_stuck(self, transfer: TransferInFlight) -> None:
        self.fail(stuck(transfer.awaited[0], self._links, own_rank=self.rank, timeout_seconds=self.timeout_seconds))

    def _send_status(self, transfer: TransferInFlight) -> None:
        signature = transfer.signature
        status = Status(operation=signature.operation, purpose=signature.purpose, awaited=tuple(transfer.awaited))
        for link in self._links.values():
            link.put(frame(FrameKind.STATUS, payload=status.packed()))
        self._flush()

    # The end.

    def close(self) -> None:
        """Let buffered messages leave, say goodbye, and give everything back."""
        with self.lock:
            # `send` has promised that its messages need nothing more from the caller. Here is the last chance to write
            # them.
            deadline = time.monotonic() + self.timeout_seconds
            while not self._has_ended and self._is_leaving() and time.monotonic() < deadline:
                self._turn(min(1.0, self.timeout_seconds))
            for link in self._links.values():
                link.put(frame(FrameKind.BYE))
            deadline = time.monotonic() + _LAST_WORDS_SECONDS
            flush_until(deadline, self._links.values())
            for link in self._links.values():
                link.linger(deadline)
            self.verdict = self.verdict or ChannelVerdict(
                fact=f"rank {self.rank} has closed this channel", culprit=self.rank
            )
            self._has_ended = True
            self._flusher.stop()
            self.drop()

    def leave(self, fact: str) -> None:
        """The program of this rank ends without `close`: let out what was sent, and say why nothing more comes."""
        if self._has_ended or not self.lock.acquire(timeout=_LAST_WORDS_SECONDS):  # another thread may wait for ever
            return
        try:
            deadline = time.monotonic() + _LAST_WORDS_SECONDS
            flush_until(deadline, self._links.values())
            self.fail(ChannelVerdict(fact=fact, culprit=self.rank))
            for link in self._links.values():
                link.linger(deadline)
        finally:
            self.lock.release()

    def drop(self) -> None:
        """Close the connections without a word; for a forked child, which must not hold them open."""
        for link in self._links.values():
            link.close()
        self._pool.close()

    def _is_leaving(self) -> bool:
        """Whether another rank still needs this one to read what it was sent."""
        credited = any(not self._links[rank].ended for rank, _, _ in self._credited)
        return credited or any(link.wants_to_write for link in self._links.values())
