"""All connections of this process, and the loop that moves every message while somebody waits for one.

There is no thread: progress is made inside calls, which costs the training step nothing while it computes.
"""

import collections
import select
import threading
import time
from collections.abc import Sequence

import torch

from shardwise.comm.calls import Signature
from shardwise.comm.frames import ASKS, IN_SLOT, Header, Kind, Status, Verdict, frame
from shardwise.comm.links import Link, Payload
from shardwise.comm.messages import INLINE_BYTES, Chunk, Inbound, Outbound, Stamp
from shardwise.comm.shared_memory import BASE_SLOTS, SLOT_BYTES, SlotPool
from shardwise.comm.transfers import Intake, Transfer
from shardwise.errors import MismatchError, PeerError

_NUMBERS = 1 << 32
_MIN_WINDOW = 2


class Switchboard:
    """Messages between this process, world rank `rank`, and every other one, over `links` by world rank.

    The first failure ends the board for good: every rank is told the verdict, and every later call raises it.
    """

    def __init__(self, rank: int, links: dict[int, Link], *, timeout_seconds: float) -> None:
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.verdict: Verdict | None = None
        self._links = links
        self._pool = SlotPool()
        self._poll = select.poll()
        self._by_descriptor = {link.fileno(): link for link in links.values()}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        self._writers: set[int] = set()
        self._stamps: dict[Signature, Stamp] = {}
        self._sent_numbers: collections.Counter[tuple[int, int]] = collections.Counter()
        self._expected_numbers: collections.Counter[tuple[int, int]] = collections.Counter()
        self._inbounds: dict[tuple[int, int, int], Inbound] = {}
        self._outbounds: dict[tuple[int, int, int], Outbound] = {}
        self._asking: list[Inbound] = []
        self._active: list[Transfer] = []
        self._raised: tuple[str, str, str] | None = None
        self._lock = threading.RLock()

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
        together = [target for target in targets if small or target[0].local]
        groups = ([together] if together else []) + [[target] for target in targets if target not in together]
        outbounds = []
        for group in groups:
            remote = not group[0][0].local
            outbound = Outbound(
                source.clone() if remote and buffered and not small else source,
                group,
                lane=lane,
                stamp=stamp,
                pool=self._pool,
                window=max(_MIN_WINDOW, BASE_SLOTS // window_share),
                buffered=buffered,
            )
            if not outbound.answered or (remote and not small):
                ((link, number),) = group
                self._outbounds[link.rank, lane, number] = outbound
            outbounds.append(outbound)
        return outbounds

    def expect(self, source: int, lane: int, signature: Signature) -> Inbound:
        """The next message of a lane from a world rank, compared with the signature as soon as it is there."""
        number = self._count(self._expected_numbers, lane, source)
        inbound = self._inbound(source, lane, number)
        inbound.expected = self._stamp(signature)
        self._match(inbound)
        return inbound

    def start(self, signature: Signature, outbounds: Sequence[Outbound], intake: Intake | None) -> Transfer:
        """Put a transfer under way and do what can be done at once."""
        transfer = Transfer(signature, outbounds, intake, self.wait)
        transfer.advance()
        if not transfer.is_done:
            self._active.append(transfer)
        self._flush()
        return transfer

    def check(self, signature: Signature) -> None:
        """Take in what has come; raise if the board has ended. Every call begins with it."""
        with self._lock:
            if self.verdict is None:
                self._turn(0)
            if self.verdict is not None:
                self._raise(signature, f"when rank {self.rank} called")

    def guard(self) -> threading.RLock:  # type: ignore[valid-type]
        """Held while a call is put together, so that threads take turns."""
        return self._lock

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

    def wait(self, transfer: Transfer) -> None:
        """Move all messages until this transfer is done; raise `PeerError` or `MismatchError` when it cannot be."""
        with self._lock:
            if not transfer.is_done:
                self._wait(transfer)

    def _wait(self, transfer: Transfer) -> None:
        last_movement = time.monotonic()
        notice_after = min(1.0, self.timeout_seconds / 4)
        has_told = False
        while True:
            if self.verdict is not None:
                self._raise(transfer.signature, f"while rank {self.rank} waited in")
            self._answer_asking()
            idle = time.monotonic() - last_movement
            limit = self.timeout_seconds if has_told else notice_after
            moved = self._turn(max(0.0, limit - idle))
            if transfer.is_done:
                return
            self._judge_ended(transfer)
            if moved:
                last_movement = time.monotonic()
            elif time.monotonic() - last_movement >= self.timeout_seconds:
                self._judge_stuck(transfer)
            elif not has_told and time.monotonic() - last_movement >= notice_after:
                self._tell_status(transfer)
                has_told = True

    def _turn(self, patience_seconds: float) -> bool:
        """Wait for the sockets, read them, let every transfer go on, write; whether any transfer moved."""
        events = self._poll.poll(patience_seconds * 1000)
        if not events and patience_seconds == 0 and not self._active:
            return False
        for descriptor, _ in events:
            link = self._by_descriptor[descriptor]
            link.receive(self._take)
            if link.ended:
                self._poll.unregister(descriptor)
                self._writers.discard(descriptor)
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

    def _release_idle(self) -> None:
        for number in self._pool.release_idle():
            for link in self._links.values():
                link.forget_segment(number)

    def _answer_asking(self) -> None:
        """Whoever waits for one of our answers need not wait until this rank is done waiting."""
        for inbound in self._asking:
            self._links[inbound.source].put(frame(Kind.ANSWER, lane=inbound.lane, number=inbound.number))
        self._asking.clear()
        self._flush()

    # What frames do.

    def _take(self, link: Link, header: Header, payload: Payload) -> None:
        kind, _, segment, slot, lane, digest, _, total, number, _ = header
        if kind == Kind.CHUNK:
            self._take_chunk(link, header, payload)
        elif kind == Kind.CONSUMED:
            self._take_consumed(segment, slot)
        elif kind == Kind.CREDIT:
            self._outbounds[link.rank, lane, number].num_on_the_way -= 1
        elif kind == Kind.SIGNATURE:
            link.texts[digest] = bytes(payload).decode()
        elif kind == Kind.ANSWER:
            self._outbounds[link.rank, lane, number].answered = True
        elif kind == Kind.SEGMENT:
            link.map_announced(segment, total)
        elif kind == Kind.RELEASE:
            link.unmap(segment)
        elif kind == Kind.STATUS:
            link.status = Status.parsed(bytes(payload))
        elif kind == Kind.FAILED:
            self.verdict = self.verdict or Verdict.parsed(bytes(payload))
        else:
            assert kind == Kind.BYE, kind
            link.said_bye = True

    def _take_chunk(self, link: Link, header: Header, payload: Payload) -> None:
        _, flags, segment, slot, lane, digest, offset, total, number, length = header
        inbound = self._inbound(link.rank, lane, number)
        if inbound.digest is None:
            inbound.digest = digest
            inbound.total = total
            inbound.asked = bool(flags & ASKS)
            if inbound.asked:
                self._asking.append(inbound)
            self._match(inbound)
        if flags & IN_SLOT:
            content: torch.Tensor | Payload = link.in_slot(segment, slot, min(SLOT_BYTES, total - offset))
            reply = frame(Kind.CONSUMED, segment=segment, slot=slot)
        else:
            content = payload
            reply = frame(Kind.CREDIT, lane=lane, number=number) if total > INLINE_BYTES else b""
        inbound.chunks.append(Chunk(link, offset, content, reply))
        if offset + (length or SLOT_BYTES) >= total:
            del self._inbounds[link.rank, lane, number]
        link.status = None
        link.last_digest = digest
        link.last_heard = time.monotonic()
