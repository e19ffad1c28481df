"""A conversion that dies or fails at any operation leaves an older save or the new one, a whole folder or none."""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import LocalStore, convert, safetensors_files, whole_folders, windows
from shardwise.checkpoint.destinations import FolderTarget
from shardwise.errors import CheckpointError
from tests.checkpoint.cut_tensors import save_sharded, tensors_of
from tests.checkpoint.faulty import Counting, Died, DyingAt, FailingAt, Mode, really_dying
from tests.checkpoint.small_states import rubbish, same, whole_state

To = Literal["pieces", "whole"]


@pytest.fixture
def _many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(safetensors_files, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(windows, "WINDOW_BYTES", 128)


def source_and_saves(tmp_path: Path) -> tuple[Path, Path]:
    """What is converted, and a folder with an older save."""
    checkpoint.save(tmp_path / "saves", whole_state(1), step=1)
    return save_sharded(tmp_path / "a", whole_state(2), step=2), tmp_path / "saves"


@pytest.mark.usefixtures("_many_operations")
@pytest.mark.parametrize("mode", ["before", "after", "half"])
@pytest.mark.parametrize("to", ["pieces", "whole"])
def test_death_at_any_operation_leaves_the_older_save_or_the_new(tmp_path: Path, to: To, mode: Mode) -> None:
    source, saves = source_and_saves(tmp_path)
    counting = Counting(LocalStore(shutil.copytree(saves, tmp_path / "counted")))
    convert(source, counting, to=to)
    made = 0
    for n in range(1, len(counting.operations) + 1):
        path = shutil.copytree(saves, tmp_path / f"{n}")
        with contextlib.suppress(Died):
            convert(source, DyingAt(LocalStore(path), n, mode=mode), to=to)
        step = checkpoint.open(path).step
        assert same(tensors_of(path), whole_state(step or 0))
        assert checkpoint.verify(path).good
        made += step == 2
        checkpoint.save(path, whole_state(3))
        assert rubbish(path) == []
        shutil.rmtree(path)
    assert 0 < made < len(counting.operations) - 10


@pytest.mark.usefixtures("_many_operations")
@pytest.mark.parametrize("to", ["pieces", "whole"])
def test_a_failure_of_the_store_is_told_and_leaves_the_older_save(tmp_path: Path, to: To) -> None:
    source, saves = source_and_saves(tmp_path)
    counting = Counting(LocalStore(shutil.copytree(saves, tmp_path / "counted")))
    convert(source, counting, to=to)
    told = 0
    for n in range(1, len(counting.operations) + 1):
        path = shutil.copytree(saves, tmp_path / f"{n}")
        store = FailingAt(LocalStore(path), n, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        error = None
        try:
            convert(source, store, to=to)
        except CheckpointError as raised:
            error = raised
        assert same(tensors_of(path), whole_state(1 if error else 2))
        assert error is None or "No space left on device" in str(error)
        assert error is None or rubbish(path) == []
        told += error is not None
        shutil.rmtree(path)
    assert told > 10


def _killed(source: Path, target: Path, n: int, mode: Mode, to: FolderTarget) -> None:
    """A conversion that is killed at its n-th operation on the folder that it makes."""

    class Dying(LocalStore):
        def __new__(cls, path: Path) -> Any:
            return really_dying(LocalStore(path), n, mode=mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_folders, "LocalStore", Dying)
        convert(source, target, to=to, max_shard_bytes=200)


def _is_no_checkpoint(path: Path, moved: Path) -> bool:
    """Whether nobody takes what a killed conversion left for a checkpoint; and moved, at most for the whole one."""
    for look in (checkpoint.open, checkpoint.verify, checkpoint.verify_all):
        with pytest.raises(CheckpointError, match="when it was killed: it is no checkpoint"):
            look(path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open(path.parent)
    assert "holds one: name it" not in str(caught.value)
    shutil.copytree(path, moved)
    try:
        # Killed between its last tensor and its name, it has all of them.
        return same(tensors_of(moved), whole_state(2))
    except CheckpointError:
        return True
    finally:
        shutil.rmtree(moved)


@pytest.mark.usefixtures("_many_operations")
@pytest.mark.parametrize("mode", ["before", "half"])
@pytest.mark.parametrize("to", ["hf", "dcp", "deepspeed-universal"])
def test_sigkill_at_any_operation_leaves_no_folder_or_a_whole_one(tmp_path: Path, mode: Mode, to: FolderTarget) -> None:
    source, _ = source_and_saves(tmp_path)
    parent = tmp_path / "into"
    target = parent / "model"
    forked = multiprocessing.get_context("fork")
    codes = []
    for n in range(1, 400, 1 if to == "hf" else 7):  # of many small files some
        process = forked.Process(target=_killed, args=(source, target, n, mode, to))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
        if process.exitcode == 0:
            break
        assert not target.exists()
        # Each conversion has removed what the one before it left.
        left = list(parent.iterdir())
        assert len(left) == 1
        assert _is_no_checkpoint(left[0], tmp_path / "moved")
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > (10 if to == "hf" else 4)
    assert same(tensors_of(target), whole_state(2))
    assert same(tensors_of(shutil.copytree(target, tmp_path / "copy")), whole_state(2))
    assert [each.name for each in parent.iterdir()] == ["model"]


def test_what_a_living_conversion_writes_is_left_alone(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", {"w": torch.ones(2)})
    seen: list[bool] = []

    def during(done: int, total: int) -> None:
        if not seen:
            seen.append(True)
            convert(tmp_path / "a", tmp_path / "model", to="hf")

    with pytest.raises(CheckpointError, match="a folder that holds something"):
        convert(tmp_path / "a", tmp_path / "model", to="hf", progress=during)
    assert checkpoint.verify(tmp_path / "model").good


def test_the_files_of_a_save_that_was_never_committed_are_no_model(tmp_path: Path) -> None:
    sw.save(tmp_path / "saves", {"w": torch.ones(2)})
    torn = tmp_path / "saves" / "save-00000001"
    (data,) = torn.glob("*-rank*.safetensors")
    assert checkpoint.open(data).tensors.keys() == {"w"}
    shutil.copy(data, tmp_path / data.name)
    (torn / "manifest.json").unlink()
    for path, said in ((torn, "data of a save without its manifest.json"), (data, "data of a save without")):
        with pytest.raises(CheckpointError, match=said):
            checkpoint.open(path)
    assert checkpoint.open(tmp_path / data.name).tensors.keys() == {"w"}


@pytest.mark.parametrize("fails", ["write", "create", "rename"])
def test_a_failure_while_hugging_face_files_are_made_leaves_nothing(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = source_and_saves(tmp_path)

    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner: Any = os if fails == "rename" else LocalStore
    monkeypatch.setattr(owner, fails, full)
    names = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "hf", to="hf", max_shard_bytes=200)
    assert "cannot be written: No space left on device; nothing was made there" in str(caught.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == names
