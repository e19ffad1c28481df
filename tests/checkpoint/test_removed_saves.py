"""Readers beside a program that saves and keeps the newest save only: they read that one, and say nothing."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import LocalStore
from shardwise.checkpoint.stores import Store
from shardwise.cli import main
from shardwise.comm import Channel
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Counting, Operation, T, Watched
from tests.checkpoint.small_states import empty_state, same, save_state, whole_state


class PrunedAt(Watched):
    """Before the n-th operation, and every `again` operations after it, a newer save replaces all others."""

    def __init__(self, path: Path, n: int, *, again: int = 10**9) -> None:
        super().__init__(LocalStore(path))
        self._path = path
        self._left = n
        self._again = again
        self._lock = threading.Lock()
        self.seed = 1
        """Of the newest save."""

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._left = self._again
                self.seed += 1
                sw.save(self._path, whole_state(self.seed), extra={"state": self.seed}, channel=alone())
                checkpoint.prune(self._path, keep=1)
        return act()


def load(store: Store, size: int = 1) -> int:
    targets = [empty_state() for _ in range(size)]

    def run(channel: Channel) -> int:
        return int(sw.load(store, targets[channel.rank], channel=channel)["state"])

    [seed] = set(sw.simulate(size, run))
    assert all(same(target, whole_state(seed)) for target in targets)
    return seed


def read(store: Store) -> int:
    catalogue = checkpoint.open(store)
    try:
        rows = catalogue.read("rows")
    except CheckpointError as error:
        if "was removed after it was opened" not in str(error):  # an open catalogue does not change
            raise
        return read(store)
    assert torch.equal(rows, whole_state(catalogue.extra["state"])["rows"])
    return int(catalogue.extra["state"])


def verify(store: Store) -> int:
    report = checkpoint.verify(store)
    assert report.good
    assert report.notes == ()
    return int(report.location[-1:])


def verify_all(store: Store) -> int:
    reports = checkpoint.verify_all(store)
    assert all(report.good for report in reports)
    return int(reports[-1].location[-1:])


def compare(store: Store) -> int:
    difference = checkpoint.diff(store, store, model_only=True)
    assert {row.finding for row in difference.tensors} <= {"values"}  # the two may be an older and a newer save
    return int(difference.b.split(" (")[0][-1:])


READERS: dict[str, Callable[[Any], int]] = {
    "load": load,
    "load by two": lambda store: load(store, 2),
    "open": read,
    "verify": verify,
    "verify --all": verify_all,
    "diff": compare,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_save_that_is_removed_at_any_instant_is_read_as_the_newer_one(reader: str, tmp_path: Path) -> None:
    save_state(tmp_path / "counted", 1)
    counting = Counting(LocalStore(tmp_path / "counted"))
    READERS[reader](counting)
    for n in range(1, len(counting.operations) + 1):
        path = tmp_path / str(n)
        save_state(path, 1)
        store = PrunedAt(path, n)
        assert READERS[reader](store) in (1, 2)
        assert store.seed == 2


def test_saves_that_go_faster_than_they_are_read_are_given_up_after_a_bounded_number(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    for reader in (load, verify):
        with pytest.raises(CheckpointError, match=r"is missing|cannot be read|No such file|was removed"):
            reader(PrunedAt(tmp_path, 3, again=1))


def test_a_folder_of_one_save_that_is_removed_says_what_is_missing(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    store = LocalStore(tmp_path / "save-00000001")
    next((tmp_path / "save-00000001").glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"rank00000\.safetensors cannot be read: No such file"):
        load(store)


def ckpt(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["ckpt", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize("damage", ["cut", "gone", "grown"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_diff_does_not_call_equal_what_is_not_there(damage: str, side: str, tmp_path: Path) -> None:
    for name in "ab":
        save_state(tmp_path / name, 1, size=2)
    assert ckpt("diff", tmp_path / "a", tmp_path / "b")[0] == 0
    file = max((tmp_path / side).rglob("*.safetensors"))
    match damage:
        case "gone":
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "grown":
            file.write_bytes(file.read_bytes() + b"1")
    code, printed = ckpt("diff", tmp_path / "a", tmp_path / "b")
    assert code == 2
    assert f"{tmp_path / side}/save-00000001 is not as it was written" in printed
    assert file.name in printed


def test_verify_of_all_saves_finds_what_rots_in_older_ones(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        save_state(tmp_path, seed)
    code, printed = ckpt("verify", tmp_path, "--all")
    assert (code, printed.count("is as it was written")) == (0, 3)
    code, printed = ckpt("verify", tmp_path)
    assert (code, "note: 2 other saves" in printed) == (0, True)
    [file] = (tmp_path / "save-00000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (tmp_path / "save-00000002" / "manifest.json").write_text("{}")
    assert ckpt("verify", tmp_path)[0] == 0
    code, printed = ckpt("verify", tmp_path, "--all")
    assert code == 1
    assert "save-00000001 is not as it was written: 1 finding" in printed
    assert "save-00000002 is not as it was written: 1 finding" in printed
    assert "save-00000003 is as it was written" in printed
    code, printed = ckpt("verify", tmp_path, "--all", "--step", 10)
    assert (code, "leave out --step" in printed) == (2, True)
    assert ckpt("verify", tmp_path / "none", "--all")[0] == 1


def test_ls_prints_names_that_hold_lines_on_one(tmp_path: Path) -> None:
    sw.save(tmp_path, {"two\nlines \x1b[31m": torch.ones(2)}, channel=alone())
    code, printed = ckpt("ls", tmp_path)
    assert code == 0
    assert r"two\nlines \x1b[31m" in printed
    assert "\x1b[31m" not in printed
    assert "two\nlines \x1b[31m" in json.loads(ckpt("ls", tmp_path, "--json")[1])["shown"]["tensors"][0]["name"]
