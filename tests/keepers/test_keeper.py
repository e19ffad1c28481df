"""The life of a keeper: whom it serves, what it holds, and when it ends. It runs as a thread here."""

import errno
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from shardwise.checkpoint.keeper_store import KeeperStore
from shardwise.keepers.keeper_host import KeeperAddress, OwnKeeper, asked
from shardwise.keepers.keeper_talk import prove_to_caller, prove_to_keeper, receive_head
from tests.keepers.keeper_threads import KeeperThreads, impatient, own_name, threads

__all__ = ["threads"]

KEY = b"the key of the program"

Own = Callable[..., OwnKeeper]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return own_name(request.node.name)


@pytest.fixture
def own(threads: KeeperThreads, name: str) -> Iterator[Own]:
    owned: list[OwnKeeper] = []

    def make(session: str = "first", patience_seconds: float = 600.0) -> OwnKeeper:
        owned.append(OwnKeeper(name, session, key=KEY, starts=True, patience_seconds=patience_seconds))
        return owned[-1]

    yield make
    for each in owned:
        each.end(stops=True)


def store_of(keeper: OwnKeeper) -> KeeperStore:
    return KeeperStore("replicas", [keeper.here], 0, timeout_seconds=60.0)


def test_it_ends_at_once_when_all_owners_have_ended_well(own: Own, threads: KeeperThreads, name: str) -> None:
    owners = [own(), own()]
    owners[0].end()
    assert owners[1].held()["bytes"] == 0  # it is there for the second
    owners[1].end()
    assert threads.end(name)


def test_it_waits_for_the_next_program_when_an_owner_was_lost(own: Own, threads: KeeperThreads, name: str) -> None:
    lost, well = own(), own()
    store = store_of(well)
    store.create("save-1/manifest", b"kept")
    store.close()
    lost.close()
    well.end()
    again = own("second")
    assert again.held()["bytes"] == 4
    assert list(threads.threads) == [name]
    again.end()  # the loss was one of the program before
    assert threads.end(name)


@pytest.mark.parametrize("why", ["no program comes back in time", "the program was stopped by hand"])
def test_it_waits_for_nobody_when(why: str, own: Own, threads: KeeperThreads, name: str) -> None:
    if "back" in why:
        own(patience_seconds=0.01).close()
    else:
        lost, stopped = own(), own()
        lost.close()
        stopped.end(stops=True)
    assert threads.end(name)


def test_without_any_owner_it_ends(threads: KeeperThreads, name: str) -> None:
    with impatient():
        threads(name)
        assert threads.end(name)


def test_another_program_is_refused_while_owners_are_there(own: Own) -> None:
    own()
    with impatient(), pytest.raises(OSError, match="another program, which still runs") as caught:
        own("other")
    assert caught.value.errno == errno.EBUSY


def test_a_writer_that_dies_leaves_no_file_and_no_memory(own: Own) -> None:
    keeper = own()
    connection = keeper.here.connect(60.0)
    asked(connection, do="write", name="torn", bytes=1 << 20)
    assert keeper.held()["bytes"] == 1 << 20
    connection.sendall(b"only a part")
    connection.close()
    while keeper.held()["bytes"]:
        time.sleep(0.001)
    store = store_of(keeper)
    assert list(store.names()) == []
    store.close()


def test_more_than_the_host_has_is_refused_before_the_first_byte(own: Own) -> None:
    keeper = own()
    store = store_of(keeper)
    with pytest.raises(OSError, match=r"do not fit in [\d,]+ bytes of free memory"):
        store.write("large", num_bytes=1 << 60).__enter__()
    assert keeper.held()["bytes"] == 0
    store.close()


def test_callers_by_tcp_know_the_key_and_so_does_the_keeper(own: Own) -> None:
    there = own().listen(["127.0.0.1"])
    with there.connect(60.0) as connection:
        assert asked(connection, do="names") == {"names": []}
    strange = KeeperAddress(addresses=there.addresses, port=there.port, key=b"another key")
    with pytest.raises(ConnectionError, match=r"is not reached at 127\.0\.0\.1"):
        strange.connect(60.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(32 + 32))  # it repeats what it gets, or anything else
        with pytest.raises(ConnectionError, match="another program than the keeper"):
            prove_to_keeper(ours, KEY)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(64))
        with pytest.raises(ConnectionError, match="does not know the key"):
            prove_to_caller(ours, KEY)


def test_where_it_listens_already_it_goes_on_listening(own: Own) -> None:
    keeper = own()
    first = keeper.listen(["127.0.0.1"])
    assert keeper.listen(["127.0.0.1"]) == first
    with pytest.raises(OSError, match=r"203\.0\.113\.1 port"):
        keeper.listen(["203.0.113.1"])  # no address of this host


def test_heads_that_are_none_close_their_connection_and_nothing_else(own: Own) -> None:
    keeper = own()
    numbers = random.Random(0)
    good = [b'{"do": "read", "start": 0, "bytes": 4}', b'{"do": "write", "name": "x", "bytes": 3}', b'{"do": "names"}']
    refused = 0
    for _ in range(500):
        text = bytearray(numbers.choice(good))
        for _ in range(numbers.randrange(1, 4)):
            text[numbers.randrange(len(text))] = numbers.randrange(256)
        with keeper.here.connect(60.0) as connection:
            length = len(text) if numbers.random() < 0.9 else numbers.randrange(1 << 32)
            connection.sendall(struct.pack(">I", length) + text)
            connection.shutdown(socket.SHUT_WR)
            try:
                while True:
                    receive_head(connection, max_bytes=1 << 16)
            except ConnectionError:
                refused += 1
    assert refused == 500
    while keeper.held()["bytes"]:  # what was announced for files that never came
        time.sleep(0.001)
