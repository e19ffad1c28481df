"""The store doubles do what the crash tests rely on."""

import errno
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.remote import FsspecStore
from shardwise.checkpoint.stores import Store
from tests.checkpoint.faulty import Counting, Died, DyingAt, FailingAt, Mode, really_dying
from tests.contracts.store_cases import content, put, read
from tests.forks.calls import exit_code_of

KINDS = ["names", "begin", "write", "write", "end", "create", "open", "read_into", "delete"]


def work(store: Store) -> None:
    """One operation of every kind, in the order of KINDS."""
    list(store.names())
    put(store, "data", content(10), chunk_bytes=6)
    store.create("manifest", b"12345")
    assert read(store, "data", 2, 5) == content(10)[2:7]
    store.delete("manifest")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def test_operations_and_their_bytes_are_counted(tmp_path: Path) -> None:
    store = Counting(LocalStore(tmp_path))
    work(store)
    assert [operation.kind for operation in store.operations] == KINDS
    assert store.num_operations["write"] == 2
    assert {kind: store.num_bytes[kind] for kind in ("write", "create", "read_into", "names")} == {
        "write": 10,
        "create": 5,
        "read_into": 5,
        "names": 0,
    }


@pytest.mark.parametrize("n", range(1, len(KINDS) + 1))
@pytest.mark.parametrize("mode", ["before", "after", "half"])
def test_the_dead_leave_what_was_done_until_then_and_do_nothing_more(mode: Mode, n: int, tmp_path: Path) -> None:
    descriptors = os.listdir("/proc/self/fd")
    store = DyingAt(LocalStore(tmp_path / "store"), n, mode=mode)
    with pytest.raises(Died):
        work(store)
    assert store.dead
    num_done = n if mode == "after" else n - 1
    written = {2: 0, 3: 6, 4: 10}.get(num_done, 10 if num_done > 4 else 0)
    if mode == "half" and KINDS[n - 1] == "write":
        written += (6 // 2, 4 // 2)[n - 3]
    expected = {"data": content(10)[:written].ljust(10, b"\0")} if num_done >= 2 else {}
    if 6 <= num_done < 9:
        expected["manifest"] = b"12345"
    assert files(tmp_path / "store") == expected
    later: list[Callable[[], Any]] = [
        store.names,
        lambda: store.open("data"),
        lambda: store.create("x", b"x"),
        lambda: store.delete("data"),
        lambda: put(store, "x", b"x"),
    ]
    for act in later:
        with pytest.raises(Died):
            act()
    assert files(tmp_path / "store") == expected
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors) + (KINDS[n - 1] == "open")


def test_a_death_takes_the_open_files_of_other_threads_with_it(tmp_path: Path) -> None:
    store = DyingAt(LocalStore(tmp_path), 3)
    context = store.write("data", num_bytes=10)
    context.__enter__().write(memoryview(content(4)))
    with pytest.raises(Died):
        store.create("manifest", b"x")
    error = OSError("cleaning up as the living do")
    context.__exit__(OSError, error, None)
    assert files(tmp_path) == {"data": content(4).ljust(10, b"\0")}


def test_a_store_that_is_not_reached_by_the_death_lives(tmp_path: Path) -> None:
    store = DyingAt(LocalStore(tmp_path), len(KINDS) + 1)
    work(store)
    assert not store.dead


def _work_until_killed(_: Connection, folder: str, n: int) -> None:
    work(really_dying(LocalStore(folder), n, mode="half"))


@pytest.mark.processes
def test_real_processes_are_killed_at_the_operation(tmp_path: Path) -> None:
    assert exit_code_of(_work_until_killed, str(tmp_path), 4) == -signal.SIGKILL
    assert files(tmp_path) == {"data": content(10)[:8].ljust(10, b"\0")}


def test_objects_of_the_dead_never_appear() -> None:
    inner = FsspecStore("memory://test-faulty")
    with pytest.raises(Died):
        work(DyingAt(inner, 5))
    assert list(inner.names()) == []


@pytest.mark.parametrize("n", range(1, len(KINDS) + 1))
def test_one_operation_fails_and_the_others_work(n: int, tmp_path: Path) -> None:
    store = FailingAt(LocalStore(tmp_path), n, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(OSError, match="No space left on device"):
        work(store)
    assert store.failed
    assert ("data" in files(tmp_path)) == (n > 5)  # what cannot be written to its end is taken away
    for name in list(store.names()):
        store.delete(name)
    work(store)
