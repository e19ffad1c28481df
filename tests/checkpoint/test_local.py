"""LocalStore: what is particular to a folder of a file system, above all what is there after something went wrong."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint import local
from shardwise.checkpoint.local import LocalStore
from shardwise.testing.stores import content, put, read
from tests.forks.calls import exit_code_of

NUM_PROCESSES, NUM_ROUNDS = 4, 50


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def failing(number: int) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _create_in_turns(folder: str, process: int, barrier: Barrier, hard_links: bool) -> None:
    if not hard_links:
        os.link = failing(errno.EPERM)
    won = []
    for turn in range(NUM_ROUNDS):
        barrier.wait(60)
        try:
            LocalStore(folder).create(f"save-{turn}/manifest", content(5000, seed=process))
            won.append(turn)
        except FileExistsError:
            continue
    Path(folder, f"won-{process}").write_text(json.dumps(won))


def _race(_: Connection, folder: str, hard_links: bool) -> None:
    several = multiprocessing.get_context("fork")
    barrier = several.Barrier(NUM_PROCESSES)
    racing = [
        several.Process(target=_create_in_turns, args=(folder, each, barrier, hard_links))
        for each in range(NUM_PROCESSES)
    ]
    for each in racing:
        each.start()
    for each in racing:
        each.join()
        assert each.exitcode == 0


def _die_at(_: Connection, name: str, folder: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if name == "rename":
        os.link = failing(errno.EPERM)
    setattr(os, name, die)
    LocalStore(folder).create("save/manifest", b"from the dead")


@pytest.mark.processes
@pytest.mark.parametrize("hard_links", [True, False])
def test_one_of_many_processes_creates_a_name(hard_links: bool, tmp_path: Path) -> None:
    assert exit_code_of(_race, str(tmp_path), hard_links) == 0
    won = [json.loads((tmp_path / f"won-{process}").read_text()) for process in range(NUM_PROCESSES)]
    assert sorted(turn for turns in won for turn in turns) == list(range(NUM_ROUNDS))
    for process, turns in enumerate(won):
        for turn in turns:
            assert read(LocalStore(tmp_path), f"save-{turn}/manifest") == content(5000, seed=process)
    assert [path.name for path in tmp_path.glob("save-*/*")] == ["manifest"] * NUM_ROUNDS


@pytest.mark.processes
@pytest.mark.parametrize(("call", "left"), [("link", ["new"]), ("rename", ["new", "lock"])])
def test_a_creator_that_dies_leaves_only_what_can_be_deleted_and_blocks_nobody(
    call: str, left: list[str], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code_of(_die_at, call, store.location) == -signal.SIGKILL
    strays = list(store.names())
    assert sorted(stray.rpartition(".")[2] for stray in strays) == sorted(left)
    assert all(stray.startswith("save/.manifest.") for stray in strays)
    if call == "rename":
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    store.create("save/manifest", b"from the living")
    assert read(store, "save/manifest") == b"from the living"
    for stray in store.names():
        if stray.startswith("save/."):
            store.delete(stray)
    assert list(store.names()) == ["save/manifest"]


def test_short_reads_and_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, start: preadv(descriptor, [buffers[0][:5]], start))
    put(store, "written", content(100), chunk_bytes=40)
    store.create("created", content(100))
    assert read(store, "written") == read(store, "created") == content(100)
    assert read(store, "written", 13, 29) == content(100)[13:42]


ACTS: dict[str, Callable[[LocalStore, str], None]] = {
    "put": lambda store, name: put(store, name, b"12345"),
    "create": lambda store, name: store.create(name, b"12345"),
}
FAILURES = [
    ("fallocate", errno.ENOSPC, "put"),
    *((call, code, act) for call, code in (("write", errno.ENOSPC), ("fsync", errno.EIO)) for act in ACTS),
    ("link", errno.EIO, "create"),
]


@pytest.mark.parametrize(("call", "code", "act"), FAILURES)
def test_what_fails_is_named_and_leaves_no_file_and_no_descriptor(
    call: str, code: int, act: str, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(local if call == "fallocate" else os, call, failing(code))
    with pytest.raises(OSError, match=rf"{os.strerror(code)}: '.*/store/save/data'"):
        ACTS[act](store, "save/data")
    assert files_under(tmp_path) == ["store"]
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_systems_that_reserve_no_room_are_written_all_the_same(
    number: int, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "fallocate", failing(number))
    put(store, "file", content(100))
    assert read(store, "file") == content(100)


def test_where_no_room_is_reserved_nothing_is_written_in_its_place(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()  # of which the kernel reserves nothing, and a byte per block would be in it
    with pytest.raises(OSError, match="Illegal seek"):
        local.fallocate(write_end, 1 << 16)
    os.close(write_end)
    with open(read_end, "rb") as rest:
        assert rest.read() == b""
    with open(tmp_path / "file", "wb") as file:
        local.fallocate(file.fileno(), 1 << 16)
        assert os.fstat(file.fileno()).st_size == 1 << 16


class Syncs:
    """Records what is synced, in order: the names of the files and folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        sync = os.fsync

        def record(descriptor: int) -> None:
            self.paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", record)


def test_a_file_is_synced_before_it_has_its_name_and_before_the_folders_that_lead_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs, link = Syncs(monkeypatch), os.link

    def record(hidden: str, path: str) -> None:
        assert syncs.paths == [hidden]
        link(hidden, path)
        syncs.paths[:] = [path]

    monkeypatch.setattr(os, "link", record)
    store = LocalStore(tmp_path / "x/store")
    folders = ["/a/b", "/a", ""]
    put(store, "a/b/file", b"12345")
    assert syncs.paths == [f"{store.location}{each}" for each in ("/a/b/file", *folders)] + [
        str(tmp_path / "x"),
        str(tmp_path),
    ]
    for act in ACTS:  # its folders may be a moment old, made by a process that has not synced them yet
        syncs.paths.clear()
        ACTS[act](store, f"a/b/{act}")
        assert syncs.paths == [f"{store.location}{each}" for each in (f"/a/b/{act}", *folders)]


def test_what_is_deleted_first_is_gone_for_good_first(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("save/manifest", b"12345")
    store.create("save/data", b"12345")
    syncs = Syncs(monkeypatch)
    store.delete("save/manifest")
    assert syncs.paths == [f"{store.location}/save"]


def test_folders_that_cannot_be_synced_are_tolerated_but_failing_disks_are_not(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, number = os.fsync, errno.EINVAL

    def refuse_folders(descriptor: int) -> None:
        if os.path.isdir(descriptor):
            failing(number)()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    put(store, "file", b"12345")
    store.create("other", b"12345")
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        store.create("third", b"12345")


@pytest.mark.parametrize(("error", "left"), [(ZeroDivisionError, []), (KeyboardInterrupt, ["save", "save/data"])])
def test_an_error_takes_the_parts_away_and_an_interruption_does_not_wait_for_that(
    error: type[BaseException], left: list[str], store: LocalStore
) -> None:
    def stop_half_way() -> None:
        with store.write("save/data", num_bytes=100) as writer:
            writer.write(memoryview(content(60)))
            raise error

    with pytest.raises(error):
        stop_half_way()
    assert files_under(Path(store.location)) == left


def test_a_link_whose_answer_was_lost_is_known_by_its_file(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_twice(hidden: str, path: str) -> None:
        link(hidden, path)
        link(hidden, path)

    monkeypatch.setattr(os, "link", link_twice)
    store.create("manifest", b"mine")
    assert list(store.names()) == ["manifest"]


def test_a_cleanup_that_takes_the_hidden_file_does_not_stop_its_creator(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    taken: list[str] = []

    def clean_up_first(hidden: str, path: str) -> None:
        if len(taken) < 3:
            taken.append(hidden)
            store.delete(os.path.relpath(hidden, store.location))
            assert files_under(tmp_path) == ["store"]
        link(hidden, path)

    monkeypatch.setattr(os, "link", clean_up_first)
    store.create("save/manifest", b"mine")
    assert len(set(taken)) == 3
    assert read(store, "save/manifest") == b"mine"


def test_a_lock_whose_file_the_last_holder_removed_is_taken_anew(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, take = f"{store.location}/save/.manifest.lock", fcntl.flock
    files_exist: list[bool] = []

    def take_after_its_removal(descriptor: int, operation: int) -> None:
        if not files_exist:
            os.unlink(lock)
        files_exist.append(os.path.exists(lock))
        take(descriptor, operation)

    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(fcntl, "flock", take_after_its_removal)
    store.create("save/manifest", b"mine")
    assert files_exist == [False, True]
    assert list(store.names()) == ["save/manifest"]


def test_a_file_system_with_neither_links_nor_locks_refuses_to_create(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(OSError, match=r"No locks available: '.*/save/manifest'"):
        store.create("save/manifest", b"mine")
    assert not any(path.endswith(("manifest", "new")) for path in files_under(tmp_path))


def test_permissions_follow_the_umask(store: LocalStore) -> None:
    before = os.umask(0o027)
    try:
        put(store, "folder/written", b"x")
        store.create("folder/created", b"x")
    finally:
        os.umask(before)
    modes = [os.stat(f"{store.location}/{name}").st_mode & 0o777 for name in ("folder", *store.names())]
    assert modes == [0o750, 0o640, 0o640]


def test_a_store_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = LocalStore("runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.create("file", b"x")
    assert store.location == f"{tmp_path}/runs"
    assert files_under(tmp_path) == ["elsewhere", "runs", "runs/file"]


@pytest.mark.quick
def test_nobody_cuts_a_file_or_writes_to_it_while_it_is_looked_at_in_memory(store: LocalStore) -> None:
    put(store, "x", content(5000))
    path = f"{store.location}/x"
    reader = store.open("x")
    with reader.mapped(4099, 900) as memory:
        assert memory is not None
        assert bytes(memory) == content(5000)[4099:4999]
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with reader.mapped(4099, 902) as memory:
        assert memory is None, "it ends before"
    with open(path, "r+b"), reader.mapped(0, 1) as memory:
        assert memory is None, "somebody may write to it"
    with reader.mapped(0, 1) as memory:
        assert memory is not None
    reader.close()


def test_what_a_disk_or_a_kernel_does_not_give_is_not_looked_at_in_memory(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "x", content(5000))
    reader = store.open("x")
    monkeypatch.setattr(local, "_POPULATE_READ", 12345)  # no kernel knows it
    with reader.mapped(0, 5000) as memory:
        assert memory is None

    def refuse(descriptor: int, command: int, argument: int) -> int:
        raise OSError(errno.EINVAL, "no leases")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with reader.mapped(0, 5000) as memory:
        assert memory is None
    monkeypatch.delattr(fcntl, "F_SETLEASE")
    with reader.mapped(0, 5000) as memory:
        assert memory is None
    reader.close()


def test_a_file_that_another_host_may_cut_is_not_looked_at_in_memory(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease binds the processes of this host alone."""
    put(store, "x", content(5000))
    reader = store.open("x")
    monkeypatch.setattr(local, "_OF_ONE_HOST", frozenset({0x65735546}))  # FUSE
    with reader.mapped(0, 5000) as memory:
        assert memory is None
    reader.close()
