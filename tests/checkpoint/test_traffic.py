"""Bytes that loads read and send, in blocks of the size that saves have, and storage that only some ranks see."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import Address, LocalStore, read_rounds, saving
from shardwise.checkpoint.stores import Store
from shardwise.comm import Channel, Work
from shardwise.errors import CheckpointError
from shardwise.moving.mover import Mover
from shardwise.space import Piece
from tests.checkpoint.faulty import Counting, Operation
from tests.checkpoint.faulty import Watched as Observed
from tests.checkpoint.small_states import Whole, empty_state, same, save_state, whole_state
from tests.comm.boards import on_threads
from tests.moving.watched import Watched

ROWS, COLUMNS = 1536, 1024
TOTAL_BYTES = 2 * ROWS * COLUMNS * 4
LARGE: dict[str, tuple[int, ...]] = {"w": (ROWS, COLUMNS), "v": (COLUMNS, ROWS)}
Cut = Callable[[str, tuple[int, ...], int, int], Piece]


def by_rows(name: str, shape: tuple[int, ...], rank: int, size: int) -> Piece:
    first, last = shape[0] * rank // size, shape[0] * (rank + 1) // size
    box = {"offset": (first, 0), "shape": (last - first, shape[1])}
    return Piece(name=name, dtype="float32", global_shape=shape, **box)


def by_columns(name: str, shape: tuple[int, ...], rank: int, size: int) -> Piece:
    first, last = shape[1] * rank // size, shape[1] * (rank + 1) // size
    box = {"offset": (0, first), "shape": (shape[0], last - first)}
    return Piece(name=name, dtype="float32", global_shape=shape, **box)


def by_runs(name: str, shape: tuple[int, ...], rank: int, size: int) -> Piece:
    """Uneven slices, as those of buckets."""
    cuts = [0, *(shape[0] * shape[1] * rank // size + 12345 for rank in range(1, size)), shape[0] * shape[1]]
    return Piece(name=name, dtype="float32", global_shape=shape, run=(cuts[rank], cuts[rank + 1]))


def everything(name: str, shape: tuple[int, ...], rank: int, size: int) -> Piece:
    return Piece(name=name, dtype="float32", global_shape=shape)


def large_values(name: str) -> torch.Tensor:
    shape = LARGE[name]
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) * (1 if name == "w" else -1)


def part(piece: Piece) -> torch.Tensor:
    flat = large_values(piece.name)[piece.box.slices()].reshape(-1)[piece.elements.start : piece.elements.stop]
    return flat.view(piece.shape) if piece.run is None else flat


def large_state(cut: Cut, rank: int, size: int) -> dict[Piece, torch.Tensor]:
    return {piece: part(piece) for piece in (cut(name, shape, rank, size) for name, shape in LARGE.items())}


def save_large(path: Path, cut: Cut, size: int) -> None:
    sw.simulate(size, lambda channel: sw.save(path, large_state(cut, channel.rank, size), channel=channel))


def data_bytes_read(
    path: Path, cut: Cut, size: int, *, verify: bool, places: Sequence[Store] | None = None, shared: bool = True
) -> tuple[list[int], list[int]]:
    """Per rank: bytes of data that a load reads, without headers, and bytes that it needs. Values are checked."""
    stores = [Counting(store) for store in places or [LocalStore(path)] * size]
    states = [large_state(cut, rank, size) for rank in range(size)]
    expected = [{piece: tensor.clone() for piece, tensor in state.items()} for state in states]
    for state in states:
        for tensor in state.values():
            tensor.zero_()

    def run(channel: Channel) -> int:
        report = sw.load(
            stores[channel.rank], states[channel.rank], verify=verify, shared=shared, channel=channel
        ).report
        return report.read_bytes

    reported = sw.simulate(size, run)
    for state, right in zip(states, expected, strict=True):
        assert all(torch.equal(tensor, right[piece]) for piece, tensor in state.items())
    data = [
        sum(each.num_bytes for each in store.operations if each.kind == "read_into" and ".safetensors" in each.name)
        for store in stores
    ]
    head = json.loads((path / "save-00000001/manifest.json").read_text())
    headers = sum(entry["head_bytes"] for entry in head["files"]) if verify else 0
    assert sum(data) == sum(reported) + headers
    return reported, [sum(tensor.nbytes for tensor in state.values()) for state in states]


@pytest.mark.parametrize("target", [by_rows, by_columns, by_runs, everything])
@pytest.mark.parametrize("source", [by_rows, by_runs])
def test_without_verification_each_rank_reads_what_it_needs(source: Cut, target: Cut, tmp_path: Path) -> None:
    save_large(tmp_path, source, 2)
    read, needed = data_bytes_read(tmp_path, target, 3, verify=False)
    assert all(mine <= 1.05 * own for mine, own in zip(read, needed, strict=True))
    assert sum(read) >= TOTAL_BYTES


@pytest.mark.parametrize(
    ("source", "target", "size"),
    [
        (by_rows, by_rows, 2),
        (by_rows, by_columns, 2),
        (by_rows, by_rows, 3),
        (by_runs, by_rows, 2),
        (by_runs, by_columns, 3),
        (by_columns, by_runs, 4),
        (everything, everything, 3),
        (by_rows, everything, 2),
    ],
)
def test_with_verification_all_ranks_together_read_once_what_any_of_them_needs(
    source: Cut, target: Cut, size: int, tmp_path: Path
) -> None:
    save_large(tmp_path, source, 2)
    read, _ = data_bytes_read(tmp_path, target, size, verify=True)
    assert TOTAL_BYTES <= sum(read) <= 1.05 * TOTAL_BYTES
    assert max(read) <= TOTAL_BYTES  # and they share the work
    assert target is not everything or max(read) < 1.2 * TOTAL_BYTES / size


@pytest.mark.parametrize("target", [by_rows, by_columns, everything])
@pytest.mark.parametrize("verify", [True, False])
def test_storage_that_one_rank_sees_is_read_by_it_and_sent_in_bounded_messages(
    verify: bool, target: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 20
    for name in ("ROUND_BYTES", "OWN_BYTES", "ONE_ROUND_BYTES", "ONE_ROUND_BYTES_ALONE"):
        monkeypatch.setattr(read_rounds, name, limit)
    messages: list[int] = []

    class Sending(Watched):
        def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
            messages.append(tensor.nbytes)
            return super().send(tensor, destination, purpose=purpose)

    def mover(channel: Any, **options: Any) -> Mover[Any, Any]:
        return Mover(Sending(channel), **options)

    monkeypatch.setattr(read_rounds, "Mover", mover)
    save_large(tmp_path / "1", by_rows, 2)
    places = [LocalStore(tmp_path / str(rank)) for rank in range(3)]
    read, needed = data_bytes_read(tmp_path / "1", target, 3, verify=verify, places=places, shared=False)
    assert read == [0, TOTAL_BYTES, 0]
    assert sum(messages) >= needed[0] + needed[2]
    assert max(messages) <= limit


def test_a_fast_rank_reads_the_next_round_while_a_slow_one_still_takes_from_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "BLOCK_BYTES", 64)
    for name in ("ROUND_BYTES", "OWN_BYTES", "ONE_ROUND_BYTES"):
        monkeypatch.setattr(read_rounds, name, 256)
    buffers_of_all = read_rounds._Buffers.of_all

    def slowly(buffers: read_rounds._Buffers, number: int) -> list[torch.Tensor] | None:
        if buffers._rank == 1:
            time.sleep(0.02)
        return buffers_of_all(buffers, number)

    monkeypatch.setattr(read_rounds._Buffers, "of_all", slowly)
    values = torch.arange(512)
    sw.save(tmp_path, {"w": values})
    targets = [{"w": torch.zeros_like(values)} for _ in range(2)]
    on_threads(2, lambda channel: sw.load(tmp_path, targets[channel.rank], channel=channel))
    assert all(torch.equal(target["w"], values) for target in targets)


def test_a_rank_that_needs_more_rounds_than_the_first_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "BLOCK_BYTES", 64)
    for name in ("ROUND_BYTES", "OWN_BYTES", "ONE_ROUND_BYTES", "OWN_BATCHES"):
        monkeypatch.setattr(read_rounds, name, 256 if name != "OWN_BATCHES" else 1)
    state = {"little": torch.arange(4), "much": torch.arange(512)}
    sw.save(tmp_path, state)
    targets = [{name: torch.zeros_like(state[name])} for name in state]
    sw.simulate(2, lambda channel: sw.load(tmp_path, targets[channel.rank], channel=channel))
    assert all(torch.equal(value, state[name]) for target in targets for name, value in target.items())


def load_from(places: Sequence[Address], **arguments: Any) -> tuple[list[Whole], list[str]]:
    """Whole tensors on every rank out of its own place; and the errors."""
    targets = [empty_state() for _ in places]
    errors: list[str] = []

    def run(channel: Channel) -> None:
        try:
            sw.load(places[channel.rank], targets[channel.rank], shared=False, channel=channel, **arguments)
        except CheckpointError as error:
            errors.append(str(error))

    sw.simulate(len(places), run)
    assert len(errors) in (0, len(places))
    assert len(set(errors)) <= 1
    return targets, errors


@pytest.mark.parametrize("holders", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_ranks_that_see_the_storage_read_for_those_that_do_not(holders: tuple[int, ...], tmp_path: Path) -> None:
    """Copies of a save under other paths are the same save."""
    save_state(tmp_path / "saves", 1, size=2)
    for rank in holders:
        shutil.copytree(tmp_path / "saves", tmp_path / str(rank))
    targets, errors = load_from([tmp_path / str(rank) for rank in range(3)])
    assert errors == []
    assert all(same(target, whole_state(1)) for target in targets)
    (tmp_path / str(holders[-1]) / "save-00000001/manifest.json").unlink()
    targets, errors = load_from([tmp_path / str(rank) for rank in range(3)])
    assert len(errors) == (3 if len(holders) == 1 else 0)
    assert all(same(target, empty_state() if errors else whole_state(1)) for target in targets)


def test_storage_that_no_rank_sees_is_an_error_on_all(tmp_path: Path) -> None:
    targets, errors = load_from([tmp_path / "0", tmp_path / "1"])
    assert "holds no checkpoint" in errors[0]
    assert all(same(target, empty_state()) for target in targets)


def test_ranks_that_see_different_checkpoints_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        save_state(tmp_path / str(rank), rank)
    targets, errors = load_from([tmp_path / "0", tmp_path / "1", tmp_path / "2"])
    assert f"rank 0 and rank 1 see different checkpoints at {tmp_path}/0/save-00000001 and {tmp_path}/1/" in errors[0]
    assert all(same(target, empty_state()) for target in targets)


def test_damage_that_only_the_holder_sees_is_told_to_all(tmp_path: Path) -> None:
    save_state(tmp_path / "1", 1, size=2)
    for file in sorted((tmp_path / "1/save-00000001").glob("*.safetensors")):
        good = file.read_bytes()
        for at in (9, -1):
            bad = bytearray(good)
            bad[at] ^= 4
            file.write_bytes(bad)
            targets, errors = load_from([tmp_path / str(rank) for rank in range(3)])
            assert file.name in errors[0]
            assert all(same(target, empty_state()) for target in targets)
        file.write_bytes(good)


def test_ranks_open_the_files_that_they_read_and_a_share_of_all(tmp_path: Path) -> None:
    """Not each rank each file; and a file stays open from one batch to the next."""
    num_ranks = 8

    def run(channel: Channel) -> int:
        held = {by_rows(name, shape, channel.rank, num_ranks): torch.ones(shape[0] // num_ranks, shape[1])
                for name, shape in LARGE.items()}  # fmt: skip
        sw.save(tmp_path, held, channel=channel)
        store = Counting(LocalStore(tmp_path))
        sw.load(store, held, channel=channel)
        return sum(each.kind == "open" and each.name.endswith(".safetensors") for each in store.operations)

    # Two looks at most, at its own file and at one of all, and one to read.
    assert max(sw.simulate(num_ranks, run)) <= 3


@pytest.mark.parametrize("layout", ["own", "others too"])
def test_a_file_is_opened_once_for_all_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    for name in ("ONE_ROUND_BYTES", "ONE_ROUND_BYTES_ALONE", "ROUND_BYTES", "OWN_BYTES", "IN_PLACE_BYTES"):
        monkeypatch.setattr(read_rounds, name, 1 << 20)
    sw.save(tmp_path, {name: torch.ones(shape) for name, shape in LARGE.items()})

    def run(channel: Channel) -> int:
        store = Counting(LocalStore(tmp_path))
        sw.load(store, {name: torch.empty(shape) for name, shape in LARGE.items()}, channel=channel)
        assert store.num_operations["read_into"] > 4
        return sum(each.kind == "open" and each.name.endswith(".safetensors") for each in store.operations)

    assert max(sw.simulate(1 if layout == "own" else 2, run)) <= 2


class SideBySide(Observed):
    """A store that is far: a read returns when another one is under way too."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.pairs = threading.Barrier(2)

    @property
    def parallel_reads(self) -> int:
        return 8

    def perform(self, operation: Operation, act: Callable[[], Any], half: Callable[[], None] | None = None) -> Any:
        if operation.kind == "read_into" and operation.num_bytes >= 4 << 20:
            self.pairs.wait(timeout=60)
        return act()


@pytest.mark.parametrize("way", ["load", "load foreign", "verify", "convert"])
def test_one_large_tensor_is_read_by_several_requests_side_by_side(tmp_path: Path, way: str) -> None:
    whole = torch.arange(float(16 << 20)).view(4096, 4096)  # 64 MiB
    if way == "load foreign":
        save_file({"w": whole}, tmp_path / "model.safetensors")
    else:
        sw.save(tmp_path, {"w": whole})
    store = SideBySide(LocalStore(tmp_path))
    if way == "verify":
        assert checkpoint.verify(store).good
    elif way == "convert":
        checkpoint.convert(store, tmp_path / "made", to="dcp")
    else:
        target = torch.empty_like(whole)
        sw.load(store, {"w": target})
        assert torch.equal(target, whole)
