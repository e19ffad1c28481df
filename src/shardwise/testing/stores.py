"""The suite that a store must pass: `CASES`, which hold for every implementation.

    @pytest.mark.parametrize("case", stores.CASES, ids=lambda case: case.name)
    def test_my_store(case: stores.Case, tmp_path: Path) -> None:
        case(MyStore(tmp_path), MyStore(tmp_path))

A case gets two handles on one empty place, as two processes would have them.
"""

import sys
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest

Store: TypeAlias = Any
"""What is tried. The suite imports no store, and so knows none by its type."""

REFUSED_NAMES = ("/etc/x", "../x", "a/../x", "a/..", ".", "a/./x", "a//x", "a/", "/", "a\0b")


@dataclass(frozen=True, slots=True)
class Case:
    """One claim about stores."""

    body: Callable[[Store, Store], None]

    @property
    def name(self) -> str:
        """Unique among all."""
        return self.body.__name__

    def __call__(self, store: Store, other: Store) -> None:
        self.body(store, other)


CASES: list[Case] = []


def case(body: Callable[[Store, Store], None]) -> None:
    """Add a claim to `CASES`."""
    CASES.append(Case(body))


def content(num_bytes: int, seed: int = 0) -> bytes:
    """Bytes whose place in the file shows."""
    places = np.arange(num_bytes)
    return ((seed + 31 * places + places // 251) % 256).astype(np.uint8).tobytes()


def put(store: Store, name: str, data: bytes, *, chunk_bytes: int = 7) -> None:
    """Write a file in chunks."""
    with store.write(name, num_bytes=len(data)) as writer:
        for start in range(0, len(data), chunk_bytes):
            writer.write(memoryview(data)[start : start + chunk_bytes])


def read(store: Store, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
    """The bytes of a file, or some of them."""
    reader = store.open(name)
    try:
        buffer = bytearray(reader.size - start if num_bytes is None else num_bytes)
        reader.read_into(memoryview(buffer), start)
        return bytes(buffer)
    finally:
        reader.close()


@case
def every_range_of_a_file_reads_as_written(store: Store, other: Store) -> None:
    data = content(37)
    put(store, "a/written", data, chunk_bytes=5)
    store.create("a/created", data)
    for name in ("a/written", "a/created"):
        reader = other.open(name)
        assert reader.size == 37
        for start in range(38):
            for stop in range(start, 38):
                buffer = bytearray(stop - start)
                reader.read_into(memoryview(buffer), start)
                assert buffer == data[start:stop]
        reader.close()


@case
def large_files_read_from_several_threads_at_once(store: Store, other: Store) -> None:
    data = content(1_000_003)
    put(store, "large", data, chunk_bytes=123_457)
    reader = other.open("large")

    def strip(index: int) -> bool:
        buffer = bytearray(10_007)
        reader.read_into(memoryview(buffer), index * 9_001)
        return buffer == data[index * 9_001 : index * 9_001 + 10_007]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(strip, range(100)))
    reader.close()


@case
def empty_files_exist(store: Store, other: Store) -> None:
    with store.write("a/written", num_bytes=0):
        pass
    with store.write("a/nothing given", num_bytes=0) as writer:
        writer.write(memoryview(b""))
    store.create("a/created", b"")
    assert list(other.names()) == ["a/created", "a/nothing given", "a/written"]
    assert [read(other, name) for name in other.names()] == [b"", b"", b""]


@case
def reading_past_the_end_is_refused(store: Store, other: Store) -> None:
    store.create("short", content(10))
    reader = other.open("short")
    for start, wanted in ((0, 11), (7, 5), (10, 1), (99, 4)):
        with pytest.raises(EOFError):
            reader.read_into(memoryview(bytearray(wanted)), start)
    reader.read_into(memoryview(bytearray(0)), 10)
    reader.close()


@case
def buffers_of_any_element_count_by_their_bytes(store: Store, other: Store) -> None:
    def as_given(view: Any) -> memoryview:
        return view  # type: ignore[no-any-return]  # mypy knows views of integers only

    numbers = array("d", [1.5, -2.0, 3.25, 0.0, 7.0, 8.0])
    with store.write("numbers", num_bytes=48) as writer:
        writer.write(as_given(memoryview(numbers)[:2]))
        writer.write(as_given(memoryview(numbers)[2:].cast("B").cast("d", (2, 2))))
    back = array("d", bytes(48))
    reader = other.open("numbers")
    reader.read_into(as_given(memoryview(back).cast("B").cast("d", (3, 2))), 0)
    reader.close()
    assert back == numbers


@case
def what_was_written_may_change_at_once(store: Store, other: Store) -> None:
    buffer = bytearray(b"first")
    with store.write("file", num_bytes=10) as writer:
        writer.write(memoryview(buffer))
        buffer[:] = b"other"
        writer.write(memoryview(buffer))
        buffer[:] = b"third"
    assert read(other, "file") == b"firstother"


@case
def missing_files_are_named(store: Store, other: Store) -> None:
    store.create("there/file", b"x")
    for name in ("nothing", "there/nothing", "nothing/nothing"):
        with pytest.raises(FileNotFoundError) as caught:
            store.open(name)
        assert caught.value.strerror == "No such file or directory"
        assert name in str(caught.value)


@case
def names_in_use_are_refused_and_their_files_kept(store: Store, other: Store) -> None:
    store.create("a/file", b"mine")
    with pytest.raises(FileExistsError) as caught:
        other.create("a/file", b"yours")
    assert caught.value.strerror == "File exists"
    assert "a/file" in str(caught.value)
    with pytest.raises(FileExistsError), other.write("a/file", num_bytes=5) as writer:
        writer.write(memoryview(b"yours"))
    assert read(other, "a/file") == b"mine"
    assert list(store.names()) == ["a/file"]
    other.delete("a/file")
    store.create("a/file", b"yours")
    assert read(other, "a/file") == b"yours"


@case
def one_of_many_creators_wins(store: Store, other: Store) -> None:
    num_threads, num_rounds = 8, 40
    barrier = threading.Barrier(num_threads)

    def creator(thread: int) -> list[bool]:
        won = []
        for turn in range(num_rounds):
            barrier.wait()
            try:
                (store, other)[thread % 2].create(f"turn-{turn:02d}/manifest", content(1000, seed=thread))
                won.append(True)
            except FileExistsError:
                won.append(False)
        return won

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # what happens in memory alone is over before the interpreter changes threads
    try:
        with ThreadPoolExecutor(num_threads) as threads:
            won = list(threads.map(creator, range(num_threads)))
    finally:
        sys.setswitchinterval(interval)
    for turn in range(num_rounds):
        (winner,) = [thread for thread in range(num_threads) if won[thread][turn]]
        assert read(store, f"turn-{turn:02d}/manifest") == content(1000, seed=winner)
    assert list(store.names()) == [f"turn-{turn:02d}/manifest" for turn in range(num_rounds)]


@case
def nobody_sees_a_created_file_in_parts(store: Store, other: Store) -> None:
    data, num_files = content(200_000), 40
    names = [f"a/{index:03d}" for index in range(num_files)]
    stop = threading.Event()

    def watch(name: str) -> None:
        seen = None
        while seen is None:
            last_look = stop.is_set()
            try:
                seen = read(other, name)
            except FileNotFoundError:
                assert not last_look
        assert seen == data

    with ThreadPoolExecutor(1) as threads:
        watched = [threads.submit(watch, name) for name in names]
        try:
            for name in names:
                store.create(name, data)
        finally:
            stop.set()
        for each in watched:
            each.result()


@case
def names_are_sorted_and_reach_every_depth(store: Store, other: Store) -> None:
    names = ["a", "b-c/d", "b/c", "b/c.d/e/f", "b/c.e", "b/\u00e9", "bb/c", "save-1/x", "save-10/x"]
    for name in reversed(names):
        store.create(name, b"x")
    assert list(other.names()) == sorted(names)
    assert list(other.names("b")) == ["b/c", "b/c.d/e/f", "b/c.e", "b/\u00e9"]
    assert list(other.names("b/c.d")) == ["b/c.d/e/f"]
    assert list(other.names("save-1")) == ["save-1/x"]
    for nothing in ("a", "c", "b/c", "save", "save-1/x/y"):
        assert list(other.names(nothing)) == []


@case
def listings_are_never_stale(store: Store, other: Store) -> None:
    assert list(store.names()) == []
    assert list(store.names("a")) == []
    other.create("a/x", b"1")
    assert list(store.names("a")) == ["a/x"]
    put(other, "a/y", b"12")
    assert list(store.names("a")) == ["a/x", "a/y"]
    other.delete("a/x")
    assert list(store.names()) == ["a/y"]
    other.delete("a/y")
    other.create("a/y", b"123")
    assert read(store, "a/y") == b"123"


@case
def deleting_is_done_once(store: Store, other: Store) -> None:
    store.create("a/b/x", b"x")
    store.create("a/y", b"y")
    other.delete("a/b/x")
    other.delete("a/b/x")
    other.delete("never/was")
    other.delete("a/y/below a file")
    assert list(store.names()) == ["a/y"]
    store.delete("a/y")
    assert list(other.names()) == []
    other.create("a/b/x", b"again")
    assert read(store, "a/b/x") == b"again"


@case
def faster_ways_do_what_the_others_do(store: Store, other: Store) -> None:
    for name in ("a", "b/c/d", "b/e", "bb/f"):
        store.create(name, content(len(name)))
    if hasattr(other, "folders"):
        assert sorted(other.folders()) == ["b", "bb"]
    if hasattr(other, "sizes"):
        assert other.sizes("") == {"a": 1, "b/c/d": 5, "b/e": 3, "bb/f": 4}
        assert other.sizes("b") == {"b/c/d": 5, "b/e": 3}
        assert other.sizes("nothing") == {}
    if hasattr(store, "check_creation"):
        store.check_creation("b/probe")
        assert list(other.names("b")) == ["b/c/d", "b/e"]
    if hasattr(store, "delete_all"):
        store.delete_all([])
        store.delete_all(["b/e", "never/was", "b/c/d", "a"])
        assert list(other.names()) == ["bb/f"]
        if hasattr(other, "folders"):
            assert other.folders() == ["bb"]


@case
def folders_may_go_while_files_come(store: Store, other: Store) -> None:
    def come_and_go(thread: int) -> None:
        mine = (store, other)[thread % 2]
        for turn in range(40):
            if turn % 2:
                mine.create(f"deep/folder/{thread}", b"x")
            else:
                put(mine, f"deep/folder/{thread}", b"x")
            mine.delete(f"deep/folder/{thread}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(come_and_go, range(4)))
    assert list(store.names()) == []


@case
def names_that_lead_out_of_the_store_are_refused(store: Store, other: Store) -> None:
    for name in REFUSED_NAMES:
        for act in (
            store.open,
            store.delete,
            lambda name: store.create(name, b"x"),
            lambda name: store.write(name, num_bytes=0).__enter__(),
            lambda name: list(store.names(name)),
        ):
            with pytest.raises(ValueError):  # noqa: PT011  # in words of its own
                act(name)
    for act in (store.open, store.delete, lambda name: store.create(name, b"x")):
        with pytest.raises(ValueError):  # noqa: PT011
            act("")
    assert list(other.names()) == []


@case
def the_announced_size_is_kept(store: Store, other: Store) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        _write_as(store, "a/short", b"1234", num_bytes=5)
    with pytest.raises(ValueError):  # noqa: PT011
        _write_as(store, "a/long", b"123456", num_bytes=5)
    for name in ("a/short", "a/long"):
        other.delete(name)
        put(other, name, b"12345")
        assert read(store, name) == b"12345"


def _write_as(store: Store, name: str, data: bytes, *, num_bytes: int) -> None:
    with store.write(name, num_bytes=num_bytes) as writer:
        writer.write(memoryview(data))


@case
def an_error_while_writing_is_passed_on(store: Store, other: Store) -> None:
    def stop_half_way() -> None:
        with store.write("a/torn", num_bytes=100) as writer:
            writer.write(memoryview(content(60)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stop_half_way()
    other.delete("a/torn")
    put(other, "a/torn", content(100))
    assert read(store, "a/torn") == content(100)


@case
def a_reader_may_be_closed_twice(store: Store, other: Store) -> None:
    store.create("file", b"x")
    reader = other.open("file")
    reader.close()
    reader.close()
