"""The contract of `Store` on every implementation, and what is particular to those behind fsspec."""

import builtins
import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import obstore.store
import pytest
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import shardwise
import shardwise as sw
from shardwise.checkpoint import AsyncSaver, conversion, destinations
from shardwise.checkpoint.formats import registry
from shardwise.checkpoint.keeper_store import KeeperStore
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.objects import ObjectStore
from shardwise.checkpoint.remote import FsspecStore
from shardwise.checkpoint.stores import Store, store_of
from shardwise.errors import CheckpointError
from shardwise.keepers.keeper_host import OwnKeeper, socket_name
from shardwise.testing.stores import CASES, Case, content, put, read
from tests.contracts.object_file_system import ObjectFileSystem

SOURCE = Path(shardwise.__file__).parent

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def in_memory(_: Path) -> tuple[Store, Store]:
    """At the root of a file system of this process."""
    file_system = MemoryFileSystem(global_store=False, skip_instance_cache=True)
    return FsspecStore("", file_system=file_system), FsspecStore("/", file_system=file_system)


def on_objects(_: Path) -> tuple[Store, Store]:
    objects: dict[str, bytes] = {}
    return (
        FsspecStore("bucket/runs", file_system=ObjectFileSystem(objects)),
        FsspecStore("objects://bucket/runs", file_system=ObjectFileSystem(objects)),
    )


def in_memory_of_obstore(_: Path) -> tuple[Store, Store]:
    client = obstore.store.MemoryStore()
    return ObjectStore("s3://bucket/run", client=client), ObjectStore("s3://bucket/run/", client=client)


STORES: dict[str, Callable[[Path], tuple[Store, Store]]] = {
    "a local folder": lambda path: (LocalStore(path / "made" / "on demand"), LocalStore(f"{path}/made/on demand/")),
    "a local folder without hard links": lambda path: (LocalStore(path / "runs"), LocalStore(path / "runs")),
    "fsspec in memory": in_memory,
    "fsspec on local files": lambda path: (FsspecStore(f"file://{path}/runs"), store_of(f"local://{path}/runs/")),
    "fsspec on objects": on_objects,
    "obstore in memory": in_memory_of_obstore,
}


@each_case
@pytest.mark.parametrize("kind", STORES)
def test_a_store_fulfils_the_contract(kind: str, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "without hard links" in kind:

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(os, "link", refuse)
    case(*STORES[kind](tmp_path))
    assert not [name for name in LocalStore(tmp_path).names() if "." in name and name.endswith(("lock", "new"))]


@pytest.mark.parametrize("kind", STORES)
def test_refusals_say_what_was_asked_and_what_holds(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)[0]
    store.create("short", content(10))
    reader = store.open("short")
    for start, wanted, had in ((0, 11, 10), (7, 5, 3), (10, 1, 0), (99, 4, 0)):
        with pytest.raises(EOFError, match=f"short: wanted {wanted} bytes from byte {start} on.* only {had} of them"):
            reader.read_into(memoryview(bytearray(wanted)), start)
    for act in (store.open, store.delete, lambda name: store.create(name, b"x")):
        with pytest.raises(ValueError, match="is no name in a store"):
            act("a/../x")
    for data, said in ((b"1234", "only 4 came"), (b"123456", "0 are written, and 6 more were given")):
        with pytest.raises(ValueError, match=f"announced with 5 bytes; {said}"), store.write("x", num_bytes=5) as file:
            file.write(memoryview(data))
        store.delete("x")


@pytest.fixture(scope="module")
def keepers() -> Iterator[tuple[KeeperStore, KeeperStore]]:
    """Stores of two hosts, each with its keeper, which reach each other by TCP."""
    owned = []
    for host in ("A", "B"):
        name = socket_name(f"stores {os.getpid()}", host)
        owned.append(OwnKeeper(name, "session", key=b"key", starts=True, patience_seconds=0.0))
    reached = [each.listen(["127.0.0.1"]) for each in owned]
    first, second = [owned[0].here, reached[1]], [reached[0], owned[1].here]
    stores = (
        KeeperStore("replicas", first, 0, timeout_seconds=60),
        KeeperStore("replicas", second, 1, timeout_seconds=60),
    )
    yield stores
    for store, keeper in zip(stores, owned, strict=True):
        store.close()
        keeper.end()


@each_case
def test_the_keepers_of_two_hosts_fulfil_the_contract(case: Case, keepers: tuple[KeeperStore, KeeperStore]) -> None:
    case(keepers[0].within(case.name), keepers[1].within(case.name))


@pytest.fixture
def service() -> ObjectFileSystem:
    return ObjectFileSystem({})


@pytest.fixture
def store(service: ObjectFileSystem) -> FsspecStore:
    return FsspecStore("bucket/runs", file_system=service)


def test_only_the_wanted_range_is_asked_for(service: ObjectFileSystem, store: FsspecStore) -> None:
    store.create("file", content(1000))
    assert read(store, "file", 10, 20) == content(1000)[10:30]
    assert service.ranges == [(10, 30)]


def test_a_large_read_is_split_into_requests(
    service: ObjectFileSystem, store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.checkpoint.remote.REQUEST_BYTES", 64)
    store.create("file", content(1000))
    assert read(store, "file", 10, 150) == content(1000)[10:160]
    assert sorted(service.ranges) == [(10, 74), (74, 138), (138, 160)]


def test_a_file_that_shrank_after_it_was_opened_ends_early(service: ObjectFileSystem, store: FsspecStore) -> None:
    store.create("file", content(1000))
    reader = store.open("file")
    service.objects["bucket/runs/file"] = content(100)
    with pytest.raises(EOFError, match="wanted 50 bytes from byte 80 on, but the file has only 20 of them"):
        reader.read_into(memoryview(bytearray(50)), 80)


def test_a_folder_is_not_opened_as_a_file(store: FsspecStore, tmp_path: Path) -> None:
    for each in (store, in_memory(tmp_path)[0], LocalStore(tmp_path), FsspecStore(f"file://{tmp_path}")):
        if "folder/file" not in each.names():
            each.create("folder/file", b"x")
        with pytest.raises(IsADirectoryError, match="folder"):
            each.open("folder")


@pytest.mark.parametrize(
    ("broken", "act"),
    [
        ("ls", lambda store: list(store.names())),  # and not an empty folder
        ("info", lambda store: store.open("file")),
        ("info", lambda store: store.create("new", b"x")),
        ("cat_file", lambda store: read(store, "file")),
        ("pipe_file", lambda store: store.create("new", b"x")),
        ("upload", lambda store: put(store, "new", b"x" * 100)),
        ("rm_file", lambda store: store.delete("file")),
    ],
)
def test_failures_of_the_service_are_os_errors_that_name_the_file(
    broken: str, act: Callable[[Store], Any], service: ObjectFileSystem, store: FsspecStore
) -> None:
    store.create("file", b"12345")
    service.breaks.add(broken)
    with pytest.raises(OSError, match="bucket/runs") as caught:
        act(store)
    assert caught.value.errno == errno.EIO
    assert caught.value.strerror == "ServiceError: 503 slow down"
    service.breaks.clear()
    assert list(store.names()) == ["file"]


def test_a_put_whose_answer_was_lost_is_known_by_its_bytes(service: ObjectFileSystem, store: FsspecStore) -> None:
    service.loses_answers = True
    store.create("manifest", b"mine")
    assert read(store, "manifest") == b"mine"
    with pytest.raises(FileExistsError):
        store.create("manifest", b"mine")


def test_a_race_that_the_service_decides_has_one_winner(
    service: ObjectFileSystem, store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("manifest", b"theirs")
    look = service.info
    looked: list[str] = []

    def too_early(path: str, **options: Any) -> Any:
        looked.append(path)
        if len(looked) == 1:
            raise FileNotFoundError(path)
        return look(path, **options)

    monkeypatch.setattr(service, "info", too_early)
    with pytest.raises(FileExistsError, match="manifest"):
        store.create("manifest", b"mine")
    assert looked == ["bucket/runs/manifest"]
    assert read(store, "manifest") == b"theirs"


class Overwriting(ObjectFileSystem):
    """As a service without conditional writes, or a package that does not ask for them."""

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:  # type: ignore[override]
        self.objects[path] = bytes(value)


def test_a_service_that_overwrites_is_refused_before_anything_is_saved_there() -> None:
    service = Overwriting({})
    store = FsspecStore("objects://bucket/run", file_system=service)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"run.* cannot be created: it was created twice, .*If-None-Match"):
            sw.save(store, {"w": torch.ones(2)})
    assert service.objects == {}


@pytest.mark.parametrize("kind", ["fsspec on objects", "obstore in memory"])
def test_whether_a_service_decides_is_asked_once_and_leaves_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[bytes] = []
    store: Any = STORES[kind](tmp_path)[0]
    put = type(store)._put

    def count(self: Any, path: str, data: bytes) -> None:
        puts.append(data)
        put(self, path, data)

    monkeypatch.setattr(type(store), "_put", count)
    with AsyncSaver(store) as saver:
        for seed in range(3):
            saver.save({"w": torch.full((2,), float(seed))})
    manifests = [data for data in puts if data.startswith(b"{")]
    assert puts == [b"first", b"second", *manifests]
    assert len(manifests) == 3
    assert not [name for name in store.names() if "report" in name]


def test_a_service_that_loses_answers_or_lets_nobody_delete_decides_as_well() -> None:
    service = ObjectFileSystem({})
    store = FsspecStore("objects://bucket/run", file_system=service)
    service.loses_answers = True
    store.check_creation("probe")
    assert service.objects == {}
    service = ObjectFileSystem({})
    service.breaks = {"rm_file"}
    store = FsspecStore("objects://bucket/run", file_system=service)
    for seed in range(2):
        sw.save(store, {"w": torch.full((2,), float(seed))})
    target = {"w": torch.zeros(2)}
    sw.load(store, target)
    assert target["w"].tolist() == [1, 1]


@pytest.mark.parametrize("to", ["hf", "dcp"])
@pytest.mark.parametrize("kind", ["fsspec on objects", "obstore in memory"])
def test_of_two_conversions_to_one_place_one_makes_it(kind: str, to: Any, tmp_path: Path) -> None:
    """Each rank of a job may call it. Both see an empty folder."""
    stores = STORES[kind](tmp_path)
    for number in range(2):
        sw.save(tmp_path / f"{number}", {"w": torch.full((2,), float(number))})

    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(CheckpointError, match=r"run.* holds no checkpoint that is read: a conversion writes it"):
            sw.checkpoint.open(stores[1])
        with pytest.raises(
            CheckpointError, match=r"run.* is a folder that (another conversion writes|holds something)"
        ):
            sw.checkpoint.convert(tmp_path / "1", stores[1], to=to)

    late = destinations.check_folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "check_folder", lambda folder: folder if folder is stores[1] else late(folder))
        sw.checkpoint.convert(tmp_path / "0", stores[0], to=to, progress=meanwhile)
        with pytest.raises(CheckpointError, match=r"run.* is a folder that holds something"):
            sw.checkpoint.convert(tmp_path / "1", stores[1], to=to)
    found = sw.checkpoint.open(stores[1])
    (name,) = found.tensors
    assert found.read(name).tolist() == [0, 0]
    assert registry.CLAIM not in stores[0].names()


def test_private_names_of_fsspec_stand_in_one_file_and_do_what_they_are_used_for() -> None:
    private = re.compile(r"_strip_protocol|MemoryFile\b|\.async_impl|fsspec\.implementations")
    found = {path.name for path in SOURCE.rglob("*.py") if private.search(path.read_text(encoding="utf-8"))}
    assert found == {"remote.py"}
    file_system = MemoryFileSystem(global_store=False, skip_instance_cache=True)
    path = file_system._strip_protocol("memory://a/b")
    file = MemoryFile(file_system, path, b"x")
    file.write(b"y")
    assert (path, file.path, file_system.store) == ("/a/b", "/a/b", {}), "it is not seen before its commit"
    file.commit()
    assert file_system.store.setdefault("/a/b", None) is file
    assert (file_system.cat_file("/a/b"), file_system.async_impl) == (b"y", False)


def test_a_missing_bucket_is_not_made(
    service: ObjectFileSystem, store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_bucket(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    def must_not_be_called(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(service, "pipe_file", no_bucket)
    monkeypatch.setattr(service, "makedirs", must_not_be_called)
    with pytest.raises(FileNotFoundError, match="The specified bucket does not exist"):
        store.create("file", b"x")


def test_real_folders_of_a_file_system_are_made(tmp_path: Path) -> None:
    class Folders(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no annotations
        """Local files, not known as such."""

        files = fsspec.filesystem("file")
        ls, info, makedirs, rm_file, _open = files.ls, files.info, files.makedirs, files.rm_file, files._open

    store = FsspecStore(f"{tmp_path}/runs", file_system=Folders())
    put(store, "written/deep/file", b"12345")
    store.create("created/deep/file", b"123")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("file")) == [
        "runs/created/deep/file",
        "runs/written/deep/file",
    ]
    assert list(store.names()) == ["created/deep/file", "written/deep/file"]


def test_paths_addresses_and_stores_are_told_apart(tmp_path: Path) -> None:
    local = store_of(tmp_path)
    assert isinstance(local, LocalStore)
    assert isinstance(store_of(str(tmp_path)), LocalStore)
    assert store_of(local) is local
    for address in (f"file://{tmp_path}", "memory://runs/a"):
        remote = store_of(address)
        assert isinstance(remote, FsspecStore)
        assert remote.location == address
    assert FsspecStore("memory://user:secret@host/a@b:c").location == "memory://user@host/a@b:c"  # without the password


def test_an_address_says_what_it_needs_when_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"nonsense://x is no address that fsspec knows"):
        store_of("nonsense://x")
    plain_import = builtins.__import__

    def without_s3fs(name: str, *rest: Any, **options: Any) -> Any:
        if name == "s3fs":
            raise ImportError("No module named 's3fs'")
        return plain_import(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_s3fs)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "https://s3.example"})
    with pytest.raises(CheckpointError, match=r"s3://bucket/x cannot be reached: Install s3fs"):
        store_of("s3://bucket/x")
    monkeypatch.delitem(fsspec.config.conf, "s3")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(CheckpointError, match=r"s3://bucket/x cannot be reached: Install s3fs.* shardwise\[object\]"):
        store_of("s3://bucket/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"memory://x needs fsspec: pip install shardwise\[object\]"):
        store_of("memory://x")
