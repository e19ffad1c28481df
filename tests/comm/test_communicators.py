"""Communicators of devices: how they are made, in which order their operations begin, and how they end."""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from shardwise.comm.device.groups import Communicator, Communicators, DeviceLine, Launch, maker
from shardwise.errors import PeerError, PlanError

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class FakeNccl:
    """What torch has as `ProcessGroupNCCL` where it is built for CUDA."""

    class Options:
        _timeout: timedelta

    def __init__(self, store: Store, rank: int, size: int, options: "FakeNccl.Options") -> None:
        self.given = rank, size, options._timeout.total_seconds(), os.environ.get(ERROR_HANDLING)


@pytest.mark.parametrize("set_before", [None, "1"])
def test_nccl_does_not_end_the_process_unless_the_user_wants_it(
    set_before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.delenv(ERROR_HANDLING, raising=False)
    if set_before is not None:
        monkeypatch.setenv(ERROR_HANDLING, set_before)
    made: Any = maker(torch.device("cuda", 0), timeout_seconds=600)(HashStore(), 1, 3)
    rank, size, timeout_seconds, during = made.given
    assert (rank, size, during) == (1, 3, set_before or "0")
    assert timeout_seconds > 600
    assert os.environ.get(ERROR_HANDLING) == set_before


@pytest.mark.parametrize("extended", [False, True])
def test_a_registered_backend_makes_its_own_communicators(extended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def create(*arguments: Any) -> str:
        given.extend(arguments)
        return "made"

    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "hpu", "hccl")
    monkeypatch.setitem(dist.Backend._plugins, "HCCL", dist.Backend._BackendPlugin(create, extended))
    store = HashStore()
    made: object = maker(torch.device("hpu"), timeout_seconds=5)(store, 1, 3)
    assert made == "made"
    if extended:
        assert (given[0].group_rank, given[0].group_size, given[1]) == (1, 3, None)
    else:
        assert given[:3] == [store, 1, 3]
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "hpu", "lost")
    with pytest.raises(PlanError, match="this torch cannot make lost communicators itself"):
        maker(torch.device("hpu"), timeout_seconds=5)


class FakeCommunicator:
    def __init__(self, name: str, ends: list[str]) -> None:
        self.name = name
        self._ends = ends

    def abort(self) -> None:
        self._ends.append(f"abort {self.name}")

    def shutdown(self) -> None:
        self._ends.append(f"shutdown {self.name}")


def launch(begun: list[tuple[int, bool]], number: int, *, fails: bool = False) -> Launch:
    """One that notes its number and whether it begins on another thread than this test's."""
    own = threading.current_thread()

    def begin(communicator: Communicator) -> Any:
        if fails:
            raise RuntimeError("the link is down")
        begun.append((number, threading.current_thread() is not own))

    def follower() -> Callable[[], None]:
        return lambda: begun.append((-number, threading.current_thread() is not own))

    return Launch(begin, follower)


def test_what_is_called_before_a_line_is_connected_begins_in_order_on_its_thread() -> None:
    may_connect = threading.Event()
    begun: list[tuple[int, bool]] = []

    def connect() -> Any:
        assert may_connect.wait(60)
        return FakeCommunicator("line", [])

    line = DeviceLine(connect)
    early = [launch(begun, number) for number in (1, 2, 3)]
    for each in early:
        line.start(each)
    assert begun == []
    may_connect.set()
    assert all(each.done.wait(60) for each in early)
    while not line.is_connected:
        threading.Event().wait(0.001)
    line.start(launch(begun, 4))
    line.start(broken := launch(begun, 5, fails=True))
    assert str(broken.error) == "the link is down"  # which its wait raises
    followed = [(sign * number, True) for number in (1, 2, 3) for sign in (-1, 1)]
    assert begun == [*followed, (4, False)]  # each follows its call; the last one is in its call


def test_a_line_that_cannot_connect_fails_all_that_is_called_on_it() -> None:
    def connect() -> Any:
        raise RuntimeError("no route")

    line = DeviceLine(connect)
    launches = [launch([], number) for number in range(3)]
    for each in launches:
        line.start(each)
        assert each.done.wait(60)
    assert [str(each.error) for each in launches] == ["no route"] * 3


def made_and_ended(end: Callable[[Communicators], None]) -> list[str]:
    ends: list[str] = []
    names = iter(["0.1/1>0", "0.1"])
    communicators = Communicators(lambda store, rank, size: FakeCommunicator(next(names), ends), HashStore())  # type: ignore[arg-type,return-value]
    communicators.connect("0.1/1>0", 0, 1)
    communicators.connect("0.1", 0, 1)
    end(communicators)
    assert communicators.has_ended
    end(communicators)  # a second end finds nothing
    return ends


def test_all_ranks_take_their_communicators_down_in_one_order() -> None:
    assert made_and_ended(Communicators.close) == ["shutdown 0.1", "shutdown 0.1/1>0"]
    assert made_and_ended(Communicators.abort) == ["abort 0.1", "abort 0.1/1>0"]


def test_a_rank_that_waits_for_another_one_to_connect_stops_when_the_channel_ends() -> None:
    communicators = Communicators(lambda store, rank, size: pytest.fail("made alone"), HashStore())
    line = DeviceLine(lambda: communicators.connect("0.1", 0, 2))
    waiting = launch([], 1)
    line.start(waiting)
    communicators.abort()
    assert waiting.done.wait(60)
    assert isinstance(waiting.error, PeerError)
    assert "the channel has ended before all ranks came" in str(waiting.error)


def test_two_ranks_that_connect_both_ways_at_once_do_not_hold_up_each_other() -> None:
    """As NCCL connects: rank 0 of a communicator publishes, and the other one waits, on a store of one connection."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = {name: threading.Event() for name in ("0>1", "1>0")}
    launches = []
    for world_rank in (0, 1):
        own = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))

        def make(store: Store, rank: int, size: int) -> Any:
            name = store.get("name").decode()
            if rank == 1:
                waiting[name].set()
                store.get("identity")
            else:
                assert all(each.wait(60) for each in waiting.values())
                store.set("identity", "")
            return FakeCommunicator(name, [])

        communicators = Communicators(make, own)
        for name in waiting:
            PrefixStore(name, own).set("name", name)

            def connect(name: str = name, made: Communicators = communicators, end: int = world_rank) -> Communicator:
                return made.connect(name, name.split(">").index(str(end)), 2)

            launches.append(launch([], 1))
            DeviceLine(connect).start(launches[-1])
    assert all(each.done.wait(60) for each in launches)
    assert [each.error for each in launches] == [None] * 4
