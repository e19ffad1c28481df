"""Files that rank 0 sees late, as on network file systems, and failures of savers, which are told once."""

import errno
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, saving
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Operation, T, Watched


class Late(Watched):
    """Rank 0 sees the file of rank 1 some time after it has looked for it first; short at first, then whole."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(LocalStore(path))
        self._seconds = seconds
        self._since: float | None = None

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind == "open" and operation.name.endswith("rank00001.safetensors"):
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since < self._seconds:
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
def test_a_file_that_is_seen_late_is_waited_for_and_nobody_seems_stuck(how: str, tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        save(Late(tmp_path, 0.6) if channel.rank == 0 else LocalStore(tmp_path), channel, how)

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
        each in told[0] for each in ("save to storage that all ranks share", "the storage of saves is not shared")
    )
    assert not [each for each in tmp_path.rglob("*") if each.name.endswith((".safetensors", "manifest.json"))]


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
