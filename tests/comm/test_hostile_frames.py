"""Whatever a peer sends, a rank ends with an error that names it: random and mutated frames."""

import collections
import contextlib
import gc
import json
import random
import resource
import socket
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwise.comm.call_log import packed_calls
from shardwise.comm.channel import Signature
from shardwise.comm.hang_report import Whereabouts
from shardwise.comm.process import intakes, messages, shared_memory
from shardwise.comm.process.board import Switchboard
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.frames import (
    ASKS,
    BY_GLOO,
    FORMAT,
    IN_PLACE,
    IN_SLOT,
    PLACE,
    ChannelVerdict,
    FrameKind,
    Status,
    frame,
)
from shardwise.comm.process.gloo_pairs import GlooPairs
from shardwise.comm.process.link import PeerLink
from shardwise.comm.process.messages import Stamp
from shardwise.comm.process.shared_memory import SharedSegment
from shardwise.errors import CallMismatchError, PeerError
from tests.comm.boards import shared_descriptors
from tests.comm.hostile import mutated

SLOT_BYTES = 32 << 10
LARGE = SLOT_BYTES + 4096
KINDS = list(FrameKind)
REASONS = (
    "rank 1 sent a frame of kind",
    "rank 1 is gone",
    "calls that meet differ",
    "rank 1 has closed its channel",
    "rank 1 is tired",
    "rank 1 sent",
)


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is touched for the first time costs more than all else here."""
    for module in (intakes, messages, shared_memory):
        monkeypatch.setattr(module, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(messages, "GLOO_CHUNK_BYTES", SLOT_BYTES)
    monkeypatch.setattr(messages, "INLINE_BYTES_BETWEEN_HOSTS", messages.INLINE_BYTES)


class NoWay(GlooPairs):
    """To a host that gloo cannot reach: frames are the subject here."""

    def __init__(self) -> None:
        super().__init__(0, HashStore(), timeout_seconds=20)

    def connect(self, peer: int, address: str) -> NoReturn:
        raise RuntimeError("no way")


class Victim:
    """Rank 0 of two in the middle of its calls, and the socket of a rank 1 that says what it likes."""

    def __init__(self, *, local: bool) -> None:
        ours, self.theirs = socket.socketpair()
        self.board = Switchboard(0, {1: PeerLink(ours, rank=1, local=local)}, timeout_seconds=20, pairs=NoWay())
        self.channel = ProcessChannel(self.board, (0, 1), owns_board=True)
        output, parts = torch.empty(2 * LARGE, dtype=torch.uint8), torch.empty(1024)
        signatures = (
            Signature(operation="exchange", purpose="words"),
            Signature(operation="all_gather", purpose="weights"),
            Signature(operation="send", purpose="activation"),
        )
        self.stamps = [Stamp.of(each) for each in signatures]
        self.works = [
            self.channel.all_gather(output, output[:LARGE], purpose="weights"),
            self.channel.reduce_scatter(parts[:512], parts, purpose="gradients"),
            self.channel.send(output[:LARGE], 1, purpose="activation"),
            self.channel.receive(output[:LARGE], 1, purpose="loss"),
        ]
        # What the messages above expect, as a peer that makes the same calls would stamp them.
        self.digests = [
            inbound.expected.digest for inbound in self.board.inbounds.values() if inbound.expected is not None
        ]
        self.lanes = list(dict.fromkeys(lane for _, lane, _ in self.board.inbounds))
        """That of collectives, and that of messages."""
        self.segment = SharedSegment(0, 2 * SLOT_BYTES)
        self.log = self.board.log(self.lanes[0], (0, 1))
        self.log.add(self.stamps[0])

    def suffer(self, content: bytes) -> None:
        """Take in these bytes and the end of the connection; raises what a call of the program would."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.theirs.setblocking(False)
            self.theirs.sendall(content)
        self.theirs.close()  # also for what rank 0 would write: nothing of it is read
        for work in self.works:
            work.wait()

    def close(self) -> None:
        self.theirs.close()
        self.board.drop()
        self.segment.close()


def honest(victim: Victim, chance: random.Random) -> bytes:
    """A frame like those that a rank sends. Some of its fields fit what rank 0 waits for."""
    kind = chance.choice(KINDS)
    digest = chance.choice([*victim.digests, 7])
    total = chance.choice([0, 16, 2048, 4096, LARGE, 1 << 62])
    length = chance.choice([0, 8, 16, 1024, 2048, 4096])
    flags = chance.choice([0, 0, ASKS, IN_SLOT, IN_PLACE, BY_GLOO, 255])
    payload = {
        FrameKind.SIGNATURE: b"a text",
        FrameKind.STATUS: Status(operation="exchange", purpose="x", awaited=(0, chance.choice([1, 9]))).packed(),
        FrameKind.FAILED: ChannelVerdict(fact="rank 1 is tired", culprit=chance.choice([1, None])).packed(),
        FrameKind.CALLS: packed_calls({victim.log.lane: victim.log.last()}),
        FrameKind.WHERE: Whereabouts(
            rank=1, host="node", call="x", awaited=(0,), seconds=1.0, lines=("a.py:1",)
        ).packed(),
        FrameKind.CHUNK: PLACE.pack(chance.choice([0, 3, 4096, 1 << 63]))
        if flags & (IN_PLACE | BY_GLOO)
        else bytes(length),
    }.get(kind, b"")
    return frame(
        kind,
        flags=flags,
        segment=chance.choice([0, 0, 1, 65535]),
        slot=chance.choice([0, 0, 1, 15, 16, 1 << 31]),
        lane=chance.choice([*victim.lanes, 5]),
        digest=digest,
        offset=chance.choice([0, 0, SLOT_BYTES, 4096, 1 << 63]),
        total=total,
        number=chance.choice([0, 0, 1, 2, 1 << 31]),
        payload=payload,
    )


def nonsense(victim: Victim, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice([1, 48, 200]))


def nested(victim: Victim, chance: random.Random) -> bytes:
    """Texts of JSON that are no text, or none of ours."""
    kind = chance.choice([FrameKind.STATUS, FrameKind.FAILED, FrameKind.SIGNATURE, FrameKind.CALLS, FrameKind.WHERE])
    texts: list[bytes] = [
        b"[" * 50_000,
        b'{"a": 1}',
        b"[1, 2, 3]",
        b'["a", "b", [[1]]]',
        b'["a", "b", [true]]',
        b'["a", "b", "c"]',
        b'["a", {}]',
        b'["a", 1.5]',
        b"9" * 5000,
        b"\xff\xfe",
        b"",
    ]
    return frame(kind, payload=chance.choice(texts))


def rounds(num_frames: int) -> collections.Counter[str]:
    """How often a rank ended for which reason, with so many frames."""
    chance = random.Random(16)
    sent, reasons = 0, collections.Counter[str]()
    while sent < num_frames:
        victim = Victim(local=chance.random() < 0.7)
        # Texts and memory that are announced rightly: without them nearly every frame would be refused at once.
        announced = b"".join(frame(FrameKind.SIGNATURE, digest=digest, payload=b"a call") for digest in victim.digests)
        content, count = announced if chance.random() < 0.9 else b"", chance.randrange(1, 24)
        if chance.random() < 0.5:
            announcement = frame(
                FrameKind.SEGMENT, segment=0, total=chance.choice([victim.segment.num_bytes, 1 << 40, 0])
            )
            socket.send_fds(victim.theirs, [announcement], [victim.segment.descriptor])
        for _ in range(count):
            make = chance.choices([honest, nonsense, nested], [18, 1, 1])[0]
            content += mutated(make(victim, chance), chance, changes=(0, 0, 1, 1, 2, 8))
        sent += count
        with pytest.raises((PeerError, CallMismatchError)) as caught:
            victim.suffer(content)
        victim.close()
        told = str(caught.value)
        (reason,) = [each for each in REASONS if each in told][:1] or [told]
        reasons[reason] += 1
    # The last words of a rank are shown as they come, so a few are mutated words.
    assert sum(reasons[each] for each in REASONS) >= 0.95 * reasons.total()
    return reasons


@pytest.mark.parametrize("num_frames", [2_000, pytest.param(20_000, marks=pytest.mark.stress)])
def test_a_rank_survives_any_frames_within_bounded_memory(num_frames: int) -> None:
    gc.collect()
    before = len(shared_descriptors())
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reasons = rounds(num_frames)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 << 10
    assert all(reasons[each] for each in REASONS[:2])
    gc.collect()  # errors hold their frames
    assert len(shared_descriptors()) <= before


@pytest.mark.parametrize(
    "say",
    [
        lambda victim: frame(FrameKind.CONSUMED, segment=0, slot=0) * 3,
        lambda victim: frame(FrameKind.CONSUMED, segment=0, slot=15),  # free
        lambda victim: frame(FrameKind.CREDIT, lane=victim.lanes[0], number=0) * 9,
        lambda victim: frame(FrameKind.ANSWER, lane=victim.lanes[1], number=0) * 2,
        lambda victim: frame(FrameKind.CHUNK, lane=victim.lanes[0], digest=99, payload=b"never announced", total=15),
        lambda victim: frame(FrameKind.SEGMENT, segment=1, total=4096),  # without a descriptor
        lambda victim: (  # fewer bytes than every rank puts into a chunk
            frame(FrameKind.SIGNATURE, digest=victim.digests[0], payload=b"a call")
            + frame(FrameKind.CHUNK, lane=victim.lanes[0], digest=victim.digests[0], total=LARGE, payload=bytes(16))
        ),
        lambda victim: frame(FrameKind.STATUS, payload=json.dumps(["exchange", "x", [7]]).encode()),
        lambda victim: FORMAT.pack(FrameKind.CHUNK, 0, 0, 0, 0, 0, 0, 0, 0, 1 << 31),
        lambda victim: FORMAT.pack(77, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        lambda victim: b"GET / HTTP/1.1\r\nHost: anybody\r\nAccept: everything\r\n\r\n",
        lambda victim: b"\xff" * 200,
        lambda victim: FORMAT.pack(FrameKind.SEGMENT, 0, 5, 0, 0, 0, 0, 1 << 62, 0, 0),
        lambda victim: FORMAT.pack(FrameKind.CHUNK, IN_PLACE, 9, 9, 1, 1, 0, 9, 0, 3) + b"abc",
        lambda victim: frame(FrameKind.FAILED, payload=b"null"),
    ],
)
def test_what_does_not_fit_is_told_as_the_senders_fault(say: Callable[[Victim], bytes]) -> None:
    victim = Victim(local=True)
    with pytest.raises(
        PeerError, match=r"rank 1 sent a frame of kind \d+ .*; its connection is broken, or it runs ano"
    ):
        victim.suffer(say(victim))
    victim.close()


def test_a_message_of_another_size_than_its_place_is_the_senders_fault() -> None:
    """Equal stamps and another size: only a rank that is broken says so."""
    for place in (0, 1):
        victim = Victim(local=True)
        content = b"".join(
            frame(FrameKind.SIGNATURE, digest=digest, payload=b"a call")
            + frame(FrameKind.CHUNK, lane=victim.lanes[0], digest=digest, number=at, total=16, payload=bytes(16))
            for at, digest in enumerate(victim.digests[: place + 1])
            if at == place or not place
        )
        with pytest.raises(PeerError, match="rank 1 sent 16 bytes at 0 for"):
            victim.suffer(content)
        victim.close()


def test_a_place_in_memory_that_means_nothing_is_the_senders_fault() -> None:
    victim = Victim(local=True)
    for place in (b"[0, 5]", b"[", b"[" * 50_000, b'["a", -1]', b"[[], 0]", b"7"):
        with pytest.raises(PeerError, match="rank 1 sent a place in its memory that means nothing"):
            victim.board.memory_of(1, place, 8)
    victim.close()


def flood(victim: Victim) -> None:
    for _ in range(9):
        socket.send_fds(victim.theirs, [bytes(1)], [victim.segment.descriptor] * 8)
        victim.board.check(Signature(operation="exchange", purpose="words"))
    victim.suffer(b"")


def test_descriptors_without_frames_are_refused() -> None:
    victim = Victim(local=True)
    with pytest.raises(PeerError, match="rank 1 sent 72 descriptors without their frames"):
        flood(victim)
    victim.close()
