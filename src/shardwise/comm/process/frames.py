"""The frames that two ranks exchange over their socket: a header of 48 bytes, then `length` bytes of payload.

A message of 2.5 MiB with a new signature, from rank S to rank R on the same host::

    S -> R   SIGNATURE  digest, text              once per link: later messages name the digest alone
    S -> R   SEGMENT    number 0, a descriptor    once per link: R maps the memory in which the slots of S are
    S -> R   CHUNK      offset 0.0 MiB, slot 0    header only; the bytes are in shared memory
    S -> R   CHUNK      offset 1.0 MiB, slot 1
    R -> S   CONSUMED   slot 0                    S may write slot 0 again
    S -> R   CHUNK      offset 2.0 MiB, slot 0
    R -> S   CONSUMED   slot 1, then slot 0

Between hosts a chunk names the tag under which gloo has its bytes, and a CREDIT per chunk takes the place of CONSUMED.
Frames that all ranks are to hear also go from rank to rank (`relay`): `lane` is then the rank that says so, and
`number` counts what it has said.
The payloads that put waiting and failing into words, `Status` and `ChannelVerdict`, are defined here too.
"""

import enum
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.comm.hosts import RankNames

FORMAT = struct.Struct("<BBHIQQQQII")
"""kind, flags, segment, slot, lane, digest, offset, total, number, length."""

HELLO_FORMAT = "<8s8s32sII32s"
"""What is said before the first frame: see `handshake`."""

HEADER_BYTES = FORMAT.size
Header = tuple[int, int, int, int, int, int, int, int, int, int]

IN_SLOT = 1
"""Flag of a chunk: its bytes are in a slot of the sender's shared memory instead of following the header."""

IN_PLACE = 4
"""Flag of a chunk: its bytes are where the payload says (`PLACE`) in memory that the sender has lent to its tensors."""

BY_GLOO = 8
"""Flag of a chunk: gloo has its bytes, under the tag that the payload says (`PLACE`)."""

PLACE = struct.Struct("<Q")
"""Where a chunk begins in its segment, or its tag."""

GLOO_CHUNK_BYTES = 4 << 20
"""Bytes of a chunk that gloo carries: each wakes a thread of gloo and one of ours on both sides, whatever its size."""

JOINED = struct.Struct("<QIIH")
"""What values of an exchange begin with (`joined_values`): the sum of shares, the number of ranks, the world rank that
came last, and the number of parts."""

PART = struct.Struct("<QQ")
"""What a part of these values begins with: how many values it has, and their length."""

ASKS = 2
"""Flag of a chunk: the sender waits for an ANSWER, given once the message is matched or cannot be matched yet."""


class FrameKind(enum.IntEnum):
    """What a frame says."""

    # The numbers are the wire format: `WIRE` covers them.
    CHUNK = 1  # a part of a message: lane, number, digest, offset, total, and a slot or the bytes themselves
    SIGNATURE = 2  # the text that belongs to a digest, before its first use
    CONSUMED = 3  # a slot may be written again
    CREDIT = 4  # one chunk of the message (lane, number), received by gloo or read in place, was consumed
    ANSWER = 5  # the message (lane, number) that asked was matched, or waits while its receiver waits elsewhere
    SEGMENT = 6  # a shared memory segment of `total` bytes; its descriptor travels with the frame
    RELEASE = 7  # a segment is gone; unmap it
    STATUS = 8  # the sender has been waiting for a while: for whom and in what
    FAILED = 9  # the verdict that ended the sender's channel
    BYE = 10  # the sender closed its channel on purpose
    CALLS = 11  # the last calls of the sender on channels whose transfers are compared by digests (`call_log`)
    WHERE = 12  # where the sender is, for the report of a hang: it has not moved for long
    LOST = 13  # the verdict on a rank whose connection has ended without a word (`relay`)


# A reader takes memory for a payload before the payload has come. Without a limit, one garbled header would make it ask
# for up to 4 GiB.
MAX_PAYLOAD_BYTES = 64 << 20
"""No frame announces more: chunks are cut far below, and texts name ranks and numbers."""


# Computed, so that nobody can change a format and forget to raise a number. It cannot see what the numbers in a frame
# mean: a change of meaning needs a new `FrameKind`.
_FORMATS = (
    HELLO_FORMAT,
    FORMAT.format,
    PLACE.format,
    GLOO_CHUNK_BYTES,
    JOINED.format,
    PART.format,
    list(FrameKind),
    IN_SLOT,
    IN_PLACE,
    BY_GLOO,
    ASKS,
)
WIRE = f"{zlib.crc32(repr(_FORMATS).encode()):08x}"
"""A digest of the formats, which change between versions: ranks talk to each other only where it is the same."""


def frame(
    kind: FrameKind,
    *,
    flags: int = 0,
    segment: int = 0,
    slot: int = 0,
    lane: int = 0,
    digest: int = 0,
    offset: int = 0,
    total: int = 0,
    number: int = 0,
    payload: bytes = b"",
    length: int | None = None,
) -> bytes:
    """The bytes of one frame; `length` announces payload bytes that the caller sends itself."""
    announced = len(payload) if length is None else length
    return FORMAT.pack(kind, flags, segment, slot, lane, digest, offset, total, number, announced) + payload


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Where a rank has been waiting for a while."""

    operation: str
    purpose: str
    awaited: tuple[int, ...]
    """The world ranks it waits for."""

    def packed(self) -> bytes:
        """As the payload of a STATUS frame."""
        return json.dumps([self.operation, self.purpose, self.awaited]).encode()

    @classmethod
    def parsed(cls, payload: bytes) -> "Status":
        """From the payload of a STATUS frame. Raises ValueError or TypeError where it is none."""
        operation, purpose, awaited = json.loads(payload)
        if not all(isinstance(text, str) for text in (operation, purpose)) or {*map(type, awaited)} - {int}:
            raise TypeError("no status")
        return cls(operation=operation, purpose=purpose, awaited=tuple(awaited))


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelVerdict:
    """Why a channel has ended. The first one holds; ranks pass it on, so that all name the same culprit."""

    fact: str
    """A sentence about the culprit, without what this rank was doing."""

    # Kept apart from the fact, because `PeerError.rank` gives it to programs.
    culprit: int | None
    """World rank; None for a mismatch, which names its ranks in the fact."""
    hangs: bool = False
    """Nothing has moved for the time limit, so that a rank prints where all are."""

    def packed(self) -> bytes:
        """As the payload of a FAILED frame."""
        return json.dumps([self.fact, self.culprit, self.hangs]).encode()

    @classmethod
    def parsed(cls, payload: bytes) -> "ChannelVerdict":
        """From the payload of a FAILED frame. Raises ValueError or TypeError where it is none."""
        fact, culprit, hangs = json.loads(payload)
        if not isinstance(fact, str) or not (culprit is None or type(culprit) is int) or type(hangs) is not bool:
            raise TypeError("no verdict")
        return cls(fact=fact, culprit=culprit, hangs=hangs)


def lost(rank: int, garbled_words: str, names: RankNames) -> ChannelVerdict:
    """The verdict on a rank whose connection ended without a goodbye, or because of what it sent."""
    if garbled_words:
        return garbled(rank, garbled_words, names)
    return ChannelVerdict(fact=f"rank {names[rank]} is gone (its process died)", culprit=rank)


def closed_by(rank: int, names: RankNames) -> ChannelVerdict:
    """The verdict on a rank that is waited for, and has said goodbye."""
    return ChannelVerdict(fact=f"rank {names[rank]} has closed its channel", culprit=rank)


def unreachable(rank: int, text: str, names: RankNames) -> ChannelVerdict:
    """The verdict on a rank to which gloo has no way, although its connection here is well."""
    fact = (
        f"rank {names[rank]} cannot be reached by gloo, which moves tensors between hosts ({text}); let ports of "
        "net.ipv4.ip_local_port_range through the firewall between them"
    )
    return ChannelVerdict(fact=fact, culprit=rank)


def garbled(rank: int, what: str, names: RankNames) -> ChannelVerdict:
    """The verdict on a rank that sent what cannot be understood."""
    fact = f"rank {names[rank]} sent {what}; its connection is broken, or it runs another version of shardwise"
    return ChannelVerdict(fact=fact, culprit=rank)


def different(texts: Mapping[int, str], names: RankNames) -> ChannelVerdict:
    """The verdict on calls that meet and do not fit, by world rank."""
    lines = [f"  - rank {names[rank]}: {texts[rank]}" for rank in sorted(texts)]
    heading = "calls that meet differ; make the same calls in the same order on every rank:"
    return ChannelVerdict(fact="\n".join([heading, *lines]), culprit=None)
