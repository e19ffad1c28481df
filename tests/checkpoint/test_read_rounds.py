"""Bytes that loads read and send, round by round, and storage that only some ranks see."""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import Address, LocalStore, Store
from shardwise.checkpoint.local import LocalReader
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.checkpoint.cut_tensors import Cut, Pieces, cut
from tests.checkpoint.faulty import Counting, Hooked, Operation
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import Whole, empty_state, same, save_state, whole_state
from tests.comm.boards import on_threads
from tests.covering import covering
from tests.moving.watched import Watched

LARGE = {"w": torch.arange(1536.0 * 1024).view(1536, 1024), "v": -torch.arange(1536.0 * 1024).view(1024, 1536)}
TOTAL_BYTES = sum(each.nbytes for each in LARGE.values())


def shares(how: Cut | None, size: int) -> list[Pieces]:
    """Of the large tensors; how: None for all of them on every rank."""
    if how is None:
        whole = {
            Piece(name=name, dtype="float32", global_shape=tuple(each.shape)): each for name, each in LARGE.items()
        }
        return [whole] * size
    cuts = [cut(name, tensor, how, size) for name, tensor in LARGE.items()]
    return [{piece: part for each in cuts for piece, part in each[rank].items()} for rank in range(size)]


def save_large(path: Path, how: Cut | None, size: int = 2) -> None:
    held = shares(how, size)
    sw.simulate(size, lambda channel: sw.save(path, held[channel.rank], channel=channel))


def bytes_read(
    path: Path,
    how: Cut | None,
    size: int,
    *,
    places: Sequence[Store] | None = None,
    watch: Callable[[Channel], Any] = lambda channel: channel,
    **options: Any,
) -> tuple[list[int], list[int]]:
    """Per rank: bytes of data that a load reads, without headers, and bytes that it needs. Values are checked."""
    stores = [Counting(store) for store in places or [LocalStore(path)] * size]
    expected = shares(how, size)
    states = [{piece: torch.zeros_like(tensor) for piece, tensor in state.items()} for state in expected]

    def run(channel: Channel) -> int:
        state = states[channel.rank]
        return sw.load(stores[channel.rank], state, channel=watch(channel), **options).report.read_bytes

    reported = sw.simulate(size, run)
    for state, right in zip(states, expected, strict=True):
        assert all(torch.equal(tensor, right[piece]) for piece, tensor in state.items())
    data = [each for store in stores for each in store.operations if each.kind == "read_into"]
    head = json.loads((path / "save-00000001/manifest.json").read_text())
    headers = sum(entry["head_bytes"] for entry in head["files"]) if options.get("verify", True) else 0
    assert sum(each.num_bytes for each in data if ".safetensors" in each.name) == sum(reported) + headers
    return reported, [sum(tensor.nbytes for tensor in state.values()) for state in states]


CUTS: tuple[Cut | None, ...] = ("rows", "columns", "runs", None)


@pytest.mark.parametrize(("source", "target", "size"), covering(("rows", "runs", None), CUTS, (2, 3), strength=2))
def test_each_rank_reads_what_it_needs_or_with_checksums_all_together_once_what_any_needs(
    source: Cut | None, target: Cut | None, size: int, tmp_path: Path
) -> None:
    save_large(tmp_path, source)
    read, needed = bytes_read(tmp_path, target, size, verify=False)
    assert all(mine <= 1.05 * own for mine, own in zip(read, needed, strict=True))
    assert sum(read) >= TOTAL_BYTES
    read, _ = bytes_read(tmp_path, target, size, verify=True)
    assert TOTAL_BYTES <= sum(read) <= 1.05 * TOTAL_BYTES
    assert max(read) < (1.2 * TOTAL_BYTES / size if target is None else TOTAL_BYTES), "they share the work"


@pytest.mark.parametrize(("source", "size"), [("rows", 2), ("runs", 3), ("columns", 3)])
def test_thin_strips_of_a_local_file_are_copied_where_the_kernel_has_them(
    source: Cut, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_large(tmp_path, source)
    cuts: Cut = "rows" if source == "columns" else "columns"
    expected = shares(cuts, size)
    read: list[int] = []
    plainly = LocalReader.read_into

    def note(reader: LocalReader, buffer: memoryview, start: int) -> None:
        read.append(buffer.nbytes)
        plainly(reader, buffer, start)

    def run(channel: Channel) -> tuple[bool, int]:
        state = {
            piece: torch.zeros_like(tensor, dtype=torch.float64) for piece, tensor in expected[channel.rank].items()
        }
        state = {replace(piece, dtype="float64"): tensor for piece, tensor in state.items()}
        report = sw.load(tmp_path, state, verify=False, cast=True, channel=channel).report
        good = zip(state.values(), expected[channel.rank].values(), strict=True)
        return all(torch.equal(mine, right.double()) for mine, right in good), report.read_bytes

    monkeypatch.setattr(LocalReader, "read_into", note)
    found = sw.simulate(size, run)
    assert found == [(True, sum(tensor.nbytes for tensor in state.values())) for state in expected]
    assert max(read) < 1 << 16, "metadata alone"


def test_strips_of_a_large_tensor_are_looked_at_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in memory counts, and who writes to the file would wait until all of a large tensor is copied."""
    whole = torch.arange(4096 * 4096, dtype=torch.int32).view(4096, 4096)
    sw.save(tmp_path, {"w": whole})
    looked_at: list[int] = []
    plainly = LocalReader.mapped

    def note(reader: LocalReader, start: int, num_bytes: int) -> AbstractContextManager[memoryview | None]:
        looked_at.append(num_bytes)
        return plainly(reader, start, num_bytes)

    monkeypatch.setattr(LocalReader, "mapped", note)
    piece = Piece(name="w", dtype="int32", global_shape=(4096, 4096), offset=(0, 1000), shape=(4096, 1500))
    target = torch.zeros(piece.shape, dtype=torch.int32)
    sw.load(tmp_path, {piece: target}, verify=False)
    assert torch.equal(target, whole[:, 1000:2500])
    assert sum(looked_at) > 60 << 20
    assert max(looked_at) <= 32 << 20


def test_who_would_read_exactly_reads_blocks_with_those_that_need_strips(tmp_path: Path) -> None:
    save_large(tmp_path, "rows")
    expected = [shares("columns", 2)[0], shares("rows", 2)[1]]
    targets = [{piece: torch.zeros_like(tensor) for piece, tensor in state.items()} for state in expected]
    stores = [Counting(LocalStore(tmp_path)) for _ in targets]

    def run(channel: Channel) -> None:
        sw.load(stores[channel.rank], targets[channel.rank], verify=False, channel=channel)

    sw.simulate(2, run)
    for target, right in zip(targets, expected, strict=True):
        assert all(torch.equal(tensor, right[piece]) for piece, tensor in target.items())
    data = [each for store in stores for each in store.operations if each.kind == "read_into"]
    assert all(each.num_bytes >= 1 << 16 for each in data if ".safetensors" in each.name)


@pytest.mark.parametrize("target", ["rows", "columns", None])
@pytest.mark.parametrize("verify", [True, False])
def test_storage_that_one_rank_sees_is_read_by_it_and_sent_in_bounded_messages(
    verify: bool, target: Cut | None, tmp_path: Path
) -> None:
    save_large(tmp_path / "1", "rows")
    places = [LocalStore(tmp_path / str(rank)) for rank in range(3)]
    watched: list[Watched] = []

    def watch(channel: Channel) -> Any:
        watched.append(Watched(channel))
        return watched[-1]

    with small_limits(1 << 20):
        options: dict[str, Any] = {"verify": verify, "places": places, "shared": False, "watch": watch}
        read, needed = bytes_read(tmp_path / "1", target, 3, **options)
    assert read == [0, TOTAL_BYTES, 0]
    assert 0 < max(each.largest for each in watched) <= 1 << 20
    assert sum(each.sent_bytes for each in watched) >= needed[0] + needed[2]


@pytest.mark.quick
def test_a_fast_rank_reads_the_next_round_while_a_slow_one_still_takes_from_the_last(tmp_path: Path) -> None:
    """Rank 1 goes on from each verdict only when rank 0 has read again, or has nothing left to read."""
    read = threading.Condition()
    num_reads = 0

    def note(operation: Operation) -> None:
        nonlocal num_reads
        if operation.kind == "read_into":
            with read:
                num_reads += 1
                read.notify_all()

    class Slow:
        def __init__(self, channel: Channel) -> None:
            self._channel = channel

        def __getattr__(self, name: str) -> Any:
            return getattr(self._channel, name)

        def exchange(self, value: bytes, *, purpose: str) -> Any:
            found = self._channel.exchange(value, purpose=purpose)
            if "blocks that were read" in purpose:
                with read:
                    before = num_reads
                    read.wait_for(lambda: num_reads > before, timeout=0.3)
            return found

    values = torch.arange(512)
    targets = [{"w": torch.zeros_like(values)} for _ in range(2)]

    def load(channel: Channel) -> None:
        used: Any = Slow(channel) if channel.rank else channel
        store = LocalStore(tmp_path) if channel.rank else Hooked(LocalStore(tmp_path), after=note)
        sw.load(store, targets[channel.rank], channel=used)

    with small_limits(256, block_bytes=64):
        sw.save(tmp_path, {"w": values})
        on_threads(2, load)
    assert all(torch.equal(target["w"], values) for target in targets)


def test_a_rank_that_needs_more_rounds_than_the_first_gets_them(tmp_path: Path) -> None:
    state = {"little": torch.arange(4), "much": torch.arange(1 << 15)}
    targets = [{name: torch.zeros_like(state[name])} for name in state]
    with small_limits(256, block_bytes=64):
        sw.save(tmp_path, state)
        sw.simulate(2, lambda channel: sw.load(tmp_path, targets[channel.rank], channel=channel))
    assert all(torch.equal(value, state[name]) for target in targets for name, value in target.items())


def load_from(places: Sequence[Address]) -> tuple[list[Whole], str]:
    """Whole tensors on every rank out of its own place; and the error that all get."""
    targets = [empty_state() for _ in places]

    def run(channel: Channel) -> str:
        try:
            sw.load(places[channel.rank], targets[channel.rank], shared=False, channel=channel)
        except CheckpointError as error:
            return str(error)
        return ""

    (error,) = set(sw.simulate(len(places), run))
    return targets, error


@pytest.mark.parametrize("holders", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_ranks_that_see_the_storage_read_for_those_that_do_not(holders: tuple[int, ...], tmp_path: Path) -> None:
    """Copies of a save under other paths are the same save."""
    save_state(tmp_path / "saves", 1, size=2)
    for rank in holders:
        shutil.copytree(tmp_path / "saves", tmp_path / str(rank))
    for num_good in (len(holders), len(holders) - 1):
        targets, error = load_from([tmp_path / str(rank) for rank in range(3)])
        assert ("holds no" in error) == (num_good <= 0)
        assert all(same(target, empty_state() if error else whole_state(1)) for target in targets)
        for rank in holders[-1:]:
            (tmp_path / str(rank) / "save-00000001/manifest.json").unlink(missing_ok=True)


def test_ranks_that_see_different_checkpoints_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        save_state(tmp_path / str(rank), rank)
    targets, error = load_from([tmp_path / "0", tmp_path / "1", tmp_path / "2"])
    assert f"rank 0 and rank 1 see different checkpoints at {tmp_path}/0/save-00000001 and {tmp_path}/1/" in error
    assert all(same(target, empty_state()) for target in targets)


def num_opened(store: Counting) -> int:
    return sum(each.kind == "open" and each.name.endswith(".safetensors") for each in store.operations)


def test_ranks_open_the_files_that_they_read_and_a_share_of_all_once_for_all_batches(tmp_path: Path) -> None:
    """Not each rank each file."""
    held = shares("rows", 8)

    def run(channel: Channel) -> int:
        sw.save(tmp_path, held[channel.rank], channel=channel)
        store = Counting(LocalStore(tmp_path))
        sw.load(store, held[channel.rank], channel=channel)
        return num_opened(store)

    assert max(sw.simulate(8, run)) <= 2  # its own file, and one of all

    def again(channel: Channel) -> int:
        store = Counting(LocalStore(tmp_path / "one"))
        sw.load(store, {name: torch.empty_like(each) for name, each in LARGE.items()}, channel=channel)
        assert store.num_operations["read_into"] > 4
        return num_opened(store)

    sw.save(tmp_path / "one", LARGE)
    for size in (1, 2):
        with small_limits(1 << 20):
            assert max(sw.simulate(size, again)) == 1


class SideBySide(Hooked):
    """A store that is far: a read of 1 MiB and more returns when eight of them are under way."""

    def __init__(self, store: Store) -> None:
        eight = threading.Barrier(8)
        self.opened: list[str] = []
        self.num_listings = 0

        def meet(operation: Operation) -> None:
            self.num_listings += operation.kind == "names"
            if operation.kind == "open":
                self.opened.append(operation.name)
            if operation.kind == "read_into" and operation.num_bytes >= 1 << 20:
                eight.wait(timeout=20)

        super().__init__(store, meet)

    @property
    def parallel_reads(self) -> int:
        return 8


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("num_tensors", [1, 32])
@pytest.mark.parametrize("way", ["load", "load more", "load foreign", "verify", "convert"])
def test_eight_requests_are_under_way_to_a_file_that_is_opened_once(tmp_path: Path, way: str, num_tensors: int) -> None:
    """Of 32 MiB, or of 64 MiB, which are not read at once."""
    rows = (8192 if way == "load more" else 4096) // num_tensors
    state = {f"w{at}": torch.arange(rows * 2048.0).view(rows, 2048) + at for at in range(num_tensors)}
    if way == "load foreign":
        save_file(state, tmp_path / "model.safetensors")
    else:
        sw.save(tmp_path, state)
    store = SideBySide(LocalStore(tmp_path))
    if way == "verify":
        assert checkpoint.verify(store).good
    elif way == "convert":
        checkpoint.convert(store, tmp_path / "made", to="dcp")
    else:
        target = {name: torch.empty_like(each) for name, each in state.items()}
        sw.load(store, target)
        assert all(torch.equal(target[name], each) for name, each in state.items())
        assert store.num_listings == 1
    header_too = way == "load foreign"
    assert sum(name.endswith(".safetensors") for name in store.opened) == 1 + header_too


@pytest.mark.parametrize("how", [None, "columns"])
@pytest.mark.parametrize("rewrite", [None, sw.Rewrite("w^T -> x\nv^T -> w\nx -> v")])
@pytest.mark.parametrize("shared", [True, False])
def test_few_exchanges_come_before_the_first_byte_of_data(
    how: Cut | None, rewrite: sw.Rewrite | None, shared: bool, tmp_path: Path
) -> None:
    save_large(tmp_path, "rows")
    targets = shares(how, 2)

    def run(channel: Channel) -> int:
        purposes: list[str] = []
        counts: list[int] = []

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(channel, name)

            def exchange(self, value: bytes, *, purpose: str) -> Any:
                purposes.append(purpose)
                return channel.exchange(value, purpose=purpose)

        def note(operation: Operation) -> None:
            if operation.kind == "read_into" and operation.num_bytes >= 1 << 18:
                counts.append(len(purposes))

        counted: Any = Counted()
        store = Hooked(LocalStore(tmp_path), note)
        sw.load(store, targets[channel.rank], channel=counted, rewrite=rewrite, shared=shared)
        return counts[0]

    assert set(sw.simulate(2, run)) == {3}


@pytest.mark.parametrize("how", ["rows", "columns"])
def test_ranks_share_memory_only_where_one_needs_what_another_one_reads(how: Cut, tmp_path: Path) -> None:
    """It is slow to take, page by page."""
    save_large(tmp_path, "rows")
    expected = shares(how, 2)

    def run(channel: Channel) -> list[int]:
        shared: list[int] = []

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(channel, name)

            def share(self, num_bytes: int) -> Any:
                shared.append(num_bytes)
                return channel.share(num_bytes)

        counted: Any = Counted()
        target = {piece: torch.zeros_like(tensor) for piece, tensor in expected[channel.rank].items()}
        sw.load(tmp_path, target, channel=counted)
        assert all(torch.equal(target[piece], tensor) for piece, tensor in expected[channel.rank].items())
        return shared

    assert all(bool(shared) == (how == "columns") for shared in sw.simulate(2, run))


def test_small_tensors_that_all_need_are_read_whole_by_ranks_in_turn(tmp_path: Path) -> None:
    """Parts of them would be copied in three pieces each: a part of a row, rows, and a part of a row."""
    state = {f"w{at}": torch.arange(512.0 * 257).view(257, 512) + at for at in range(80)}
    sw.save(tmp_path, state)
    stores = [Counting(LocalStore(tmp_path)) for _ in range(2)]
    reads: list[list[range]] = [[], []]

    def run(channel: Channel) -> int:
        class Noting:
            def __init__(self, reader: Any) -> None:
                self._reader, self.size, self.close = reader, reader.size, reader.close

            def read_into(self, buffer: memoryview, start: int) -> None:
                reads[channel.rank].append(range(start, start + buffer.nbytes))
                self._reader.read_into(buffer, start)

        store: Any = stores[channel.rank]
        opened = store.open
        store.open = lambda name: Noting(opened(name)) if name.endswith(".safetensors") else opened(name)
        target = {name: torch.empty_like(each) for name, each in state.items()}
        report = sw.load(store, target, channel=channel).report
        assert all(torch.equal(target[name], each) for name, each in state.items())
        return report.read_bytes

    read_bytes = sw.simulate(2, run)
    assert max(read_bytes) < 1.1 * min(read_bytes)
    for tensor in checkpoint.open(tmp_path).tensors.values():
        (piece,) = tensor.pieces
        place = range(piece.start, piece.start + piece.num_bytes)
        readers = [
            rank
            for rank, ranges in enumerate(reads)
            if any(each.start < place.stop and place.start < each.stop and len(each) > 8192 for each in ranges)
        ]
        assert len(readers) == 1, tensor.name


@pytest.mark.parametrize("way", ["load", "load foreign", "verify"])
def test_nothing_is_under_way_any_more_when_a_read_ahead_has_failed(tmp_path: Path, way: str) -> None:
    """Else it would go on to write to the target."""
    state = {f"w{at}": torch.arange(2048.0 * 2048).view(2048, 2048) + at for at in range(4)}  # 64 MiB
    sw.save(tmp_path, state) if way != "load foreign" else save_file(state, tmp_path / "model.safetensors")
    eight, never = threading.Barrier(8), threading.Event()
    counts = {"begun": 0, "ended": 0}
    counting = threading.Lock()

    def count(operation: Operation, what: str) -> bool:
        if operation.kind != "read_into" or operation.num_bytes < 1 << 20:
            return False
        with counting:
            counts[what] += 1
            return counts[what] == 1

    def begin(operation: Operation) -> None:
        if operation.kind == "read_into" and operation.num_bytes >= 1 << 20:
            is_first = count(operation, "begun")
            if counts["begun"] <= 8:
                eight.wait(timeout=20)
            if is_first:
                count(operation, "ended")
                raise OSError(5, "Input/output error")
            never.wait(0.1)

    class Far(Hooked):
        parallel_reads = 8

    store = Far(LocalStore(tmp_path), begin, lambda operation: count(operation, "ended"))
    if way == "verify":
        assert "Input/output error" in checkpoint.verify(store).findings[0]
    else:
        with pytest.raises(CheckpointError, match="Input/output error"):
            sw.load(store, {name: torch.empty_like(each) for name, each in state.items()})
    assert counts["begun"] == counts["ended"] >= 8


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_pass_over_a_few_odd_bytes_from_afar_finds_elements_where_they_can_be(
    tmp_path: Path, size: int
) -> None:
    state = {"w": torch.arange(5.0), "mask": torch.ones(101, dtype=torch.bool)}
    sw.save(tmp_path, state)

    class Far(Hooked):
        parallel_reads = 8

    def load(channel: Channel) -> bool:
        target = {name: torch.zeros_like(each) for name, each in state.items()}
        sw.load(Far(LocalStore(tmp_path)), target, verify="first", channel=channel)
        return all(torch.equal(target[name], each) for name, each in state.items())

    assert all(sw.simulate(size, load))


def test_of_very_many_files_few_are_open_at_a_time(tmp_path: Path) -> None:
    state = {f"w{at}": torch.full((4096,), float(at)) for at in range(200)}
    for at, (name, tensor) in enumerate(state.items(), 1):
        save_file({name: tensor}, tmp_path / f"model-{at:05d}-of-00200.safetensors")
    is_open: set[str] = set()
    most = 0

    class Noting(Hooked):
        def open(self, name: str) -> Any:
            nonlocal most
            reader = super().open(name)
            inner = reader.close

            def close() -> None:
                is_open.discard(name)
                inner()

            is_open.add(name)
            most = max(most, len(is_open))
            reader.close = close  # type: ignore[method-assign]
            return reader

    target = {name: torch.empty_like(each) for name, each in state.items()}
    sw.load(Noting(LocalStore(tmp_path)), target)
    assert all(torch.equal(target[name], each) for name, each in state.items())
    assert not is_open
    assert most <= 65
