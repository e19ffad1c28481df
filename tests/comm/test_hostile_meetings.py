"""What is read before there is a connection, and what all ranks hear: anything is taken, or refused in words."""

import random
import socket
import struct
from collections import Counter
from collections.abc import Callable

import pytest

from shardwise.comm import connections, rendezvous
from shardwise.comm.call_log import LoggedCall, packed_calls
from shardwise.comm.frames import ChannelVerdict, FrameKind, Status
from shardwise.comm.handshake import HELLO, Hello
from shardwise.comm.hang_report import Whereabouts
from shardwise.comm.links import PeerLink
from shardwise.comm.relay import Relay
from shardwise.errors import MismatchError, PeerError
from shardwise.keepers.keeper_talk import receive_head

SIZE = 4
NUMBERS = [
    b"1e999",
    b"-1e999",
    b"NaN",
    b"9" * 5000,
    b"1" + b"0" * 400,
    b"null",
    b"true",
    b"[",
    b"{}",
    b'"',
    b"[" * 5000,
]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """With bytes changed, and words of JSON in other places."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 6])):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0:
                changed[at : at + 1] = chance.randbytes(1)
            case 1:
                changed[at : at + chance.randrange(4)] = chance.choice(NUMBERS)
            case 2:
                del changed[at : at + chance.randrange(1, 5)]
            case _:
                changed = changed[:at]
    return bytes(changed)


def as_text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def of_a_hello(content: bytes) -> None:
    Hello.parsed(content.ljust(HELLO.size, b"\0")[: HELLO.size])  # so many bytes are read of a caller


def of_a_host(content: bytes) -> None:
    # All in the last line: what comes before it are the versions, of which others are only told (`test_handshake`).
    versions, _, _ = RECORD.partition("\n")
    fact = f"{versions}\n{as_text(content).replace(chr(10), ' ')}"
    assert len(connections.compared_records([RECORD, fact], 0)) == 2


def of_an_address(content: bytes) -> None:
    connections.announced(as_text(content))


def of_all_ranks(content: bytes) -> None:
    assert len(rendezvous.values_in(as_text(content), 2, "host")) == 2


def of_a_process(content: bytes) -> None:
    if not rendezvous.is_gone(as_text(content)):
        raise ValueError("taken to live")


def of_a_keeper(content: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(">I", len(content)) + content)
        receive_head(ours, max_bytes=1 << 16)


RECORD = connections.packed_record(
    connections.HostRecord(kernel="k", name="node", way="10.0.0.1", store=["10.0.0.1"], has_secret=False)
)
READERS: dict[Callable[[bytes], None], tuple[bytes, tuple[type[Exception], ...]]] = {
    of_a_hello: (Hello.own(1, 0).packed, (ValueError,)),
    of_a_host: (RECORD.partition("\n")[2].encode(), (PeerError, MismatchError)),
    of_an_address: (b'[["10.0.0.1"], 4000]', (ConnectionError,)),
    of_all_ranks: (b'[["a", "b"], [0, 1]]', (PeerError,)),
    of_a_process: (rendezvous.own_record().encode(), (ValueError,)),
    of_a_keeper: (b'{"do": "read", "start": 0, "bytes": 4}', (ConnectionError,)),
}


def hostile(read: Callable[[bytes], None], num_rounds: int) -> None:
    good, kinds = READERS[read]
    chance, num_refused = random.Random(1), 0
    for at in range(num_rounds):
        try:
            read(chance.randbytes(chance.choice([0, 9, 48])) if at % 8 == 0 else mutated(good, chance))
        except kinds:
            num_refused += 1
    assert num_refused > num_rounds // 8


@pytest.mark.parametrize("read", READERS)
def test_what_is_said_before_there_is_a_connection_is_taken_or_refused(read: Callable[[bytes], None]) -> None:
    if read is not of_a_process:
        read(READERS[read][0])
    hostile(read, 200)


@pytest.mark.parametrize("read", READERS)
def test_10000_random_and_mutated_words_for_each_reader_are_taken_or_refused(read: Callable[[bytes], None]) -> None:
    hostile(read, 10_000)


NEWS = {
    FrameKind.STATUS: Status(operation="exchange", purpose="x", awaited=(0, 3)).packed(),
    FrameKind.FAILED: ChannelVerdict(fact="rank 1 is tired", culprit=1).packed(),
    FrameKind.LOST: ChannelVerdict(fact="rank 1 is gone", culprit=1).packed(),
    FrameKind.CALLS: packed_calls({5: [LoggedCall(1, 7, "exchange for 'x'")]}),
    FrameKind.WHERE: Whereabouts(rank=1, host="node", call="x", awaited=(0,), seconds=1.0, lines=("a.py:1",)).packed(),
    FrameKind.BYE: b"",
}


class Listener(Relay):
    """Rank 0, with nobody to pass anything on to."""

    def __init__(self) -> None:
        self._rank, self._size = 0, SIZE
        self._num_heard = Counter[int]()
        self.links, self._ended, self.news = {}, set(), {}

    def _tell(self) -> None:
        """To the board, which is not there."""


def hear(num_rounds: int) -> None:
    """What a relay takes from its neighbours."""
    relay, chance, refused = Listener(), random.Random(2), Counter[int]()
    for at in range(num_rounds):
        kind = chance.choice([*NEWS])
        payload = chance.randbytes(9) if at % 8 == 0 else mutated(NEWS[kind] or b"x", chance)
        link = PeerLink(rank=1, local=True)
        origin = chance.choice([1, 1, 2, 3, 0, 9, 1 << 60])
        header = (int(kind), 0, 0, 0, origin, 0, 0, 0, at + 1, len(payload))
        relay._take(link, header, payload)
        refused[kind] += bool(link.garbled)
    assert all(refused[kind] > num_rounds // 100 for kind in NEWS if kind != FrameKind.BYE), refused
    assert {kind for kind, _ in relay.news} == {*map(int, NEWS)}


def test_news_that_mean_nothing_are_the_fault_of_the_neighbour_that_passed_them_on() -> None:
    hear(300)


def test_10000_random_and_mutated_news_do_not_end_the_thread_that_passes_them_on() -> None:
    hear(60_000)
