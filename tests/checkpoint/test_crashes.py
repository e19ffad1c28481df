"""A save that dies or fails at any operation on the store leaves a newest save that is whole: the old or the new one.

Death and failure are those of a store double; a process cannot tell a file that was synced from one that was not, so
that syncing is left out here.
"""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, background, safetensors_files, saving, windows
from shardwise.checkpoint.saves import list_saves
from shardwise.checkpoint.stores import Store
from shardwise.comm import Channel
from shardwise.errors import CheckpointError, PeerError, ShardwiseError
from tests.checkpoint.faulty import Counting, Died, DyingAt, FailingAt, Mode, Operation, T, Watched
from tests.checkpoint.small_states import contents, loaded, rubbish, same, share_of_state, whole_state
from tests.covering import pairwise

How = Literal["sync", "async"]
OLD, NEW, NEXT = 1, 2, 3

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die as well


@pytest.fixture(autouse=True)
def _many_small_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(safetensors_files, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(windows, "WINDOW_BYTES", 80)
    monkeypatch.setattr(saving, "BLOCK_BYTES", 32)
    # Rank 0 hears at the next meeting that another rank has failed: a second at each of hundreds of failures.
    monkeypatch.setattr(background, "_MEETING_SECONDS", 0.01)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed save, what somebody left in its folder who was too late, and a torn save."""
    path = tmp_path_factory.mktemp("before") / "saves"
    checkpoint.save(path, whole_state(OLD), extra={"state": OLD})
    checkpoint.save(path, whole_state(NEW))
    (path / "save-00000002/manifest.json").unlink()
    (path / "save-00000001/0badc0de-rank00000.safetensors").write_bytes(b"too late")
    return path


def save(
    path: Path, doubles: list[Store], layout: Literal["pieces", "whole"], how: How, *, seed: int = NEW
) -> list[BaseException | None]:
    """One save by as many ranks as there are stores; what each rank got: None, or the error."""
    size = len(doubles)
    errors: list[BaseException | None] = [None] * size

    def run(channel: Channel) -> None:
        store, state = doubles[channel.rank], share_of_state(whole_state(seed), channel.rank, size)
        try:
            if how == "sync":
                sw.save(store, state, extra={"state": seed}, layout=layout, channel=channel)
            else:
                saver = AsyncSaver(store, layout=layout, channel=channel, timeout_seconds=20)
                saver.save(state, extra={"state": seed})
                if isinstance(store, DyingAt) and store.dead:
                    raise Died("noticed after the save was begun")
                saver.wait()
        except BaseException as error:
            errors[channel.rank] = error
            raise

    with contextlib.suppress(Died, ShardwiseError):
        sw.simulate(size, run, timeout_seconds=15)
    for thread in threading.enumerate():
        if thread.name == "shardwise-save":
            thread.join()
    return errors


def operations_of(path: Path, size: int, layout: Literal["pieces", "whole"], how: How) -> list[list[Operation]]:
    """What each rank does to the store in a save on top of `path`, which is a copy."""
    stores = [Counting(LocalStore(path)) for _ in range(size)]
    assert save(path, [*stores], layout, how) == [None] * size
    return [store.operations for store in stores]


def check_after_a_death(path: Path, errors: list[BaseException | None]) -> None:
    """Either state, whole, is the newest; torn saves are named; the next save removes all that is no save's."""
    found, extra = loaded(path)
    assert extra["state"] in (OLD, NEW)
    assert same(found, whole_state(OLD if extra["state"] == OLD else NEW))
    if None in errors:
        assert extra["state"] == NEW
    report = checkpoint.verify(path)
    assert report.good
    assert ("save-00000002 is torn" in "\n".join(report.notes)) == (
        extra["state"] == OLD and (path / "save-00000002").exists()
    )
    checkpoint.save(path, whole_state(NEXT), extra={"state": NEXT})
    assert same(loaded(path)[0], whole_state(NEXT))
    assert rubbish(path) == []


WAYS = ("pieces", "whole"), ("sync", "async")


@pytest.mark.parametrize(("size", "mode", "layout", "how"), pairwise((1, 3), ("before", "half", "after"), *WAYS))
def test_death_at_any_operation_of_all_ranks_leaves_the_old_save_or_the_new(
    size: int, mode: Mode, layout: Literal["pieces", "whole"], how: How, before: Path, tmp_path: Path
) -> None:
    operations = operations_of(shutil.copytree(before, tmp_path / "counted"), size, layout, how)
    num_deaths = 0
    for n in range(1, max(map(len, operations)) + 30):
        kinds = {each[n - 1].kind for each in operations if n <= len(each)}
        if mode == "half" and "write" not in kinds:
            continue  # only writes have halves
        path = shutil.copytree(before, tmp_path / f"{n}")
        doubles = [DyingAt(LocalStore(path), n, mode=mode) for _ in range(size)]
        errors = save(path, [*doubles], layout, how)
        num_deaths += any(double.dead for double in doubles)
        check_after_a_death(path, errors)
        shutil.rmtree(path)
        if not any(double.dead for double in doubles):
            assert errors == [None] * size
            break
    else:
        assert mode == "half"
    assert num_deaths >= (1 if mode == "half" else 15)


@pytest.mark.parametrize(("victim", "layout", "how"), pairwise((0, 2), *WAYS))
def test_death_of_one_rank_is_an_error_on_the_others_and_leaves_the_old_save_or_the_new(
    victim: int, layout: Literal["pieces", "whole"], how: How, before: Path, tmp_path: Path
) -> None:
    operations = operations_of(shutil.copytree(before, tmp_path / "counted"), 3, layout, how)[victim]
    for n in range(1, len(operations) + 1):
        path = shutil.copytree(before, tmp_path / f"{n}")
        mode: Mode = "half" if operations[n - 1].kind == "write" else "before"
        stores: list[Store] = [LocalStore(path) for _ in range(3)]
        stores[victim] = DyingAt(LocalStore(path), n, mode=mode)
        errors = save(path, stores, layout, how)
        for rank, error in enumerate(errors):
            if rank != victim:
                assert error is None or isinstance(error, CheckpointError | PeerError)
        check_after_a_death(path, errors)
        shutil.rmtree(path)


class Full(Watched):
    """From the n-th operation on nothing new can be written."""

    def __init__(self, store: Store, n: int) -> None:
        super().__init__(store)
        self._left = n

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        self._left -= 1
        if self._left <= 0 and operation.kind in ("begin", "write", "end", "create"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return act()


def check_after_a_failure(
    path: Path, errors: list[BaseException | None], old: dict[str, bytes], what: str, *, removable: bool
) -> None:
    """The same error on all ranks, which says what and where, and the old save; or the new save."""
    found, extra = loaded(path)
    if errors[0] is None:
        assert errors == [None] * len(errors)
        assert extra["state"] == NEW
        assert same(found, whole_state(NEW))
    else:
        assert len({(type(error), str(error)) for error in errors}) == 1
        assert isinstance(errors[0], CheckpointError)
        assert what in str(errors[0])
        assert str(path) in str(errors[0])
        said = str(errors[0]).lower()
        assert "nothing was committed" in said or "report.json cannot be read" in said
        assert extra["state"] == OLD
        assert same(found, whole_state(OLD))
        now = contents(path)
        assert {name: now.get(name) for name in old} == old
        assert not removable or now == old
    assert checkpoint.verify(path).good
    checkpoint.save(path, whole_state(NEXT), extra={"state": NEXT})
    assert same(loaded(path)[0], whole_state(NEXT))
    assert rubbish(path) == []


@pytest.mark.parametrize(("victim", "layout", "how"), pairwise((0, 1), *WAYS))
def test_a_failure_of_any_operation_is_told_to_all_ranks_and_leaves_nothing(
    victim: int, layout: Literal["pieces", "whole"], how: How, before: Path, tmp_path: Path
) -> None:
    size, old = 2, contents(before)
    operations = operations_of(shutil.copytree(before, tmp_path / "counted"), size, layout, how)[victim]
    codes = [errno.ENOSPC, errno.EACCES, errno.EIO]
    for n in range(1, len(operations) + 1):
        path = shutil.copytree(before, tmp_path / f"{n}")
        code = codes[n % 3]
        stores: list[Store] = [LocalStore(path) for _ in range(size)]
        stores[victim] = FailingAt(stores[victim], n, OSError(code, os.strerror(code)))
        errors = save(path, stores, layout, how)
        check_after_a_failure(path, errors, old, os.strerror(code), removable=True)
        shutil.rmtree(path)


@pytest.mark.parametrize(("victim", "layout", "how"), pairwise((0, 1), *WAYS))
def test_a_disk_that_stays_full_is_told_to_all_ranks_and_leaves_nothing(
    victim: int, layout: Literal["pieces", "whole"], how: How, before: Path, tmp_path: Path
) -> None:
    size, old = 2, contents(before)
    operations = operations_of(shutil.copytree(before, tmp_path / "counted"), size, layout, how)[victim]
    for n in range(1, len(operations) + 1):
        path = shutil.copytree(before, tmp_path / f"{n}")
        stores: list[Store] = [LocalStore(path) for _ in range(size)]
        stores[victim] = Full(stores[victim], n)
        errors = save(path, stores, layout, how)
        what = "No space left on device" if how == "sync" or victim == 0 else ""
        check_after_a_failure(path, errors, old, what, removable=True)
        shutil.rmtree(path)


class LosingAnswers(Watched):
    """Creating the manifest takes effect, but the answer is an error."""

    def __init__(self, store: Store, error: OSError) -> None:
        super().__init__(store)
        self._error = error

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        result = act()
        if operation.kind == "create" and operation.name.endswith("manifest.json"):
            raise self._error
        return result


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_commit_whose_answer_is_lost_stays_committed(how: How, before: Path, tmp_path: Path) -> None:
    path = shutil.copytree(before, tmp_path / "saves")
    lost = LosingAnswers(LocalStore(path), OSError(errno.EIO, os.strerror(errno.EIO)))
    errors = save(path, [lost, LocalStore(path)], "pieces", how)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert isinstance(errors[0], CheckpointError)
    assert f"{path}/save-00000002/manifest.json was created, then the store failed: Input/output error" in str(
        errors[0]
    )
    assert same(loaded(path)[0], whole_state(NEW))
    assert checkpoint.verify(path).good


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_store_that_created_and_asked_again_has_saved(how: How, before: Path, tmp_path: Path) -> None:
    path = shutil.copytree(before, tmp_path / "saves")
    again = LosingAnswers(LocalStore(path), FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)))
    assert save(path, [again, LocalStore(path)], "pieces", how) == [None, None]
    assert same(loaded(path)[0], whole_state(NEW))
    assert rubbish(path) == []


@pytest.mark.parametrize("mode", ["before", "after"])
def test_death_at_any_operation_of_a_pruning_leaves_the_newest_saves_and_the_next_save_cleans_up(
    mode: Mode, before: Path, tmp_path: Path
) -> None:
    three = shutil.copytree(before, tmp_path / "three")
    for seed in (NEW, NEXT):
        checkpoint.save(three, whole_state(seed))
    for n in range(1, 100):
        path = shutil.copytree(three, tmp_path / f"{n}")
        store = DyingAt(LocalStore(path), n, mode=mode)
        with contextlib.suppress(Died):
            checkpoint.prune(store, keep=1)
        assert same(loaded(path)[0], whole_state(NEXT))
        for number in list_saves(LocalStore(path)).committed:
            assert checkpoint.verify(path / f"save-0000000{number}").good
        checkpoint.save(path, whole_state(NEW))
        assert rubbish(path) == []
        if not store.dead:
            break
    assert 6 < n < 99


def test_a_torn_save_alone_is_no_checkpoint_and_is_named(before: Path, tmp_path: Path) -> None:
    path = shutil.copytree(before, tmp_path / "saves")
    (path / "save-00000001/manifest.json").unlink()
    shutil.rmtree(path / "save-00000002")
    for look in (loaded, checkpoint.verify, checkpoint.open):
        with pytest.raises(CheckpointError) as caught:
            look(path)
        for said in (
            "holds no committed save",
            "save-00000001 (3 files)",
            "the next successful save removes it",
        ):
            assert said in str(caught.value)
    checkpoint.save(path, whole_state(NEXT))
    assert rubbish(path) == []
    assert same(loaded(path)[0], whole_state(NEXT))
