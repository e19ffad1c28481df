"""All messages of this process, and the loop that moves every one of them while a call waits for one.

Progress is made inside calls, which costs the training step nothing while it computes. Only what did not fit into a
socket is written by a thread between the calls. The links are made at first use (`peer_links`). Both sides know a
message by (rank, lane, number), without asking. A lane is a digest of the members and the kind of call, and the numbers
count the messages of a lane::

    rank 0 calls                                     lane, number      rank 1 calls
    all_gather "weights" on ranks 0 1          ----  c01, 0     ----   all_gather "weights" on ranks 0 1
    send "activation" to rank 1                ----  m01, 0     ----   receive "activation" from rank 0
    reduce_scatter "gradients" on ranks 0 1 2  ----  c012, 0    ----   reduce_scatter "gradients" ...
    all_gather "buffers" on ranks 0 1          ----  c01, 1     --/-   all_gather "weights": MismatchError on both
"""

import collections
import json
import os
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NoReturn

import torch

from shardwise.comm.call_log import CallLog, packed_calls
from shardwise.comm.channel import Signature
from shardwise.comm.hang_report import Whereabouts
from shardwise.comm.hosts import RankNames
from shardwise.comm.process.frames import (
    ASKS,
    BY_GLOO,
    IN_PLACE,
    IN_SLOT,
    ChannelVerdict,
    FrameKind,
    Header,
    Status,
    closed_by,
    different,
    frame,
    garbled,
    lost,
    unreachable,
)
from shardwise.comm.process.gloo_pairs import GlooPairs
from shardwise.comm.process.hang_watch import HangWatch, QuietThread
from shardwise.comm.process.known_ranks import KnownRanks
from shardwise.comm.process.link import Payload, PeerLink, flush_until
from shardwise.comm.process.messages import (
    Inbound,
    Intake,
    Outbound,
    Stamp,
    TransferInFlight,
    bytes_of_chunk,
    chunk_of,
    fits_in_frame,
    window,
)
from shardwise.comm.process.peer_links import PeerLinks
from shardwise.comm.process.relay import Relay, parsed_news
from shardwise.comm.process.shared_memory import SlotPool
from shardwise.comm.tally import RankTally
from shardwise.errors import CallMismatchError, PeerError, in_words

_NUMBERS = 1 << 32
"""Messages of a lane are counted modulo this: a frame has 32 bits for the number, and never so many are under way."""

_INTERRUPT_SECONDS = 0.5
"""How soon a Ctrl-C is noticed that comes just before the poll blocks: Python handles it when the poll returns."""

LAST_WORDS_SECONDS = 1.0
"""How long a rank that has failed, or ends without `close`, tries to tell peers that do not read."""


class Switchboard:
    """Messages between this process, world rank `rank`, and every other one.

    [Note: how a failure spreads]
    The first failure that a rank sees or hears of is its verdict for good, so that all ranks name the same culprit. A
    transfer that needs none of the ranks that are lost may still complete. The first call that cannot complete, and
    every call begun after that, raises the verdict and says it to all. News of the relay can overtake messages, so that
    what ends a transfer is what came on the link of a rank, if there is one.
    """

    def __init__(
        self,
        rank: int,
        links: dict[int, PeerLink],
        *,
        timeout_seconds: float,
        kernels: Sequence[int] = (),
        hosts: Sequence[str] = (),
        relay: Relay | None = None,
        pairs: GlooPairs | None = None,
    ) -> None:
        """links: those that are there, by world rank. relay: makes the others; without one, these are all.

        kernels: per world rank a number, equal for ranks that share memory; else each is taken to be alone.
        hosts: per world rank the name of its host; empty where it is unknown. pairs: the ways of gloo to other hosts.
        """
        self.rank = rank
        self.hosts = hosts
        self.names = RankNames(hosts)
        """Ranks of the world in words."""
        self.timeout_seconds = timeout_seconds
        self.verdict: ChannelVerdict | None = None
        self.tally = RankTally()
        self.polled_s = 0.0
        """In which this rank slept, for any call."""
        self.counts_waits = True
        """False while a call waits for ranks that wait for others, and counts itself."""
        self.pool = SlotPool()
        """Memory that this rank shares with others."""
        self.kernels = kernels or range(len(links) + 1)
        self._logs: dict[int, CallLog] = {}
        self._stamps: dict[Signature, Stamp] = {}
        self._sent_numbers: collections.Counter[tuple[int, int]] = collections.Counter()
        self._expected_numbers: collections.Counter[tuple[int, int]] = collections.Counter()
        # By (rank, lane, number). An inbound message leaves when a call has met it and its last chunk has come.
        self.inbounds: dict[tuple[int, int, int], Inbound] = {}
        """What comes, or is expected, by (source, lane, number)."""
        self._unanswered: dict[tuple[int, int, int], Outbound] = {}
        self._credited: dict[tuple[int, int, int], Outbound] = {}
        """Messages sent as bytes or read in place whose chunks have not all been consumed."""
        self._asking: list[Inbound] = []
        self._active: list[TransferInFlight] = []
        self._was_read = False
        """A peer has consumed a chunk since the last turn. A buffered message moves so, although its call has ended."""
        self._has_ended = False
        """The verdict was raised here, or this rank decided it: nothing more is sent or taken in."""
        self._raised: tuple[str, str, str] | None = None
        self.was_heard = False
        """The program has got an error of this board."""
        # Reentrant: the channel holds it over several calls of the board, such as expect and start, whose order on the
        # lanes must not be broken by another thread.
        self._lock = threading.RLock()
        self._process = os.getpid()
        self.known = KnownRanks(rank, self.names, timeout_seconds=timeout_seconds)
        """What the others have said of themselves."""
        self.links = PeerLinks(rank, links, relay, kernels=self.kernels, known=self.known, lock=self._lock)
        self.pairs = pairs
        """Lines of gloo, None where there are none."""
        # A board that the program has let go of ends its connections, although their threads hold them.
        weakref.finalize(self, self.links.close).atexit = False
        if pairs is not None:
            self.links.listen_to(pairs, pairs.take_in)
            weakref.finalize(self, pairs.close).atexit = False
        self.watch = HangWatch(rank, len(self.kernels), timeout_seconds=timeout_seconds)
        self.quiet_thread: QuietThread | None = None
        """Calls `look` while this rank makes no call."""

    @property
    def lock(self) -> "threading.RLock":
        """Held during every call, so that threads take turns. A forked child finds out here that it is one."""
        if os.getpid() != self._process:
            self.leave_to_parent()
        return self._lock

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
        constant: bool = False,
        passed_on: bool = False,
    ) -> list[Outbound]:
        """Messages with the same bytes to some world ranks; `window_share` such messages share the slots.

        constant: no one writes to the source again, so that nothing has to be copied. passed_on: see `Outbound`.
        """
        stamp = self._stamp(signature)
        targets = [(self.links[rank], self._count(self._sent_numbers, lane, rank)) for rank in destinations]
        near, far = ([target for target in targets if target[0].local == local] for local in (True, False))
        is_far_small = fits_in_frame(len(source), local=False)
        outbounds = []
        # Readers on this host share one copy in a slot. Gloo sends a large message to each rank of other hosts apart.
        for group in filter(None, [near, far] if is_far_small else [near, *([target] for target in far)]):
            by_gloo = not (group[0][0].local or is_far_small)
            outbound = Outbound(
                source,
                group,
                lane=lane,
                stamp=stamp,
                pool=self.pool,
                window=window(window_share, by_gloo=by_gloo),
                buffered=buffered,
                constant=constant,
                passed_on=passed_on,
                pairs=self.pairs if by_gloo else None,
            )
            key = (group[0][0].rank, lane, group[0][1])
            if not outbound.answered:
                self._unanswered[key] = outbound
            if outbound.is_credited:
                self._credited |= {(link.rank, lane, number): outbound for link, number in group}
            outbounds.append(outbound)
        return outbounds

    def send_in_frame(self, source: torch.Tensor, destination: int, lane: int, signature: Signature) -> bool:
        """Send a message that fits into a frame, and of a kind that the rank knows; else False, and nothing is sent.

        It is buffered, and done with this call.
        """
        # The most frequent message of a pipeline. Nothing of it is left to do, so it needs no objects that wait.
        link = self.links[destination]
        stamp = self._stamp(signature)
        total = source.numel()
        if not (fits_in_frame(total, local=link.local) and link.knows_signature(stamp.digest)):
            return False
        number = self._count(self._sent_numbers, lane, destination)
        header = frame(FrameKind.CHUNK, lane=lane, digest=stamp.digest, total=total, number=number, length=total)
        link.put(header + source.numpy().tobytes())
        self.links.flush()
        self.links.leave()
        return True

    def expect(self, source: int, lane: int, signature: Signature) -> Inbound:
        """The next message of a lane from a world rank, compared with the signature as soon as it is there."""
        if source < self.rank:
            self.links[source]  # of two that make the same call, the higher one calls the other
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
        self.links.flush()
        self.links.leave()
        return transfer

    def shares_memory_with(self, rank: int) -> bool:
        """Whether a world rank can read the memory of this one."""
        return self.links.is_local(rank)

    def tell_place(self, memory: torch.Tensor, ranks: Sequence[int]) -> bytes:
        """Let these ranks map the segment that holds lent memory; return its place in words for `memory_of`."""
        found = self.pool.locate(memory)
        assert found is not None, "lent memory is part of a segment"
        segment, start = found
        for rank in ranks:
            self.links[rank].tell_segment(segment)
        return json.dumps([segment.number, start]).encode()

    def memory_of(self, rank: int, place: bytes, num_bytes: int) -> torch.Tensor:
        """The memory of a peer at the place that its `tell_place` gave. Raises PeerError where it gave none."""
        try:
            number, start = json.loads(place)
            return self.links[rank].shared(number, start, num_bytes)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            self.fail(garbled(rank, f"a place in its memory that means nothing ({in_words(error)})", self.names))
            self._raise(Signature(operation="exchange", purpose="shared memory"))

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Zeroed bytes that peers on this host read in place."""
        return self.pool.lend(num_bytes)

    def check(self, signature: Signature) -> None:
        """Take in what has come; raise if the board has ended. Every call begins with it."""
        # A failure is raised by the next call, even one that could complete: the sooner all ranks stop, the less they
        # compute for nothing. It also empties the sockets now and then, on which senders may wait.
        with self.lock:
            self.watch.activity.begin(signature)
            if self.verdict is None:
                self._turn(0)
                self._note_ended()
            if self.verdict is not None:
                self._raise(signature)

    def has_failed(self, *, patience_seconds: float = 0.0) -> bool:
        """Whether a rank is lost or has given up.

        Looks for news unless another thread is in a call for longer than `patience_seconds`: that call sees them.
        """
        # What is known needs no lock: a thread that only looks may hold it while the program closes the channel.
        if self.verdict is None and self.lock.acquire(timeout=patience_seconds):
            try:
                if self.verdict is None:
                    self._turn(0)
                    self._note_ended()
            finally:
                self.lock.release()
        return self.verdict is not None

    def has_closed(self, ranks: Sequence[int]) -> bool:
        """Whether one of these world ranks has said goodbye, as far as this rank has heard."""
        return any(map(self.links.said_bye, ranks))

    def look(self, idle_seconds: float) -> None:
        """Say where this rank is, which has made no call for so long; print the report, if this rank is to do it."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if not (self.has_failed() or self._has_ended):
                self._say_where(idle_seconds)
                self.links.leave()
            elif self.verdict is not None and self.verdict.hangs:
                self.watch.print_once()
        finally:
            self.lock.release()

    def judge(self, awaited: Sequence[int]) -> None:
        """End the board: what does not travel here has waited too long for these ranks, the likeliest first."""
        with self.lock:
            closed = [rank for rank in awaited if self.links.said_bye(rank)]
            if self.verdict is None and closed:
                self.verdict = closed_by(closed[0], self.names)
            self.fail(self.verdict or self.known.stuck(self.known.likeliest(awaited)))

    def tell_waiting(self, signature: Signature, awaited: Sequence[int]) -> bool:
        """What does not travel here has waited for a while for these ranks: say so to all, as a call here would.

        False while a call is in progress, which says itself that it waits.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if not self._has_ended:
                self._say_status(signature, awaited)
                self.links.leave()
            return True
        finally:
            self.lock.release()

    def log(self, lane: int, members: tuple[int, ...]) -> CallLog:
        """The calls on the channel of these members."""
        if lane not in self._logs:
            self._logs[lane] = CallLog(lane, members, self.rank)
        return self._logs[lane]

    def note(self, log: CallLog, signature: Signature) -> None:
        """Put a call into its log; the board fails where another rank says that it made another one in its place."""
        if (texts := log.add(self._stamp(signature))) is not None:
            self.fail(different(texts, self.names))
            self._raise(signature)

    def tell_calls(self, log: CallLog, ranks: Sequence[int]) -> None:
        """Tell these ranks the last calls of a log."""
        content = frame(FrameKind.CALLS, payload=packed_calls({log.lane: log.last()}))
        for rank in ranks:
            self.links[rank].put(content)

    def compared_logs(self) -> list[CallLog]:
        """Those with transfers that are compared by digests."""
        return [log for log in self._logs.values() if log.has_transfers]

    def has_met(self, lane: int, members: Sequence[int], signature: Signature) -> None:
        """An exchange is over: all of its members have made it, also those from which nothing came straight here."""
        self.known.met(lane, members, self._stamp(signature))

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
                self.watch.activity.waits_in = transfer
                try:
                    self._wait(transfer)
                finally:
                    self.watch.activity.waits_in = None
                self.links.leave()

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
        polled_s, awaited = self.polled_s, transfer.awaited
        while True:
            if self._has_ended or (self.verdict is not None and self._is_hopeless(transfer)):
                self._raise(transfer.signature)
            # Before the poll: the rank that asks may be the one that this rank waits for.
            self._answer_asking()
            idle = time.monotonic() - last_movement
            limit = self.timeout_seconds if has_asked else notice_after
            moved = self._turn(min(max(0.0, limit - idle), _INTERRUPT_SECONDS))
            if not (left := transfer.awaited):
                if self.counts_waits:
                    self.tally.waited(awaited[0], self.polled_s - polled_s)
                return
            awaited = left
            # Not at once: a rank that has ended may have sent all that this transfer needs. Only one that waits for
            # such a rank gives up, at the top of the loop.
            self._note_ended()
            if self._is_hopeless(transfer):
                continue
            if moved:
                last_movement = time.monotonic()
                self.watch.activity.num_acts += 1
            elif time.monotonic() - last_movement >= self.timeout_seconds:
                self.fail(self.known.stuck(transfer.awaited[0], self.links.problems()))
            elif not has_asked and time.monotonic() - last_movement >= notice_after:
                self._say_status(transfer.signature, transfer.awaited)
                has_asked = True
            if not moved:
                self._say_where(time.monotonic() - last_movement)

    def _turn(self, patience_seconds: float) -> bool:
        """Wait for the sockets, read them, let every transfer go on, write; whether any transfer moved."""
        began_s = self.tally.now_s()
        events = self.links.wait(patience_seconds)
        self.polled_s += self.tally.now_s() - began_s
        if not events and patience_seconds == 0 and not self._active:
            return False
        self.links.read(events, self._take, self._hear)
        moved, self._was_read = self._was_read, False
        # All transfers, not only the one that is waited for: another rank may need a later one first.
        still_active = []
        for transfer in self._active:
            moved |= transfer.advance()
            if not transfer.is_done:
                still_active.append(transfer)
        self._active = still_active
        for number in self.pool.release_idle():
            for link in self.links.values():
                link.forget_segment(number)
        self.links.flush()
        return moved

    def _answer_asking(self) -> None:
        """Answer the peers that ask, although this rank waits itself and has not called what they ask about."""
        # Two ranks that both send first, with a signature that is new, would otherwise wait for each other's answers.
        # An answer from here says less (the message is not matched yet), and a difference is then found by the
        # receiver.
        if not self._asking:
            return
        for inbound in self._asking:
            self.links[inbound.source].put(frame(FrameKind.ANSWER, lane=inbound.lane, number=inbound.number))
        self._asking.clear()
        self.links.flush()

    # What frames do.

    def _take(self, link: PeerLink, header: Header, payload: Payload) -> None:
        try:
            self._act(link, header, payload)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, OSError, struct.error) as error:
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
            self._take_consumed(link.rank, segment, slot)
        elif kind == FrameKind.CREDIT:
            self._was_read = True
            if self._credited[link.rank, lane, number].credit(link.rank):
                del self._credited[link.rank, lane, number]
        elif kind == FrameKind.SIGNATURE:
            link.texts[digest] = bytes(payload).decode()
        elif kind == FrameKind.ANSWER:
            self._unanswered.pop((link.rank, lane, number)).answered = True
        elif kind == FrameKind.SEGMENT:
            link.map_announced(segment, total)
        elif kind == FrameKind.RELEASE:
            link.unmap(segment)
        else:
            content = parsed_news(kind, payload, len(self.kernels))
            link.has_failed |= kind == FrameKind.FAILED
            link.said_bye |= kind == FrameKind.BYE
            self._hear(link.rank, kind, content)

    def _hear(self, rank: int, kind: int, content: object) -> None:
        """What a rank says about its calls and its end, on its link or through others."""
        if self._has_ended:
            return
        known = self.known[rank]
        if isinstance(content, Status):
            known.status = content
            known.last_heard = time.monotonic()
        elif isinstance(content, dict):
            for lane, calls in content.items():
                # A lane that this rank has not used yet has nothing to compare with.
                log = self._logs.get(lane)
                texts = log.hear(rank, calls) if log is not None and rank in log.members else None
                if texts is not None:
                    self.fail(different(texts, self.names))
        elif isinstance(content, ChannelVerdict):
            ended = rank if kind == FrameKind.FAILED else content.culprit
            if kind == FrameKind.LOST and ended is not None and self.known[ended].said_bye:
                return  # it has closed its channel, and `rank` has not heard it
            # Noted, not raised: this rank may be in a transfer that it can complete (see the note on failures).
            self.verdict = self.verdict or content
            if ended is not None:
                self.known[ended].has_ended = True
        elif isinstance(content, Whereabouts):
            self.watch.heard(rank, content)
        else:
            known.said_bye = True

    def _take_chunk(self, link: PeerLink, header: Header, payload: Payload) -> None:
        _, flags, _, _, lane, digest, offset, total, number, length = header
        is_elsewhere = flags & (IN_SLOT | IN_PLACE | BY_GLOO)
        num_bytes = bytes_of_chunk(total - offset, local=link.local) if is_elsewhere else length
        inbound = self._inbound(link.rank, lane, number)
        inbound.check_next(digest=digest, offset=offset, total=total, num_bytes=num_bytes, local=link.local)
        if inbound.digest is None:
            link.texts[digest]  # announced before, or it could not be told how calls differ
            inbound.digest = digest
            inbound.total = total
            inbound.asked = bool(flags & ASKS)
            if inbound.asked:
                self._asking.append(inbound)
            self._match(inbound)
        if inbound.is_refused:
            return
        inbound.add(chunk_of(link, header, payload, num_bytes, self.pairs), num_bytes)
        self._forget_if_met(inbound)
        # A rank that sends has left the call in which it said that it waits.
        self.watch.moved(link.rank)
        self.known[link.rank].moved(link.texts[digest])

    def _take_consumed(self, rank: int, segment: int, index: int) -> None:
        self._was_read = True
        slot = self.pool.find(segment, index)
        slot.readers.remove(rank)  # not a number: a rank that answers twice would free what another one still reads
        if not slot.readers:
            assert isinstance(slot.outbound, Outbound)
            slot.outbound.num_on_the_way -= 1
            self.pool.give_back(slot)

    def _inbound(self, source: int, lane: int, number: int) -> Inbound:
        key = (source, lane, number)
        if key not in self.inbounds:
            self.inbounds[key] = Inbound(source, lane, number)
        return self.inbounds[key]

    def _forget_if_met(self, inbound: Inbound) -> None:
        if inbound.has_arrived and inbound.expected is not None:
            del self.inbounds[inbound.source, inbound.lane, inbound.number]

    def _match(self, inbound: Inbound) -> None:
        if inbound.expected is None or inbound.digest is None:
            return
        if inbound.expected.digest != inbound.digest:
            # The error shows both texts: the sender's came as a SIGNATURE frame before the chunk.
            inbound.refuse()
            theirs = self.links[inbound.source].texts[inbound.digest]
            self.fail(different({self.rank: inbound.expected.text, inbound.source: theirs}, self.names))
        elif inbound in self._asking:
            self._asking.remove(inbound)
            self.links[inbound.source].put(frame(FrameKind.ANSWER, lane=inbound.lane, number=inbound.number))

    # Failures.

    def fail(self, verdict: ChannelVerdict) -> None:
        """End the board, unless it has ended, and tell everybody."""
        # The first verdict stays. A rank that fails because another one did would else blame the messenger.
        self.verdict = self.verdict or verdict
        if not self._has_ended:
            self._has_ended = True
            if self.verdict.hangs:
                self.watch.print_once()
            self.links.fail(self.verdict.packed())
            flush_until(time.monotonic() + LAST_WORDS_SECONDS, self.links.values())

    def _raise(self, signature: Signature) -> NoReturn:
        assert self.verdict is not None
        self.fail(self.verdict)
        self.was_heard = True
        if self.verdict.culprit is None:
            raise CallMismatchError(self.verdict.fact)
        # Later calls raise the same text: what the rank was doing when it learnt of the failure, not when it asked
        # again.
        if self._raised is None:
            where = f"while rank {self.names[self.rank]} was in {signature.operation} for {signature.purpose!r}"
            text = f"{self.verdict.fact}, {where}"
            self._raised = (text, signature.operation, signature.purpose)
        text, operation, purpose = self._raised
        raise PeerError(text, rank=self.verdict.culprit, operation=operation, purpose=purpose)

    def _note_ended(self) -> None:
        for link in self.links.ended:
            known = self.known[link.rank]
            has_said = link.said_bye or link.has_failed or known.said_bye or known.has_ended
            if not has_said and self.verdict is None:
                self.verdict = lost(link.rank, link.garbled, self.names)
        if self.verdict is None and self.pairs is not None and (broken := self.pairs.lost(self.links.said_bye)):
            self.verdict = unreachable(*broken, self.names)

    def _is_hopeless(self, transfer: TransferInFlight) -> bool:
        """Whether the transfer waits for a rank that will not go on."""
        for rank in transfer.awaited:
            if self.verdict is None and self.links.said_bye(rank):
                self.verdict = closed_by(rank, self.names)
            if self.links.sends_no_more(rank) or (self.pairs is not None and self.pairs.is_lost(rank)):
                return True
        return False

    def _say_where(self, idle_seconds: float) -> None:
        if words := self.watch.words(idle_seconds):
            self.links.tell_all(FrameKind.WHERE, words)

    def _say_status(self, signature: Signature, awaited: Sequence[int]) -> None:
        status = Status(operation=signature.operation, purpose=signature.purpose, awaited=tuple(awaited))
        self.links.tell_all(FrameKind.STATUS, status.packed())
        if compared := self.compared_logs():
            self.links.tell_all(FrameKind.CALLS, packed_calls({log.lane: log.last() for log in compared}))

    # The end.

    def close(self) -> None:
        """Let buffered messages leave, say goodbye, and give everything back."""
        with self.lock:
            # `send` has promised that its messages need nothing more from the caller. Here is the last chance to write
            # them.
            deadline = time.monotonic() + self.timeout_seconds
            while not self._has_ended and self._is_leaving() and time.monotonic() < deadline:
                self._turn(min(1.0, self.timeout_seconds))
            if not self._has_ended:
                self.links.end(frame(FrameKind.BYE))
                self.links.tell_all(FrameKind.BYE)
            # As long as any transfer may take, where all is well: to a peer whose goodbye is lost, this rank has died.
            patience_seconds = self.timeout_seconds if self.verdict is None else LAST_WORDS_SECONDS
            self.links.linger(time.monotonic() + patience_seconds)
            self.verdict = self.verdict or ChannelVerdict(
                fact=f"rank {self.names[self.rank]} has closed this channel", culprit=self.rank
            )
            self._has_ended = True
            self.drop()
            if self.quiet_thread is not None:
                self.quiet_thread.stop()

    def leave(self, fact: str) -> None:
        """The program of this rank ends without `close`: let out what was sent, and say why nothing more comes."""
        if self._has_ended or not self.lock.acquire(timeout=LAST_WORDS_SECONDS):  # another thread may wait for ever
            return
        try:
            deadline = time.monotonic() + LAST_WORDS_SECONDS
            while self.links.is_leaving() and (left := deadline - time.monotonic()) > 0:
                self._turn(left)
            self.fail(ChannelVerdict(fact=fact, culprit=self.rank))
            self.links.linger(deadline)
        finally:
            self.lock.release()

    def leave_to_parent(self) -> None:
        """In a forked child: close what it has inherited, which it must not hold open."""
        self._process = os.getpid()
        self._lock = threading.RLock()  # the thread that holds the other one may not be in this process
        fact = f"this process was forked from rank {self.names[self.rank]}, which alone can use its channel"
        self.verdict = self.verdict or ChannelVerdict(fact=fact, culprit=self.rank)
        if self.pairs is not None:
            self.pairs.leave_to_parent()
        self.links.close()
        self.pool.close()

    def drop(self) -> None:
        """Close the connections without a word."""
        if self.pairs is not None:
            self.pairs.close()
        self.links.close()
        self.pool.close()

    def _is_leaving(self) -> bool:
        """Whether another rank still needs this one to read what it was sent."""
        credited = any(not self.links.has_gone(rank) for rank, _, _ in self._credited)
        return credited or self.links.is_leaving()
