"""How ranks find each other: every pair is connected once, strangers are turned away, absent ranks are named."""

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.comm import connections, frames
from shardwise.comm.connections import connect
from shardwise.comm.links import PeerLink
from shardwise.comm.processes import processes
from shardwise.comm.rendezvous import Rendezvous
from shardwise.errors import MismatchError, PeerError, PlanError

T = TypeVar("T")


def meeting(rank: int, size: int, store: Store, *, patience_seconds: float = 20.0) -> Rendezvous:
    return Rendezvous(
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        store=PrefixStore("meeting", store),
        store_host=None,
        patience_seconds=patience_seconds,
    )


def on_threads(bodies: Sequence[Callable[[], T]]) -> list[T]:
    results: dict[int, T] = {}

    def live(number: int) -> None:
        results[number] = bodies[number]()

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [results[number] for number in range(len(bodies))]


def connected(shared_memory: Sequence[bool]) -> list[dict[int, PeerLink]]:
    store = HashStore()
    size = len(shared_memory)

    def connector(rank: int) -> Callable[[], dict[int, PeerLink]]:
        return lambda: connect(meeting(rank, size, store), shared_memory=shared_memory[rank])

    return on_threads([connector(rank) for rank in range(size)])


@pytest.mark.parametrize("shared_memory", [(True,) * 4, (False,) * 4, (True, False, True, True), (False, True, False)])
def test_every_pair_has_one_link_and_memory_is_shared_where_both_allow_it(shared_memory: tuple[bool, ...]) -> None:
    all_links = connected(shared_memory)
    for rank, links in enumerate(all_links):
        assert sorted(links) == [other for other in range(len(shared_memory)) if other != rank]
        for other, link in links.items():
            assert link.rank == other
            assert link.local == (shared_memory[rank] and shared_memory[other])
    for links in all_links:
        for link in links.values():
            link.close()


def test_no_port_is_opened_when_all_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(connections, "_listen_on_tcp", lambda: opened.append(1))
    for links in connected((True, True)):
        for link in links.values():
            link.close()
    assert opened == []


def test_strangers_are_turned_away_and_do_not_hold_up_the_others() -> None:
    store = HashStore()
    answers: list[bytes] = []

    def intrude() -> dict[int, PeerLink]:
        ours = PrefixStore("meeting", store)
        _, port = json.loads(ours.get("address/0").decode())
        right, wrong = ours.get("token/0"), b"0" * 32
        for hello in (
            b"GET / HTTP/1.1\r\n\r\n" * 4,
            connections.HELLO.pack(wrong, 1, 0),
            connections.HELLO.pack(right, 1, 1),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
                stranger.sendall(hello)
                with contextlib.suppress(ConnectionResetError):
                    answers.append(stranger.recv(100))
        return connect(meeting(1, 2, store), shared_memory=False)

    def host() -> dict[int, PeerLink]:
        return connect(meeting(0, 2, store), shared_memory=False)

    # The host waits for the record of rank 1 before it listens, so that is given in advance.
    PrefixStore("meeting", store).set("host/1", connections._record(""))
    all_links = on_threads([host, intrude])
    assert not any(answers)
    assert [sorted(links) for links in all_links] == [[1], [0]]
    for links in all_links:
        for link in links.values():
            link.close()


def test_callers_that_say_nothing_or_drip_hold_up_nobody_and_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a hello is that of the whole of it, and others are accepted meanwhile."""
    token = b"t" * connections.TOKEN_BYTES
    (listener,) = connections._listen_on_tcp(["127.0.0.1"])
    address = listener.getsockname()
    assert address[0] == "127.0.0.1"
    silent, dripping = (socket.create_connection(address) for _ in range(2))
    dripping.sendall(b"t")
    begin = time.monotonic()
    looks: list[int] = []

    def look_up(missing: Collection[int]) -> None:
        looks.append(len(missing))
        dripping.sendall(b"t")
        if len(looks) == 2:
            callers.append(threading.Thread(target=connections.say_hello, args=(ours, token, 3, 0), daemon=True))
            callers[0].start()

    ours = socket.create_connection(address)
    callers: list[threading.Thread] = []
    found = connections.accept([listener], {3}, token, 0, deadline=begin + 30, look_up=look_up)
    callers[0].join(10)
    assert list(found) == [3]
    assert time.monotonic() - begin < connections.HELLO_SECONDS
    monkeypatch.setattr(connections, "HELLO_SECONDS", 0.3)
    late = socket.create_connection(address)
    with pytest.raises(TimeoutError):
        connections.accept([listener], {4}, token, 0, deadline=time.monotonic() + 0.8, look_up=lambda missing: None)
    for stranger in (silent, dripping, late):
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    for connection in (*found.values(), silent, dripping, late, ours, listener):
        connection.close()


def test_a_stranger_on_a_unix_socket_can_hand_over_what_it_likes() -> None:
    """An empty file cannot be mapped, and mapping it is not tried for one who does not know the token."""
    token = b"t" * connections.TOKEN_BYTES
    with tempfile.TemporaryFile() as empty, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0shardwise-test-{os.getpid()}")
        listener.listen()
        for given in (token, b"f" * connections.TOKEN_BYTES):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(listener.getsockname())
            socket.send_fds(stranger, [connections.HELLO.pack(given, 1, 0)], [empty.fileno()])
            with pytest.raises(TimeoutError):
                connections.accept(
                    [listener], {1}, token, 0, deadline=time.monotonic() + 0.3, look_up=lambda missing: None
                )
            assert stranger.recv(1) == b""
            stranger.close()


@pytest.mark.parametrize("record", ["boot-id net:[1]", "wire format 00000000 (shardwise 9.9)\nboot-id net:[1]"])
def test_another_version_is_refused_with_both_before_a_byte_of_it_is_read(record: str) -> None:
    store = HashStore()
    PrefixStore("meeting", store).set("host/1", record)
    with pytest.raises(MismatchError) as caught:
        connect(meeting(0, 2, store), shared_memory=True)
    theirs = "wire format 00000000 (shardwise 9.9)" if "wire" in record else "an older version"
    assert f"  - rank 0: wire format {frames.WIRE} (shardwise " in str(caught.value)
    assert f"  - rank 1: {theirs}" in str(caught.value)


def test_a_rank_that_does_not_appear_is_named() -> None:
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 1 did not appear within 0\.3 s at the start") as caught:
        connect(meeting(0, 2, HashStore(), patience_seconds=0.3), shared_memory=True)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < 10


def test_without_a_group_and_an_environment_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PlanError, match="lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start with torchrun"):
        processes(device=torch.device("cpu"))


def test_addresses_on_the_way_to_the_store_come_first() -> None:
    assert connections._own_addresses("127.0.0.1") == ["127.0.0.1"]  # whoever meets there is on this host
    assert "127.0.0.1" in connections._own_addresses("localhost")
    assert connections._own_addresses(None)
