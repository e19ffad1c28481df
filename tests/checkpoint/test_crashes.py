"""Whatever dies or fails at any operation on the store: the newest save is whole, and it is the old or the new one.

Death and failure are those of a store double. A process cannot tell a file that was synced from one that was not, so
that syncing is left out here.
"""

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import obstore.store
import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, ObjectStore, convert, destinations
from shardwise.checkpoint.conversion import ConvertTarget
from shardwise.checkpoint.saves import list_saves
from shardwise.checkpoint.stores import Store
from shardwise.comm import Channel
from shardwise.errors import CheckpointError, PeerError, ShardwiseError
from tests.checkpoint.cut_tensors import save_sharded, tensors_of
from tests.checkpoint.faulty import Counting, Died, DyingAt, FailingAt, Hooked, Mode, Operation, really_dying
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import contents, loaded, rubbish, same, share_of_state, whole_state
from tests.covering import covering

OLD, NEW, NEXT = 1, 2, 3
EVERY = 5
"""The quick tests have each so many-th operation, from another one on in each case; `make stress` has the others."""

Program = Callable[[Sequence[Store], Path], list[BaseException | None]]
"""Makes the new save, by as many ranks as there are stores, out of itself or of a source; what each rank got."""

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # threads die as well


@pytest.fixture(autouse=True)
def _many_small_operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    # Rank 0 hears at the next meeting that another rank has failed: a second at each of hundreds of failures.
    with small_limits(96, block_bytes=32, seconds=0.01):
        yield


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed save, what somebody left in its folder who was too late, and a torn save. And a save to convert."""
    folder = tmp_path_factory.mktemp("before")
    path = folder / "saves"
    checkpoint.save(path, whole_state(OLD), extra={"state": OLD}, step=OLD)
    checkpoint.save(path, whole_state(NEW))
    (path / "save-00000002/manifest.json").unlink()
    (path / "save-00000001/0badc0de-rank00000.safetensors").write_bytes(b"too late")
    save_sharded(folder / "source", whole_state(NEW), extra={"state": NEW}, step=NEW)
    return folder


def saved(stores: Sequence[Store], _: Path, *, layout: Literal["pieces", "whole"], later: bool) -> Any:
    """A save at once, or in the background."""
    size = len(stores)
    errors: list[BaseException | None] = [None] * size

    def run(channel: Channel) -> None:
        store, state = stores[channel.rank], share_of_state(whole_state(NEW), channel.rank, size)
        try:
            if not later:
                sw.save(store, state, extra={"state": NEW}, layout=layout, channel=channel)
            else:
                saver = AsyncSaver(store, layout=layout, channel=channel, timeout_seconds=20)
                saver.save(state, extra={"state": NEW})
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


def converted(stores: Sequence[Store], source: Path, *, layout: Literal["pieces", "whole"]) -> Any:
    try:
        convert(source, stores[0], to=layout)
    except (Died, CheckpointError) as error:
        return [error]
    return [None]


PROGRAMS: dict[str, Program] = {
    "pieces": partial(saved, layout="pieces", later=False),
    "whole": partial(saved, layout="whole", later=False),
    "pieces later": partial(saved, layout="pieces", later=True),
    "whole later": partial(saved, layout="whole", later=True),
    "converted to pieces": partial(converted, layout="pieces"),
    "converted to whole": partial(converted, layout="whole"),
}
HAPPENS = ("dies before", "dies half", "dies after", "fails", "stays full")
CODES = (errno.ENOSPC, errno.EACCES, errno.EIO)
CASES = [
    *(case for case in covering(list(PROGRAMS)[:4], HAPPENS, (0, 1, 2), strength=2)),
    *((program, "dies before", "all") for program in list(PROGRAMS)[:4]),
    *((program, happens, 0) for program in list(PROGRAMS)[4:] for happens in HAPPENS),
]
"""What runs, what happens to the store, and of which rank; a death of all is that of the host."""


def struck(store: Store, n: int, happens: str) -> Store:
    """A store to which it happens at the n-th operation."""
    if happens.startswith("dies"):
        mode: Mode = happens.removeprefix("dies ")  # type: ignore[assignment]
        return DyingAt(store, n, mode=mode)
    code = errno.ENOSPC if happens == "stays full" else CODES[n % 3]
    return FailingAt(store, n, OSError(code, os.strerror(code)), for_ever=happens == "stays full")


@pytest.mark.parametrize("turn", [0, *(pytest.param(each, marks=pytest.mark.stress) for each in range(1, EVERY))])
@pytest.mark.parametrize(("program", "happens", "victim"), CASES)
def test_at_any_operation_the_newest_save_is_the_old_or_the_new_one_and_all_ranks_are_told(
    program: str, happens: str, victim: int | Literal["all"], turn: int, before: Path, tmp_path: Path
) -> None:
    size, source = 1 if program.startswith("converted") else 3, before / "source"
    run = PROGRAMS[program]
    copy = shutil.copytree(before / "saves", tmp_path / "counted")
    counted = [Counting(LocalStore(copy)) for _ in range(size)]
    assert run(counted, source) == [None] * size
    operations = counted[0 if victim == "all" else victim].operations
    first = 1 + (CASES.index((program, happens, victim)) + turn) % EVERY
    for n in range(first, len(operations) + 1, EVERY):
        if happens == "dies half" and operations[n - 1].kind != "write":
            continue  # only writes have halves
        path = shutil.copytree(before / "saves", tmp_path / f"{n}")
        stores: list[Store] = [
            struck(LocalStore(path), n, happens) if victim in ("all", rank) else LocalStore(path)
            for rank in range(size)
        ]
        check(path, run(stores, source), happens, victim, contents(before / "saves"))
        shutil.rmtree(path)


def check(
    path: Path, errors: list[BaseException | None], happens: str, victim: int | str, old: dict[str, bytes]
) -> None:
    found, extra = loaded(path)
    assert extra["state"] in (OLD, NEW)
    assert same(found, whole_state(OLD if extra["state"] == OLD else NEW))
    assert None not in errors or extra["state"] == NEW, "who is told that it was saved finds the save"
    report = checkpoint.verify(path)
    assert report.good
    is_torn = extra["state"] == OLD and (path / "save-00000002").exists()
    assert ("save-00000002 is torn" in "\n".join(report.notes)) == is_torn
    if happens.startswith("dies"):
        others = [error for rank, error in enumerate(errors) if victim not in ("all", rank)]
        assert all(error is None or isinstance(error, CheckpointError | PeerError) for error in others)
    elif errors[0] is None:
        assert errors == [None] * len(errors)
    else:
        assert len({(type(error), str(error)) for error in errors}) == 1
        assert isinstance(errors[0], CheckpointError)
        assert str(path) in str(errors[0])
        assert extra["state"] == OLD
        assert contents(path) == old, "nothing of it is left"
    checkpoint.save(path, whole_state(NEXT), extra={"state": NEXT})
    assert same(loaded(path)[0], whole_state(NEXT))
    assert rubbish(path) == []


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.EEXIST])
def test_a_commit_whose_answer_is_lost_stays_committed(code: int, later: bool, before: Path, tmp_path: Path) -> None:
    """A store that says EEXIST has asked again, and the save is its own: that is no error."""

    def lose(operation: Operation) -> None:
        if operation.kind == "create" and operation.name.endswith("manifest.json"):
            raise OSError(code, os.strerror(code))

    path = shutil.copytree(before / "saves", tmp_path / "saves")
    losing = Hooked(LocalStore(path), after=lose)
    errors = saved([losing, LocalStore(path)], path, layout="pieces", later=later)
    if code == errno.EEXIST:
        assert errors == [None, None]
    else:
        assert {(type(error), str(error)) for error in errors} == {(CheckpointError, str(errors[0]))}
        said = f"{path}/save-00000002/manifest.json was created, then the store failed: Input/output error"
        assert said in str(errors[0])
    assert same(loaded(path)[0], whole_state(NEW))
    assert checkpoint.verify(path).good


@pytest.mark.parametrize("mode", ["before", "after"])
def test_death_at_any_operation_of_a_pruning_leaves_the_newest_saves_and_the_next_save_cleans_up(
    mode: Mode, before: Path, tmp_path: Path
) -> None:
    three = shutil.copytree(before / "saves", tmp_path / "three")
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
    path = shutil.copytree(before / "saves", tmp_path / "saves")
    (path / "save-00000001/manifest.json").unlink()
    shutil.rmtree(path / "save-00000002")
    for look in (loaded, checkpoint.verify, checkpoint.open):
        with pytest.raises(CheckpointError, match=r"(?s)no committed save.*save-00000001 \(3 files\).*next successful"):
            look(path)
    checkpoint.save(path, whole_state(NEXT))
    assert rubbish(path) == []
    assert same(loaded(path)[0], whole_state(NEXT))


# Folders of other formats, which are there as a whole or not at all.


def _killed(source: Path, target: Path, n: int, mode: Mode, to: ConvertTarget) -> None:
    """A conversion that is killed at its n-th operation on the folder that it makes."""

    class Dying(LocalStore):
        def __new__(cls, path: Path) -> Any:
            return really_dying(LocalStore(path), n, mode=mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(destinations, "LocalStore", Dying)
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
        return same(tensors_of(moved), whole_state(NEW))  # killed between its last tensor and its name, it has all
    except CheckpointError:
        return True
    finally:
        shutil.rmtree(moved)


@pytest.mark.parametrize(("to", "mode"), [("hf", "half"), ("dcp", "before"), ("deepspeed-universal", "before")])
def test_sigkill_at_any_operation_leaves_no_folder_or_a_whole_one(
    tmp_path: Path, to: ConvertTarget, mode: Mode, before: Path
) -> None:
    parent = tmp_path / "into"
    target = parent / "model"
    forked = multiprocessing.get_context("fork")
    codes = []
    for n in range(1, 400, 2 if to == "hf" else 7):
        process = forked.Process(target=_killed, args=(before / "source", target, n, mode, to))
        process.start()
        process.join(60)
        codes.append(process.exitcode)
        if process.exitcode == 0:
            break
        assert not target.exists()
        (left,) = parent.iterdir()  # each conversion has removed what the one before it left
        assert _is_no_checkpoint(left, tmp_path / "moved")
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > 4
    assert same(tensors_of(target), whole_state(NEW))
    assert same(tensors_of(shutil.copytree(target, tmp_path / "copy")), whole_state(NEW))
    assert [each.name for each in parent.iterdir()] == ["model"]


def in_objects(service: obstore.store.MemoryStore) -> ObjectStore:
    return ObjectStore("s3://bucket/model", client=service)


@pytest.mark.parametrize("to", ["hf", "dcp", "torchtitan", "deepspeed-universal"])
def test_a_conversion_to_an_object_store_that_dies_or_fails_leaves_no_checkpoint_or_a_whole_one(
    to: ConvertTarget, before: Path
) -> None:
    seen = set()
    for n in range(1, 400):
        service = obstore.store.MemoryStore()
        store = DyingAt(in_objects(service), n, mode=("before", "half", "after")[n % 3])
        with contextlib.suppress(Died):
            convert(before / "source", store, to=to, max_shard_bytes=200)
        try:
            seen.add(same(tensors_of(in_objects(service)), whole_state(NEW)))
        except CheckpointError:
            assert store.dead
        if not store.dead:
            break
        failing, fails = obstore.store.MemoryStore(), OSError(errno.EIO, os.strerror(errno.EIO))
        with pytest.raises(CheckpointError, match="Input/output error"):
            convert(before / "source", FailingAt(in_objects(failing), n, fails), to=to, max_shard_bytes=200)
        assert list(in_objects(failing).names()) == []
    assert seen == {True}
    assert 8 < n < 399


def test_files_without_numbers_are_not_written_one_after_the_other(tmp_path: Path, before: Path) -> None:
    folder = tmp_path / "like"
    convert(before / "source", folder, to="hf", max_shard_bytes=200)
    index = folder / "model.safetensors.index.json"
    for at, path in enumerate(sorted(folder.glob("*.safetensors"))):
        path.rename(folder / f"part{at}.safetensors")
        index.write_text(index.read_text().replace(path.name, f"part{at}.safetensors"))
    convert(before / "source", tmp_path / "hf", to="hf", like=folder)
    with pytest.raises(CheckpointError, match=r"'part0.safetensors', .* without a number .* would leave what is read"):
        convert(before / "source", in_objects(obstore.store.MemoryStore()), to="hf", like=folder)


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
    shutil.copy(data, tmp_path / data.name)
    (torn / "manifest.json").unlink()
    for path, said in ((torn, "data of a save without its manifest.json"), (data, "data of a save without")):
        with pytest.raises(CheckpointError, match=said):
            checkpoint.open(path)
    assert checkpoint.open(tmp_path / data.name).tensors.keys() == {"w"}


@pytest.mark.parametrize("fails", ["write", "create", "rename"])
def test_a_failure_while_hugging_face_files_are_made_leaves_nothing(
    tmp_path: Path, before: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner: Any = os if fails == "rename" else LocalStore
    monkeypatch.setattr(owner, fails, full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; nothing was made there"):
        convert(before / "source", tmp_path / "hf", to="hf", max_shard_bytes=200)
    assert list(tmp_path.iterdir()) == []
