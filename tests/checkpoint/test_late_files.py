"""Files that rank 0 sees late, as on network file systems, and failures of savers, which are told once."""

import errno
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, background, saving
from shardwise.checkpoint.commit import Attempt, discard
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Operation, T, Watched


class Shortened:
    """A file without its last byte, as a network file system may show it."""

    def __init__(self, reader: checkpoint.Reader) -> None:
        self.size = reader.size - 1
        self.close = reader.close


class Late(Watched):
    """Rank 0 sees the file of rank 1 some time after it has looked for it first, or first a part of it."""

    def __init__(self, path: Path, seconds: float, *, in_part: bool = False) -> None:
        super().__init__(LocalStore(path))
        self._seconds = seconds
        self._in_part = in_part
        self._since: float | None = None

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind == "open" and operation.name.endswith("rank00001.safetensors"):
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since < self._seconds:
                if self._in_part:
                    return cast("T", Shortened(cast("checkpoint.Reader", act())))
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", operation.name)
        return act()


class Full(Watched):
    """No file can be begun."""

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind == "begin":
            raise OSError(errno.ENOSPC, "No space left on device")
        return act()


def half_of(channel: Channel) -> dict[sw.Piece, torch.Tensor]:
    piece = sw.Piece(name="w", dtype="float32", global_shape=(4,), offset=(2 * channel.rank,), shape=(2,))
    return {piece: torch.full((2,), float(channel.rank))}


def save(store: checkpoint.Store, channel: Channel, how: str, *, timeout_seconds: float = 600.0) -> None:
    if how == "at once":
        sw.save(store, half_of(channel), channel=channel)
        return
    with AsyncSaver(store, channel=channel, timeout_seconds=timeout_seconds) as saver:
        saver.save(half_of(channel))


HOW = pytest.mark.parametrize("how", ["at once", "in background"])


@HOW
@pytest.mark.parametrize("in_part", [False, True])
def test_a_file_that_is_seen_late_is_waited_for_and_nobody_seems_stuck(how: str, in_part: bool, tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        save(Late(tmp_path, 0.6, in_part=in_part) if channel.rank == 0 else LocalStore(tmp_path), channel, how)

    sw.simulate(2, run, timeout_seconds=0.4 if how == "at once" else 60.0)
    assert checkpoint.verify(tmp_path).good
    assert checkpoint.open(tmp_path).read("w").tolist() == [0, 0, 1, 1]


@HOW
def test_storage_that_is_not_shared_is_named_after_a_while_on_all_ranks(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "VISIBLE_SECONDS", 0.2)
    told: list[str] = []

    def run(channel: Channel) -> None:
        try:
            save(LocalStore(tmp_path / str(channel.rank)), channel, how, timeout_seconds=0.2)
        except CheckpointError as error:
            told.append(str(error))

    sw.simulate(2, run)
    assert len(told) == 2
    assert len(set(told)) == 1
    assert any(
        each in told[0] for each in ("Save to storage that all ranks share", "the storage of saves is not shared")
    )
    assert not [each for each in tmp_path.rglob("*") if each.name.endswith((".safetensors", "manifest.json"))]


def test_a_file_that_stays_in_parts_is_an_error_on_all_ranks_and_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "VISIBLE_SECONDS", 0.1)

    def run(channel: Channel) -> str:
        store = Late(tmp_path, 600.0, in_part=True) if channel.rank == 0 else LocalStore(tmp_path)
        with pytest.raises(CheckpointError) as raised:
            save(store, channel, "at once")
        return str(raised.value)

    first, second = sw.simulate(2, run)
    assert first == second
    assert re.search(
        r"rank 1 has written .*, but rank 0 does not find all of it there \(it has \d+ bytes instead", first
    )
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {1, 2}])
def test_a_failure_in_the_background_is_told_once_by_those_who_met_it(bad: set[int], tmp_path: Path) -> None:
    told: list[str] = []

    def run(channel: Channel) -> None:
        store = Full(LocalStore(tmp_path)) if channel.rank in bad else LocalStore(tmp_path)
        pieces = {
            sw.Piece(name=name, dtype="float32", global_shape=(2,)): torch.ones(2) for name in [f"w{channel.rank}"]
        }
        saver = AsyncSaver(store, channel=channel)
        saver.save(pieces)
        try:
            saver.wait()
        except CheckpointError as error:
            told.append(str(error))
        saver.close()  # says nothing any more

    sw.simulate(3, run)
    assert len(told) == 3
    assert len(set(told)) == 1
    lines = told[0].splitlines()
    assert [line.split(":")[0] for line in lines] == [f"rank {rank}" for rank in sorted(bad)]
    assert told[0].count("No space left on device") == len(bad)
    assert "training stopped" not in told[0]


class Slow(Watched):
    """The writer of this rank has begun its file, and goes on once rank 0 has failed and has removed what it may."""

    def __init__(self, path: Path, go: threading.Event) -> None:
        super().__init__(LocalStore(path))
        self._go = go

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind == "write":
            assert self._go.wait(60.0)
        return act()


def test_a_rank_that_still_writes_when_rank_0_fails_has_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, go = [], threading.Event()

    def discarding(store: checkpoint.Store, attempt: Attempt, rank: int | None) -> None:
        discard(store, attempt, rank)
        go.set()

    monkeypatch.setattr(background, "discard", discarding)

    def run(channel: Channel) -> None:
        saver = AsyncSaver(Slow(tmp_path, go) if channel.rank else Full(LocalStore(tmp_path)), channel=channel)
        saver.save({sw.Piece(name=f"w{channel.rank}", dtype="float32", global_shape=(2,)): torch.ones(2)})
        with pytest.raises(CheckpointError) as raised:
            saver.wait()
        told.append(str(raised.value))
        saver.close()

    sw.simulate(3, run)
    assert [line.split(":")[0] for line in told[0].splitlines()] == ["rank 0"]
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
