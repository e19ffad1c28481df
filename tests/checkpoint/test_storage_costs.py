"""What saves, prunings and conversions ask of a disk: listings, syncs, looks; counted, and on which thread."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, convert
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Hooked, Operation
from tests.checkpoint.small_states import loaded, rubbish, same, save_state, share_of_state, whole_state


class Listed(LocalStore):
    """A folder that counts the listings of all that is in it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_listings = 0

    def names(self, folder: str = "") -> Iterator[str]:
        self.num_listings += not folder
        return super().names(folder)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced, in order."""
    paths: list[str] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return paths


def test_the_folder_of_a_save_with_very_many_files_is_synced_once_when_it_goes(
    tmp_path: Path, syncs: list[str]
) -> None:
    for seed in (1, 2):
        save_state(tmp_path, seed)
    old = tmp_path / "save-00000001"
    for rank in range(1024):
        (old / f"0badc0de-rank{rank:05d}.safetensors").touch()
    syncs.clear()
    assert checkpoint.prune(tmp_path, keep=1) == ["save-00000001"]
    assert syncs == [str(old), str(tmp_path)], "its manifest goes for good first, then the folder"
    assert not old.exists()


@pytest.mark.parametrize("later", [False, True])
def test_a_save_lists_the_store_once_however_it_cleans_up_and_prunes(later: bool, tmp_path: Path) -> None:
    store = Listed(tmp_path)

    def run(channel: Channel) -> list[int]:
        counts = []
        with AsyncSaver(store, channel=channel, keep=2) as saver:
            for seed in range(1, 6):
                channel.exchange(b"", purpose="all have counted")
                begun = store.num_listings
                channel.exchange(b"", purpose="all begin to count")
                if later:
                    saver.save(share_of_state(whole_state(seed), channel.rank, 2))
                    saver.wait()
                else:
                    sw.save(store, share_of_state(whole_state(seed), channel.rank, 2), channel=channel, keep=2)
                channel.exchange(b"", purpose="all have saved")
                counts.append(store.num_listings - begun)
        return counts

    (tmp_path / "save-00000001").mkdir()
    (tmp_path / "save-00000001/0badc0de-rank00000.safetensors").touch()
    assert sw.simulate(2, run) == [[1] * 5] * 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["save-00000004", "save-00000005"]
    assert rubbish(tmp_path) == []
    assert same(loaded(tmp_path)[0], whole_state(5))


def test_a_save_in_the_background_removes_older_ones_there_and_all_are_told_where_it_cannot(tmp_path: Path) -> None:
    threads: set[str] = set()
    breaks = False

    def watch(operation: Operation) -> None:
        if operation.kind == "delete" and operation.name.endswith("manifest.json"):
            threads.add(threading.current_thread().name)
            if breaks:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def run(channel: Channel) -> str:
        nonlocal breaks
        saver = AsyncSaver(Hooked(LocalStore(tmp_path), watch), channel=channel, keep=1)
        for seed in (1, 2, 3):
            saver.save(share_of_state(whole_state(seed), channel.rank, 2))
            saver.wait()
        breaks = True
        saver.save(share_of_state(whole_state(4), channel.rank, 2))
        with pytest.raises(CheckpointError) as caught:
            saver.close()
        return str(caught.value)

    first, second = sw.simulate(2, run)
    assert threads == {"shardwise-save"}
    assert first == second == f"rank 0: {tmp_path}/save-00000003/ cannot be removed: Input/output error"
    assert same(loaded(tmp_path)[0], whole_state(4))


def test_a_folder_of_another_format_is_durable_with_the_folders_that_lead_to_it(
    tmp_path: Path, syncs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path / "saves", 1)
    syncs.clear()
    convert(tmp_path / "saves", tmp_path / "x/y/model", to="hf")
    assert syncs[-3:] == [str(tmp_path / "x/y"), str(tmp_path / "x"), str(tmp_path)]

    sync = os.fsync

    def fail(descriptor: int) -> None:
        sync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path / "x/y"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        convert(tmp_path / "saves", tmp_path / "x/y/other", to="hf")
