"""Folders of saves: their order, which stay, what is read of them, and readers beside a program that removes them."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, Store, local
from shardwise.checkpoint.arrangement import arrange
from shardwise.checkpoint.saves import clean_up, list_saves
from shardwise.comm import Channel, alone
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Counting, Hooked, Operation
from tests.checkpoint.small_states import (
    contents,
    empty_state,
    loaded,
    rubbish,
    same,
    save_state,
    share_of_state,
    whole_state,
)
from tests.properties import tried


def steps(path: Path) -> list[int | None]:
    return [checkpoint.open(path / f"save-{number:08d}").step for number in list_saves(LocalStore(path)).committed]


def test_saves_of_several_layouts_lie_side_by_side_and_load_by_step_or_folder(tmp_path: Path) -> None:
    for seed, size, layout in ((1, 3, "pieces"), (2, 1, "whole"), (3, 2, "whole")):
        save_state(tmp_path, seed, size=size, layout=layout)  # type: ignore[arg-type]
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == [f"save-0000000{number}" for number in (1, 2, 3)]
    for seed in (1, 2, 3):
        for found, extra in (loaded(tmp_path, step=10 * seed), loaded(tmp_path / f"save-0000000{seed}")):
            assert same(found, whole_state(seed))
            assert extra == {"state": seed}
            assert extra.report.step == 10 * seed  # type: ignore[attr-defined]
    assert same(loaded(tmp_path)[0], whole_state(3))
    save_state(tmp_path, 4)
    checkpoint.save(tmp_path, whole_state(5), step=40)
    assert same(loaded(tmp_path, step=40)[0], whole_state(5)), "of one step the newer one"


@pytest.mark.parametrize(
    "num_tensors", [2_000, pytest.param(100_000, marks=[pytest.mark.stress, pytest.mark.timeout(600)])]
)
def test_very_many_tiny_tensors_of_two_ranks_are_saved_verified_and_loaded(num_tensors: int, tmp_path: Path) -> None:
    state = {f"layers.{at}.weight": torch.full((3,), float(at)) for at in range(num_tensors)}
    targets = [{name: torch.zeros(3) for name in state} for _ in range(2)]
    sw.simulate(2, lambda channel: sw.save(tmp_path, state, channel=channel))
    report = checkpoint.verify(tmp_path)
    assert (report.good, report.num_tensors) == (True, num_tensors)
    sw.simulate(2, lambda channel: sw.load(tmp_path, targets[channel.rank], channel=channel))
    expected = torch.stack(list(state.values()))
    assert all(torch.equal(torch.stack(list(target.values())), expected) for target in targets)


@pytest.mark.parametrize("start", [0, 1 << 19])
@pytest.mark.parametrize("num_elements", [1 << 18, (1 << 19) + 3, 1 << 20])
def test_replicas_of_a_large_run_share_its_elements_wherever_it_begins(start: int, num_elements: int) -> None:
    size = start + num_elements + 5
    ends = [(0, start), (start, start + num_elements), (start + num_elements, size)]
    before, run, after = (sw.Piece(name="w", dtype="float32", global_shape=(size,), run=each) for each in ends)
    alone_on = [[before] if start else [], [], [], [after]]
    written = arrange([*([*each, run] for each in alone_on[:3]), alone_on[3]], "pieces", block_bytes=1 << 18).written
    runs = sorted((piece.elements.start, piece.elements.stop) for rank in written for piece in rank)
    assert (runs[0][0], runs[-1][1]) == (0, size)
    assert all(stop == following for (_, stop), (following, _) in pairwise(runs))
    parts = [sum(piece.num_elements for piece in rank if piece != before) for rank in written[:3]]
    assert sum(parts) == num_elements
    assert max(parts) < num_elements or num_elements == 1 << 18, "small ones stay whole"


# Which stay


def test_what_was_begun_after_a_commit_is_not_cleaned_up_with_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, whole_state(1))
    at_work = tmp_path / "save-00000002" / "0123abcd-rank00000.safetensors"
    at_work.parent.mkdir()
    at_work.write_bytes(b"begun")
    store = LocalStore(tmp_path)
    clean_up(store, list_saves(store), 1)
    assert at_work.exists()
    clean_up(store, list_saves(store), 2)
    assert not at_work.exists()
    assert same(loaded(tmp_path)[0], whole_state(1))


def test_the_newest_and_each_so_many_steps_stay_and_numbers_go_on(tmp_path: Path) -> None:
    for seed in range(1, 7):
        save_state(tmp_path, seed)  # of step 10 * seed
    sw.save(tmp_path, whole_state(7))  # of no step
    sw.save(tmp_path, whole_state(8), step=65)
    assert checkpoint.prune(tmp_path, keep=1, keep_every=20) == [f"save-{n:08d}" for n in (1, 3, 5, 7)]
    assert steps(tmp_path) == [20, 40, 60, 65]
    assert checkpoint.prune(tmp_path, keep=1, keep_every=20) == checkpoint.prune(tmp_path, keep=9) == []
    assert checkpoint.prune(tmp_path, keep=1, keep_every=40) == ["save-00000002", "save-00000006"]
    assert checkpoint.prune(tmp_path, keep=1) == ["save-00000004"]
    save_state(tmp_path, 9)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["save-00000008", "save-00000009"]


def test_nothing_is_removed_for_a_save_that_lacks_bytes_or_cannot_be_read(tmp_path: Path) -> None:
    for seed in range(1, 6):
        save_state(tmp_path, seed)
    for number in (3, 4):
        data = next((tmp_path / f"save-{number:08d}").glob("*.safetensors"))
        data.write_bytes(data.read_bytes()[:-1])
    (tmp_path / "save-00000005/manifest.json").write_bytes(b"")
    assert all(checkpoint.prune(tmp_path, keep=keep) == [] for keep in (5, 6, 7, 8))
    assert checkpoint.prune(tmp_path, keep=1) == ["save-00000001"]
    assert checkpoint.verify(tmp_path / "save-00000002").good


class Counted:
    """A state that counts its steps, as an engine does."""

    def __init__(self, state: dict[sw.Piece, torch.Tensor]) -> None:
        self._state = state
        self.steps = 0

    def state(self) -> dict[sw.Piece, torch.Tensor]:
        return self._state


@pytest.mark.parametrize("counts", [True, False], ids=["by the steps of the state", "by the steps given"])
@pytest.mark.parametrize("later", [False, True])
def test_saving_removes_what_does_not_stay(later: bool, counts: bool, tmp_path: Path) -> None:
    def run(channel: Channel) -> None:
        held = share_of_state(whole_state(1), channel.rank, 2)
        counted = Counted(held)
        with AsyncSaver(tmp_path, channel=channel, keep=1, keep_every=2) as saver:
            for counted.steps in range(1, 6):
                state: Any = counted if counts else held
                step = None if counts else counted.steps
                if later:
                    saver.save(state, step=step)
                else:
                    sw.save(tmp_path, state, step=step, channel=channel, keep=1, keep_every=2)
            with pytest.raises(CheckpointError, match="this save has none; give step="):
                sw.save(tmp_path, held, channel=channel, keep=1, keep_every=2)

    sw.simulate(2, run)
    assert steps(tmp_path) == [2, 4, 5]
    assert rubbish(tmp_path) == []


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
    with pytest.raises(CheckpointError, match=r"No space left on device; .* Keep fewer saves, make room, or save"):
        sw.save(tmp_path / "c", whole_state(1))
    assert not list((tmp_path / "c").rglob("*"))


# Readers beside a program that keeps the newest save only


class PrunedAt(Hooked):
    """Before the n-th operation, and every `again` operations after it, a newer save replaces all others."""

    def __init__(self, path: Path, n: int, *, again: int = 10**9) -> None:
        super().__init__(LocalStore(path), self._count)
        self._path = path
        self._left, self._again = n, again
        self._lock = threading.Lock()
        self.seed = 1
        """Of the newest save."""

    def _count(self, operation: Operation) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._left = self._again
                self.seed += 1
                sw.save(self._path, whole_state(self.seed), extra={"state": self.seed}, channel=alone())
                checkpoint.prune(self._path, keep=1)


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
    "verify all": verify_all,
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


@pytest.mark.parametrize(("damage", "side"), [("cut", "a"), ("gone", "b"), ("grown", "b")])
def test_diff_does_not_call_equal_what_is_not_there(damage: str, side: str, tmp_path: Path) -> None:
    for name in "ab":
        save_state(tmp_path / name, 1, size=2)
    assert checkpoint.diff(tmp_path / "a", tmp_path / "b").equal
    file = max((tmp_path / side).rglob("*.safetensors"))
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else file.read_bytes() + b"1")
    said = rf"(?s){tmp_path / side}/save-00000001 is not as it was written.*{file.name}"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.diff(tmp_path / "a", tmp_path / "b")


def test_verify_of_all_saves_finds_what_rots_in_older_ones(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        save_state(tmp_path, seed)
    assert [report.good for report in checkpoint.verify_all(tmp_path)] == [True] * 3
    [file] = (tmp_path / "save-00000001").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (tmp_path / "save-00000002" / "manifest.json").write_text("{}")
    assert checkpoint.verify(tmp_path).good
    reports = checkpoint.verify_all(tmp_path)
    assert [(each.good, len(each.findings)) for each in reports] == [(False, 1), (False, 1), (True, 0)]


def test_the_metadata_of_a_save_is_read_once(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    store = Counting(LocalStore(tmp_path))
    load(store)
    assert sum(each.kind == "open" and each.name.endswith("manifest.json") for each in store.operations) == 1


# What saving and pruning may remove: files that savers made, of saves that never happened or that retention names


STATE = {"w": torch.arange(3.0)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one save."""
    folder = tmp_path_factory.mktemp("whole")
    sw.save(folder, STATE, step=1, channel=alone())
    return folder / "save-00000001"


NUMBERED = [f"save-{number:08d}" for number in range(1, 5)] + ["save-100000000"]
OTHER = [
    "save-00000000",
    "save-000000007",
    "save-0000003",
    "Save-00000002",
    "save-\N{FULLWIDTH DIGIT ZERO}" + "0000004",
    "save-\N{ARABIC-INDIC DIGIT ONE}0000000",
    "save-00000002 (copy)",
    "save-00000003\n",
    "save-00000001.old",
    "best",
    "latest\nof all",
]
MANIFESTS = ["manifest.json", "manifest.json", "manifest.json", "Manifest.json", "manifest.json.bak"]
USERS = [
    "notes.txt",
    ".notes.new",
    ".mine.lock",
    "deep/manifest.json",
    "deep/deadbeef-rank00000.safetensors",
    "model.pt",
]
SAVERS = ["deadbeef-rank00000.safetensors", "deadbeef-tensors-00000.json", ".manifest.json.0123456789abcdef.new"]
folders = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NUMBERED + OTHER),
        "whole": st.booleans(),
        "manifest": st.sampled_from(MANIFESTS),
        "files": st.lists(st.sampled_from(USERS + SAVERS), max_size=3),
    }
)


def build(root: Path, plan: list[dict[str, object]], whole: Path) -> None:
    for each in plan:
        folder = root / str(each["name"])
        folder.mkdir()
        if each["whole"]:
            for file in whole.iterdir():
                name = str(each["manifest"]) if file.name == "manifest.json" else file.name
                shutil.copyfile(file, folder / name)
        for name in each["files"]:  # type: ignore[attr-defined]
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"a file")


@tried(30)
@given(
    plan=st.lists(folders, max_size=6, unique_by=lambda each: each["name"]),
    keep=st.integers(1, 3),
)
def test_nothing_with_a_manifest_goes_but_what_retention_names_and_nothing_of_the_users(
    plan: list[dict[str, object]], keep: int, whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("saves")
    build(root, plan, whole)
    before = contents(root)
    report = sw.save(root, STATE, step=2, channel=alone())
    new = Path(report.location).name
    removed = checkpoint.prune(root, keep=keep)
    after = contents(root)

    good = sorted(
        (
            str(each["name"])
            for each in plan
            if each["name"] in NUMBERED and each["manifest"] == "manifest.json" and each["whole"]
        ),
        key=lambda name: int(name[5:]),
    )
    assert removed == [*good, new][:-keep]
    assert checkpoint.load(root, {"w": torch.zeros(3)}).report.step == 2
    torn = {str(each["name"]) for each in plan if each["name"] in NUMBERED and not each["whole"]}
    for name, data in before.items():
        folder, _, file = name.partition("/")
        if after.get(name) == data:
            continue
        assert name not in after, "a file was changed"
        assert folder in {*removed, *torn, *good}, f"{name!r} is gone"
        assert file in SAVERS or (folder in removed and (whole / file).exists()), f"{name!r} is gone"


@pytest.mark.parametrize("name", ["save-000000007", "save-00000002 (copy)", "best"])
def test_a_save_under_another_name_loads_by_its_path_and_outlives_others(
    name: str, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds no committed save.* holds a manifest under a name that no saver"):
        checkpoint.open(tmp_path)
    for step in (5, 6):
        sw.save(tmp_path, STATE, step=step)
    checkpoint.prune(tmp_path, keep=1)
    assert contents(tmp_path / name) == contents(whole)
    assert checkpoint.load(tmp_path / name, {"w": torch.zeros(3)}).report.step == 1
    assert checkpoint.load(tmp_path, {"w": torch.zeros(3)}).report.step == 6


def test_numbers_go_on_after_saves_that_were_renamed(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "save-000000007")
    shutil.copytree(whole, tmp_path / "SAVE-00000009")  # on some file systems this is save-00000009
    assert sw.save(tmp_path, STATE).location.endswith("/save-00000010")


def test_links_and_files_under_the_name_of_a_save_are_passed_by(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "elsewhere")
    (tmp_path / "save-00000001").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "save-00000002").symlink_to(tmp_path / "gone")
    (tmp_path / "save-00000003").write_text("a file")
    assert sw.save(tmp_path, STATE, step=5).location.endswith("/save-00000004")
    assert checkpoint.prune(tmp_path, keep=1) == []
    assert contents(tmp_path / "elsewhere") == contents(whole)
    assert (tmp_path / "save-00000003").read_text() == "a file"


def test_data_that_a_save_links_to_outlives_it(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "save-00000001")
    [file] = (tmp_path / "save-00000001").glob("*.safetensors")
    moved = file.rename(tmp_path / file.name)
    file.symlink_to(moved)
    assert checkpoint.verify(tmp_path).good
    sw.save(tmp_path, STATE)
    assert checkpoint.prune(tmp_path, keep=1) == ["save-00000001"]
    assert moved.exists()
