"""How ranks find each other: neighbours are connected once, strangers are turned away, absent ranks are named."""

import dataclasses
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.comm.process import connections, frames, rendezvous
from shardwise.comm.process.connections import Connected, connect
from shardwise.comm.process.rendezvous import Rendezvous
from shardwise.comm.process.tree import relay_neighbours
from shardwise.comm.process.world import processes
from shardwise.errors import MismatchError, PeerError, PlanError, ShardwiseError
from tests.comm.boards import in_threads, meeting


def connected(shared_memory: Sequence[bool]) -> list[Connected]:
    store = HashStore()
    size = len(shared_memory)

    def connector(rank: int) -> Callable[[], Connected]:
        return lambda: connect(meeting(rank, size, store), shared_memory=shared_memory[rank])

    return in_threads([connector(rank) for rank in range(size)])


@pytest.mark.parametrize("shared_memory", [(True,) * 9, (False,) * 9, (True, False, True, True), (False, True, False)])
def test_neighbours_have_one_link_and_memory_is_shared_where_both_allow_it(shared_memory: tuple[bool, ...]) -> None:
    found = connected(shared_memory)
    for rank, each in enumerate(found):
        assert each.kernels == found[0].kernels
        assert sorted(each.links) == relay_neighbours(rank, each.kernels)
        for other, link in each.links.items():
            assert link.rank == other
            assert link.local == (shared_memory[rank] and shared_memory[other])
    for each in found:
        each.close()


def test_no_port_is_opened_when_all_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(connections, "listen", lambda *where, **how: opened.append(1))
    for each in connected((True, True)):
        each.close()
    assert opened == []


@pytest.mark.parametrize("record", ["boot-id net:[1]", "wire format 00000000 (shardwise 9.9)\nboot-id net:[1]"])
def test_another_version_is_refused_with_both_before_a_byte_of_it_is_read(
    record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FAREWELL_SECONDS", 0.01)  # rank 1 is not there
    store = HashStore()
    PrefixStore("meeting", store).set("host/1", record)
    with pytest.raises(MismatchError) as caught:
        connect(meeting(0, 2, store), shared_memory=True)
    theirs = "wire format 00000000 (shardwise 9.9)" if "wire" in record else "an older version"
    assert f"  - rank 0: wire format {frames.WIRE} (shardwise " in str(caught.value)
    assert f"  - rank 1: {theirs}" in str(caught.value)


def refusals(meetings: Sequence[Rendezvous]) -> list[str]:
    """What each rank raises that cannot be connected to the others through TCP."""

    def refused(mine: Rendezvous) -> str:
        with pytest.raises(ShardwiseError) as caught:
            connect(mine, shared_memory=False)
        return str(caught.value)

    return in_threads([partial(refused, mine) for mine in meetings])


def test_the_reason_of_a_rank_that_cannot_start_reaches_the_others_and_no_consequence_of_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "LIFE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports = [None, range(number, number + 1), None]
        store = HashStore()
        told = refusals(
            [dataclasses.replace(meeting(r, 3, store), ports=ports[r], interface="127.0.0.1") for r in range(3)]
        )
    assert told[1].startswith(f"no port from {number} to {number} is free at 127.0.0.1")
    assert told[0] == told[2] == f"rank 1 stopped: PeerError: {told[1]}"


def test_all_ranks_name_the_one_with_another_secret() -> None:
    store = HashStore()
    told = refusals([dataclasses.replace(meeting(r, 3, store), secret=bytes([r % 2]) * 16) for r in range(3)])
    assert set(told) == {told[1]}
    # Rank 1 calls rank 0, and rank 2 calls rank 1, at the same time: the first that is turned away says it for all.
    pairs = (
        "rank 1 could not connect to ranks [0, 2] through TCP: rank 0",
        "rank 2 could not connect to ranks [0, 1] through TCP: rank 1",
    )
    assert told[1].startswith(tuple(f"{pair} cannot be reached at " for pair in pairs))
    assert told[1].endswith("is SHARDWISE_SECRET or SHARDWISE_SECRET_FILE the same on all ranks?")


def test_rank_0_stays_until_others_know_why_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask the store, which it may serve."""
    monkeypatch.setattr(rendezvous, "FAREWELL_SECONDS", 60.0)
    store = HashStore()
    first, second = meeting(0, 2, store), meeting(1, 2, store)
    first.fail("rank 0 stopped: ValueError: no")
    leaving = threading.Thread(target=first.leave, args=("ValueError: no",))
    leaving.start()
    with pytest.raises(PeerError, match="rank 0 stopped: ValueError: no") as caught:
        second.raise_if_failed("host")
    assert caught.value.rank == 0
    assert leaving.is_alive()
    second.leave("PeerError")
    leaving.join(60)
    assert not leaving.is_alive()


class CountedStore:
    """A store that counts the requests."""

    def __init__(self, store: Store) -> None:
        self.requests: list[str] = []
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self.requests.append(name)
        return getattr(self._store, name)


def requests_of_a_start(size: int, *, shared_memory: bool) -> list[int]:
    """The requests to the store per rank."""
    store = HashStore()
    counted = [CountedStore(PrefixStore("meeting", store)) for _ in range(size)]

    def connector(rank: int) -> Callable[[], None]:
        def start() -> None:
            mine = dataclasses.replace(meeting(rank, size, store), store=cast("Store", counted[rank]))
            connect(mine, shared_memory=shared_memory).close()

        return start

    in_threads([connector(rank) for rank in range(size)])
    return [len(each.requests) for each in counted]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_makes_as_many_requests_to_the_store_in_a_large_world_as_in_a_small_one(shared_memory: bool) -> None:
    few = requests_of_a_start(2, shared_memory=shared_memory)
    many = requests_of_a_start(20, shared_memory=shared_memory)
    assert max(few) == 14  # of rank 0, which collects
    assert max(many) <= 14 + 5  # a rank that waits for its connections looks again now and then


def late(meetings: Sequence[Rendezvous], key: str) -> list[tuple[str, int | None]]:
    """What ranks are told where another one never publishes."""

    def gather(mine: Rendezvous) -> tuple[str, int | None]:
        with pytest.raises(PeerError) as caught:
            mine.gather(key, "here")
        return str(caught.value), caught.value.rank

    return in_threads([partial(gather, mine) for mine in meetings])


def test_all_ranks_name_the_one_that_is_missing_and_not_the_one_that_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.comm.process.rendezvous.LIFE_SECONDS", 0.02)
    store = HashStore()
    impatient = meeting(0, 4, store, patience_seconds=0.05)
    for told, culprit in late([impatient, meeting(1, 4, store), meeting(3, 4, store)], "host"):
        assert culprit == 2
        assert told.startswith("rank 2 did not appear within 0.05 s at the start (host)")
    # A rank whose patience ends before that of rank 0 looks for itself.
    store = HashStore()
    meeting(0, 4, store).publish("host", "here")
    assert [culprit for _, culprit in late([meeting(3, 4, store, patience_seconds=0.05)], "host")] == [1]


def test_without_a_group_and_an_environment_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PlanError, match=r"lacks WORLD_SIZE, MASTER_ADDR, MASTER_PORT\. Start with torchrun"):
        processes(device=torch.device("cpu"))
