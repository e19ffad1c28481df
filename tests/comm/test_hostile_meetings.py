"""What is read before there is a connection, and what all ranks hear: anything is taken, or refused in words."""

import random
import socket
import struct
from collections import Counter
from collections.abc import Callable

import pytest

from shardwise.comm.call_log import LoggedCall, packed_calls
from shardwise.comm.hang_report import Whereabouts
from shardwise.comm.process import connections, rendezvous
from shardwise.comm.process.frames import ChannelVerdict, FrameKind, Status
from shardwise.comm.process.handshake import HELLO, Hello
from shardwise.comm.process.relay import parsed_news
from shardwise.errors import MismatchError, PeerError
from shardwise.keepers.keeper_talk import receive_head
from tests.comm.hostile import mutated

SIZE = 4


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


@pytest.mark.parametrize("num_rounds", [300, pytest.param(10_000, marks=pytest.mark.stress)])
@pytest.mark.parametrize("read", READERS)
def test_what_is_said_before_there_is_a_connection_is_taken_or_refused(
    read: Callable[[bytes], None], num_rounds: int
) -> None:
    if read is not of_a_process:
        read(READERS[read][0])
    hostile(read, num_rounds)


NEWS = {
    FrameKind.STATUS: Status(operation="exchange", purpose="x", awaited=(0, 3)).packed(),
    FrameKind.FAILED: ChannelVerdict(fact="rank 1 is tired", culprit=1).packed(),
    FrameKind.LOST: ChannelVerdict(fact="rank 1 is gone", culprit=1).packed(),
    FrameKind.CALLS: packed_calls({5: [LoggedCall(1, 7, "exchange for 'x'")]}),
    FrameKind.WHERE: Whereabouts(rank=1, host="node", call="x", awaited=(0,), seconds=1.0, lines=("a.py:1",)).packed(),
}


def hear(num_rounds: int) -> None:
    """What a relay takes from its neighbours."""
    chance, refused = random.Random(2), Counter[FrameKind]()
    for at in range(num_rounds):
        kind = chance.choice([*NEWS])
        payload = chance.randbytes(9) if at % 8 == 0 else mutated(NEWS[kind], chance)
        try:
            parsed_news(int(kind), payload, SIZE)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
            refused[kind] += 1
    assert all(refused[kind] > num_rounds // 100 for kind in NEWS), refused


@pytest.mark.parametrize("num_rounds", [1_000, pytest.param(60_000, marks=pytest.mark.stress)])
def test_news_that_mean_nothing_are_refused_and_end_no_thread(num_rounds: int) -> None:
    hear(num_rounds)
