"""A save is committed by one program, when all its files are there; storage that ranks do not share is named."""

import errno
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import Address, AsyncSaver, LocalStore, Store
from shardwise.comm import Channel, alone
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Hooked, Operation, raising
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import contents, loaded, rubbish, same, save_state, whole_state


class Shortened:
    """A file without its last byte, as a network file system may show it."""

    def __init__(self, reader: checkpoint.Reader) -> None:
        self.size = reader.size - 1
        self.close = reader.close


class Late(LocalStore):
    """The file of rank 1 is seen some time after somebody has looked for it first, or first a part of it."""

    def __init__(self, path: Path, seconds: float, *, in_part: bool = False) -> None:
        super().__init__(path)
        self._seconds, self._in_part = seconds, in_part
        self._since: float | None = None

    def open(self, name: str) -> Any:
        if name.endswith("rank00001.safetensors"):
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since < self._seconds:
                if self._in_part:
                    return Shortened(super().open(name))
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return super().open(name)


def save(store: Store, channel: Channel, later: bool) -> None:
    piece = sw.Piece(name="w", dtype="float32", global_shape=(4,), offset=(2 * channel.rank,), shape=(2,))
    state = {piece: torch.full((2,), float(channel.rank))}
    if not later:
        sw.save(store, state, channel=channel)
        return
    with AsyncSaver(store, channel=channel) as saver:
        saver.save(state)


@pytest.mark.parametrize(("later", "in_part"), [(False, True), (True, False)])
def test_a_file_that_is_seen_late_is_waited_for_and_nobody_seems_stuck(
    later: bool, in_part: bool, tmp_path: Path
) -> None:
    def run(channel: Channel) -> None:
        save(LocalStore(tmp_path) if channel.rank else Late(tmp_path, 0.6, in_part=in_part), channel, later)

    sw.simulate(2, run, timeout_seconds=60.0 if later else 0.4)
    assert checkpoint.verify(tmp_path).good
    assert checkpoint.open(tmp_path).read("w").tolist() == [0, 0, 1, 1]


def test_a_file_that_stays_in_parts_is_an_error_on_all_ranks_and_no_save(tmp_path: Path) -> None:
    def run(channel: Channel) -> str:
        with pytest.raises(CheckpointError) as raised:
            save(LocalStore(tmp_path) if channel.rank else Late(tmp_path, 600.0, in_part=True), channel, False)
        return str(raised.value)

    with small_limits(seconds=0.1):
        first, second = sw.simulate(2, run)
    assert first == second
    said = r"rank 1 has written .*, but rank 0 does not find all of it there \(it has \d+ bytes instead"
    assert re.search(said, first)
    assert not list(tmp_path.rglob("manifest.json"))


def test_storage_that_is_not_shared_is_named_after_a_while_on_all_ranks(tmp_path: Path) -> None:
    def run(channel: Channel) -> str:
        with pytest.raises(CheckpointError, match="Save to storage that all ranks share") as raised:
            save(LocalStore(tmp_path / str(channel.rank)), channel, False)
        return str(raised.value)

    with small_limits(seconds=0.2):
        first, second = sw.simulate(2, run)
    assert first == second
    assert not [each for each in tmp_path.rglob("*") if each.name.endswith((".safetensors", "manifest.json"))]


def verdicts(paths: Sequence[Address], *, timeout_seconds: float = 0.3) -> list[str]:
    """What each rank is told of its path by a saver when it is made; empty where all is well."""

    def run(channel: Channel) -> str:
        try:
            AsyncSaver(paths[channel.rank], channel=channel, timeout_seconds=timeout_seconds).close()
        except CheckpointError as error:
            return str(error)
        return ""

    return sw.simulate(len(paths), run)


def test_every_rank_that_does_not_see_the_storage_is_named_to_all_with_the_way_out(tmp_path: Path) -> None:
    texts = verdicts([tmp_path / name for name in "abad"])
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


def test_storage_that_shows_files_late_is_waited_for_and_one_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    num_looks = 0

    def look(operation: Operation) -> None:
        nonlocal num_looks
        num_looks += operation.kind == "open"
        if operation.kind == "open" and num_looks < 5:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    assert verdicts([tmp_path, Hooked(LocalStore(tmp_path), look)], timeout_seconds=30) == ["", ""]
    assert num_looks == 5
    full = Hooked(LocalStore(tmp_path), raising(errno.ENOSPC, "create"))
    first, second = verdicts([full, tmp_path], timeout_seconds=600)
    assert first == second
    assert re.search("rank 0: .* cannot be created: No space left on device", first)


def save_at_once(stores: Sequence[Store], seeds: Sequence[int]) -> list[CheckpointError | None]:
    """One saver per store, each a thread that is alone; None for each that saved."""
    outcomes: list[CheckpointError | None] = [None] * len(stores)

    def run(at: int) -> None:
        try:
            sw.save(stores[at], whole_state(seeds[at]), extra={"state": seeds[at]}, channel=alone())
        except CheckpointError as error:
            outcomes[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_of_savers_that_meet_one_wins_and_the_others_say_so(tmp_path: Path) -> None:
    save_state(tmp_path, 9)
    barrier = threading.Barrier(4)

    def meet(operation: Operation) -> None:
        if operation.kind == "create" and operation.name.endswith("manifest.json"):
            barrier.wait(60)

    outcomes = save_at_once([Hooked(LocalStore(tmp_path), meet) for _ in range(4)], range(4))
    assert outcomes.count(None) == 1
    said = f"another program saved to {tmp_path} at the same time and committed save-00000002 first"
    assert all(error is None or said in str(error) for error in outcomes)
    found, extra = loaded(tmp_path)
    assert extra == {"state": outcomes.index(None)}
    assert same(found, whole_state(outcomes.index(None)))
    assert checkpoint.verify(tmp_path).good
    save_state(tmp_path, 8)
    assert rubbish(tmp_path) == []
