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

from shardwise import checkpoint
from shardwise.checkpoint import LocalStore, convert, safetensors_files, whole_folders, windows
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


def _killed(source: Path, target: Path, n: int, mode: Mode) -> None:
    """A conversion that is killed at its n-th operation on the folder that it makes."""

    class Dying(LocalStore):
        def __new__(cls, path: Path) -> Any:
            return really_dying(LocalStore(path), n, mode=mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_folders, "LocalStore", Dying)
        convert(source, target, to="hf", max_shard_bytes=200)


@pytest.mark.usefixtures("_many_operations")
@pytest.mark.parametrize("mode", ["before", "half"])
def test_sigkill_at_any_operation_leaves_no_folder_or_a_whole_one(tmp_path: Path, mode: Mode) -> None:
    source, _ = source_and_saves(tmp_path)
    target = tmp_path / "hf"
    forked = multiprocessing.get_context("fork")
    codes = []
    for n in range(1, 40):
        process = forked.Process(target=_killed, args=(source, target, n, mode))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
        if process.exitcode == 0:
            break
        assert not target.exists()
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > 10
    assert same(tensors_of(target), whole_state(2))
    hidden = [each.name for each in tmp_path.iterdir() if each.name.startswith(".hf.")]
    assert 0 < len(hidden) < len(codes)


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
