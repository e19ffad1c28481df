"""Which saves stay, what is refused for lack of room, and what a saver says of a save in the background."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, local
from shardwise.checkpoint.saves import list_saves
from shardwise.checkpoint.stores import Store
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Operation, T, Watched
from tests.checkpoint.small_states import rubbish, save_state, share_of_state, whole_state


def steps(path: Path) -> list[int | None]:
    return [checkpoint.open(path / f"save-{number:08d}").step for number in list_saves(LocalStore(path)).committed]


def test_the_newest_and_each_so_many_steps_stay(tmp_path: Path) -> None:
    for seed in range(1, 7):
        save_state(tmp_path, seed)  # of step 10 * seed
    sw.save(tmp_path, whole_state(7))  # of no step
    sw.save(tmp_path, whole_state(8), step=65)
    assert checkpoint.prune(tmp_path, keep=1, keep_every=20) == [f"save-{n:08d}" for n in (1, 3, 5, 7)]
    assert steps(tmp_path) == [20, 40, 60, 65]
    assert checkpoint.prune(tmp_path, keep=1, keep_every=20) == []
    assert checkpoint.prune(tmp_path, keep=1, keep_every=40) == ["save-00000002", "save-00000006"]


def test_nothing_is_removed_for_a_save_whose_files_lack_bytes(tmp_path: Path) -> None:
    for seed in range(1, 5):
        save_state(tmp_path, seed)
    for number in (3, 4):
        data = next((tmp_path / f"save-{number:08d}").glob("*.safetensors"))
        data.write_bytes(data.read_bytes()[:-1])
    assert all(checkpoint.prune(tmp_path, keep=keep) == [] for keep in (4, 5, 6, 7, 8))
    assert checkpoint.prune(tmp_path, keep=1) == ["save-00000001"]
    assert checkpoint.verify(tmp_path / "save-00000002").good
    assert len(list_saves(LocalStore(tmp_path)).committed) == 3


class Counted:
    """A state that counts its steps, as an engine does."""

    def __init__(self, state: dict[sw.Piece, torch.Tensor]) -> None:
        self._state = state
        self.steps = 0

    def state(self) -> dict[sw.Piece, torch.Tensor]:
        return self._state


@pytest.mark.parametrize("how", ["at once", "in the background"])
def test_saves_of_an_engine_have_its_steps_where_retention_goes_by_them(how: str, tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        counted = Counted(share_of_state(whole_state(1), channel.rank, 2))
        with AsyncSaver(tmp_path, channel=channel, keep=1, keep_every=2) as saver:
            for counted.steps in range(1, 6):
                if how == "at once":
                    sw.save(tmp_path, counted, channel=channel, keep=1, keep_every=2)
                else:
                    saver.save(counted)
            with pytest.raises(CheckpointError, match="this save has none; give step="):
                sw.save(tmp_path, counted.state(), channel=channel, keep=1, keep_every=2)

    sw.simulate(2, run)
    assert steps(tmp_path) == [2, 4, 5]


@pytest.mark.parametrize("how", ["at once", "in the background"])
def test_saving_removes_what_does_not_stay(how: str, tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        state = share_of_state(whole_state(1), channel.rank, 2)
        if how == "at once":
            for step in range(1, 6):
                sw.save(tmp_path, state, step=step, channel=channel, keep=1, keep_every=2)
            return
        with AsyncSaver(tmp_path, channel=channel, keep=1, keep_every=2) as saver:
            for step in range(1, 6):
                saver.save(state, step=step)

    sw.simulate(2, run)
    assert steps(tmp_path) == [2, 4, 5]
    assert rubbish(tmp_path) == []


@pytest.mark.parametrize(
    ("keep", "keep_every", "words"),
    [
        (0, None, "keep is 0, which leaves no save"),
        (True, None, "keep is True, a bool; give a whole number"),
        (1, 0, "keep_every is 0; give a number of steps"),
        (1, 2.5, "keep_every is 2.5, a float; give a whole number"),
        (None, 2, "keep_every was given without keep"),
    ],
)
def test_numbers_by_which_nothing_can_be_kept_are_refused_before_a_save(
    keep: int | None, keep_every: int | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        sw.save(tmp_path, whole_state(1), keep=keep, keep_every=keep_every)
    with pytest.raises(CheckpointError, match=words):
        AsyncSaver(tmp_path, keep=keep, keep_every=keep_every)
    assert not list(tmp_path.iterdir())


def test_a_save_that_goes_syncs_its_folder_twice_however_many_files_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        sw.simulate(
            8, lambda channel: sw.save(tmp_path, share_of_state(whole_state(1), channel.rank, 8), channel=channel)
        )
    real, synced = os.fsync, list[str]()

    def counted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    assert checkpoint.prune(tmp_path, keep=1) == ["save-00000001"]
    # The manifest before all else, and the rest. Threads of other tests may write elsewhere.
    assert [Path(each).name for each in synced if each.startswith(str(tmp_path))] == ["save-00000001"] * 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["save-00000002"]


def test_a_mount_that_says_too_little_is_tried_and_a_full_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = os.statvfs_result((4096, 4096, 1 << 30, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: said)
    for store in (tmp_path / "a", f"file://{tmp_path}/b", "memory://retention"):
        sw.save(store, whole_state(1))

    def fallocate(descriptor: int, num_bytes: int) -> None:
        if num_bytes > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(local, "fallocate", fallocate)
    with pytest.raises(
        CheckpointError, match=r"No space left on device; .* Keep fewer saves, make room, or save elsewhere"
    ):
        sw.save(tmp_path / "c", whole_state(1))
    assert not list((tmp_path / "c").rglob("*"))


class Gated(Watched):
    """Files of saves wait for the gate."""

    def __init__(self, store: Store, *, breaks: bool) -> None:
        super().__init__(store)
        self.gate = threading.Event()
        self._breaks = breaks

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind == "begin":
            assert self.gate.wait(30)
            if self._breaks:
                raise OSError(5, "Input/output error")
        return act()


@pytest.mark.parametrize("breaks", [False, True])
def test_check_waits_for_no_disk_and_says_how_a_save_ended(breaks: bool, tmp_path: Path) -> None:
    stores = [Gated(LocalStore(tmp_path), breaks=breaks and rank == 1) for rank in range(2)]

    def run(channel: Channel) -> None:
        saver = AsyncSaver(stores[channel.rank], channel=channel)
        assert saver.check() is None  # none is under way
        saver.save(share_of_state(whole_state(1), channel.rank, 2), step=3)
        assert saver.check() is None
        channel.exchange(b"", purpose="all have looked")
        for store in stores:
            store.gate.set()
        assert saver._task is not None
        if not breaks or channel.rank == 1:
            while saver._task.is_alive():
                # Rank 0 writes its manifest when rank 1 has reported, which another thread does.
                saver._task.join(0.01)
            assert saver.has_failed == breaks  # rank 0 hears of it sooner or later
        channel.exchange(b"", purpose="rank 1 has ended")
        if breaks:
            with pytest.raises(CheckpointError, match=r"rank 1: .*Input/output error"):
                saver.check()
        else:
            report = saver.check()
            assert report is not None
            assert report.step == 3
        saver.close()

    sw.simulate(2, run)
    assert list_saves(LocalStore(tmp_path)).committed == (() if breaks else (1,))
