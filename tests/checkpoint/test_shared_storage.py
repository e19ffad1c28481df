"""Storage that not all ranks share is found when a saver is opened, before anything depends on it."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, background
from shardwise.checkpoint.commit import check_shared_storage
from shardwise.checkpoint.stores import Address
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Operation, T, Watched
from tests.checkpoint.small_states import contents, loaded, same, share_of_state, whole_state


def verdicts(paths: list[Address], *, timeout_seconds: float = 0.3, opens_saver: bool = False) -> list[str]:
    """What each rank is told of its path; empty where all is well."""

    def run(channel: Channel) -> str:
        try:
            if opens_saver:
                AsyncSaver(paths[channel.rank], channel=channel, timeout_seconds=timeout_seconds).close()
            else:
                check_shared_storage(paths[channel.rank], channel, timeout_seconds=timeout_seconds)
        except CheckpointError as error:
            return str(error)
        return ""

    return sw.simulate(len(paths), run)


@pytest.mark.parametrize("opens_saver", [False, True])
def test_every_rank_that_does_not_see_the_storage_is_named_to_all_with_the_way_out(
    opens_saver: bool, tmp_path: Path
) -> None:
    paths: list[Address] = [tmp_path / "a", tmp_path / "b", tmp_path / "a", tmp_path / "d"]
    texts = verdicts(paths, opens_saver=opens_saver)
    assert len(set(texts)) == 1
    for words in (
        f"rank 0 on {os.uname().nodename} writes to {tmp_path}/a; rank 1 on",
        ", rank 3 on",
        "do not find its file there (No such file or directory)",
        f"the folder is {tmp_path}/b there",
        "checkpoint.path",
    ):
        assert words in texts[0]
    assert "rank 2" not in texts[0]
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("address", ["{}", "file://{}", "memory://{}"])
@pytest.mark.parametrize("size", [1, 3])
def test_shared_storage_is_accepted_and_left_as_it_was(address: str, size: int, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, whole_state(1))
    before = contents(tmp_path)
    assert verdicts([address.format(tmp_path)] * size) == [""] * size
    assert contents(tmp_path) == before


class Slow(Watched):
    """A network file system that shows a new file only when it was looked for several times."""

    num_looks = 0

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind == "open":
            self.num_looks += 1
            if self.num_looks < 5:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return act()


def test_storage_that_shows_files_late_is_waited_for(tmp_path: Path) -> None:
    slow = Slow(LocalStore(tmp_path))
    assert verdicts([tmp_path, slow], timeout_seconds=30) == ["", ""]
    assert slow.num_looks == 5


class Full(Watched):
    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind == "create":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return act()


def test_storage_that_cannot_be_written_to_is_refused_by_all_ranks_at_once(tmp_path: Path) -> None:
    texts = verdicts([Full(LocalStore(tmp_path)), tmp_path], timeout_seconds=600)
    assert texts[0] == texts[1]
    assert "rank 0: " in texts[0]
    assert "cannot be created: No space left on device" in texts[0]


class Held(Watched):
    """Nothing is written before the gate opens."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store)
        self.gate = threading.Event()
        self.num_listings = 0

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        self.num_listings += operation.kind == "names"
        if operation.kind == "begin":
            assert self.gate.wait(30)
        return act()


def test_a_rank_that_is_still_writing_is_waited_for_and_one_whose_file_is_not_seen_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of `timeout_seconds` begins when the other ranks have ended, not when rank 0 has."""
    clock = SimpleNamespace(now=0.0, sleep=lambda seconds: None)
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None))
    watching, slow = Held(LocalStore(tmp_path)), Held(LocalStore(tmp_path))
    watching.gate.set()

    def run(channel: Channel) -> None:
        with AsyncSaver(slow if channel.rank else watching, channel=channel, timeout_seconds=20.0) as saver:
            saver.save(share_of_state(whole_state(1), channel.rank, 2))
            begun = watching.num_listings
            while channel.rank == 0 and watching.num_listings < begun + 5:  # its thread looks for the report
                os.sched_yield()
            clock.now += 1000.0
            while channel.rank == 0 and watching.num_listings < begun + 10:
                os.sched_yield()
            channel.exchange(b"", purpose="rank 0 would have given up long ago")
            slow.gate.set()

    sw.simulate(2, run)
    assert same(loaded(tmp_path)[0], whole_state(1))


class Unmounted(Watched):
    """Sees nothing of what other ranks write, once it is broken."""

    is_broken = False

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if self.is_broken and operation.kind == "names":
            return iter([])  # type: ignore[return-value]
        return act()


def test_storage_that_is_lost_later_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    store = Unmounted(LocalStore(tmp_path))

    def run(channel: Channel) -> None:
        saver = AsyncSaver(tmp_path if channel.rank else store, channel=channel, timeout_seconds=0.2)
        saver.save(share_of_state(whole_state(1), channel.rank, 2))
        store.is_broken = True
        saver.close()

    with pytest.raises(CheckpointError, match=r"0\.2 s have passed, and .*-rank00001\.report\.json is not there"):
        sw.simulate(2, run)
