"""Folders of saves: their order, who wins one, what is read of them, and storage that only some ranks see."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import Address, LocalStore, rounds
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.transfers import pack
from shardwise.comm import Channel
from shardwise.comm.alone import alone
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.checkpoint.faulty import Counting, Operation, T, Watched
from tests.checkpoint.layouts import LAYOUTS, engine_of
from tests.checkpoint.small_states import (
    Whole,
    contents,
    empty_state,
    loaded,
    rubbish,
    same,
    share_of_state,
    whole_state,
)


def save_state(path: Address, seed: int, *, size: int = 1, layout: Literal["pieces", "whole"] = "pieces") -> None:
    def run(channel: Channel) -> None:
        state = share_of_state(whole_state(seed), channel.rank, size)
        sw.save(path, state, extra={"state": seed}, step=10 * seed, layout=layout, channel=channel)

    sw.simulate(size, run)


def test_saves_of_several_layouts_lie_side_by_side_and_load_by_step_or_folder(tmp_path: Path) -> None:
    for seed, size, layout in ((1, 3, "pieces"), (2, 1, "whole"), (3, 2, "whole")):
        save_state(tmp_path, seed, size=size, layout=layout)  # type: ignore[arg-type]
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == [f"save-0000000{number}" for number in (1, 2, 3)]
    for seed in (1, 2, 3):
        for found, extra in (loaded(tmp_path, step=10 * seed), loaded(tmp_path / f"save-0000000{seed}")):
            assert same(found, whole_state(seed))
            assert extra == {"state": seed}
            assert extra.report.step == 10 * seed  # type: ignore[attr-defined]
    assert same(loaded(tmp_path)[0], whole_state(3))
    with pytest.raises(CheckpointError, match="has no save of step 7; it has saves of these steps: 10, 20, 30"):
        loaded(tmp_path, step=7)


def test_a_save_of_the_same_step_goes_before_the_older_one(tmp_path: Path) -> None:
    for seed in (1, 2):
        checkpoint.save(tmp_path, whole_state(seed), step=5)
    assert same(loaded(tmp_path, step=5)[0], whole_state(2))


def test_old_saves_are_pruned_and_numbers_go_on(tmp_path: Path) -> None:
    for seed in range(1, 6):
        save_state(tmp_path, seed)
    assert checkpoint.prune(tmp_path, keep=2) == ["save-00000001", "save-00000002", "save-00000003"]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["save-00000004", "save-00000005"]
    save_state(tmp_path, 6)
    assert same(loaded(tmp_path / "save-00000006")[0], whole_state(6))
    assert checkpoint.prune(tmp_path, keep=9) == []
    with pytest.raises(CheckpointError, match="keep=0 would leave no save"):
        checkpoint.prune(tmp_path, keep=0)


def test_a_good_load_follows_a_failed_one(tmp_path: Path) -> None:
    save_state(tmp_path, 1, size=2)
    target = empty_state()
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.load(tmp_path, {**target, "more": torch.ones(1)})
    assert same(target, empty_state())
    checkpoint.load(tmp_path, target)
    assert same(target, whole_state(1))


@pytest.mark.parametrize(
    ("place", "said"),
    [("nothing", "holds no checkpoint: it is empty or does not exist"), ("empty", "holds no checkpoint: it is empty")],
)
def test_places_without_a_save_say_so(place: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for look in (loaded, checkpoint.verify, checkpoint.open):
        with pytest.raises(CheckpointError, match=said):
            look(tmp_path / place)


class Meeting(Watched):
    """Savers wait for each other before the commit."""

    def __init__(self, store: Store, barrier: threading.Barrier) -> None:
        super().__init__(store)
        self._barrier = barrier

    def perform(self, operation: Operation, act: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        if operation.kind == "create" and operation.name.endswith("manifest.json"):
            self._barrier.wait(30)
        return act()


def save_at_once(stores: Sequence[Store], seeds: Sequence[int]) -> list[CheckpointError | None]:
    """One saver per store, each a thread that is alone; None for each that saved."""
    outcomes: list[CheckpointError | None] = [None] * len(stores)

    def run(at: int) -> None:
        try:
            state = whole_state(seeds[at])
            sw.save(stores[at], state, extra={"state": seeds[at]}, channel=alone())
        except CheckpointError as error:
            outcomes[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("num_older", [0, 1])
def test_of_savers_that_meet_one_wins_and_the_others_say_so(num_older: int, tmp_path: Path) -> None:
    for _ in range(num_older):
        save_state(tmp_path, 9)
    barrier = threading.Barrier(4)
    outcomes = save_at_once([Meeting(LocalStore(tmp_path), barrier) for _ in range(4)], range(4))
    assert outcomes.count(None) == 1
    for error in outcomes:
        assert error is None or (
            f"another program saved to {tmp_path} at the same time and committed save-0000000{num_older + 1} first"
            in str(error)
        )
    found, extra = loaded(tmp_path)
    assert extra == {"state": outcomes.index(None)}
    assert same(found, whole_state(outcomes.index(None)))
    assert checkpoint.verify(tmp_path).good
    save_state(tmp_path, 8)
    assert rubbish(tmp_path) == []


def test_savers_at_any_instant_win_one_number_each_or_say_that_they_lost(tmp_path: Path) -> None:
    won: list[int] = []
    for first in range(0, 40, 4):
        seeds = range(first, first + 4)
        outcomes = save_at_once([LocalStore(tmp_path) for _ in seeds], seeds)
        assert None in outcomes
        won += [seed for seed, error in zip(seeds, outcomes, strict=True) if error is None]
        assert all(error is None or "another program saved to" in str(error) for error in outcomes)
    saves = sorted(tmp_path.iterdir())
    assert [folder.name for folder in saves] == [f"save-{number:08d}" for number in range(1, len(won) + 1)]
    found = [loaded(folder) for folder in saves]
    assert sorted(seed for _, extra in found for seed in [extra["state"]]) == won  # type: ignore[type-var]
    assert all(same(state, whole_state(extra["state"])) for state, extra in found)  # type: ignore[arg-type]
    save_state(tmp_path, 99)
    assert rubbish(tmp_path) == []


# Bytes that are read, in blocks of the size that saves have.

ROWS, COLUMNS = 1536, 1024
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
    for mine, own in zip(read, needed, strict=True):
        assert own <= mine <= 1.05 * own


TOTAL_BYTES = 2 * ROWS * COLUMNS * 4


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


# Storage that only some ranks see.


@pytest.mark.parametrize("target", [by_rows, by_columns, everything])
@pytest.mark.parametrize("verify", [True, False])
def test_storage_that_one_rank_sees_is_read_by_it_and_sent_in_bounded_messages(
    verify: bool, target: Cut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 20
    for name in ("ROUND_BYTES", "OWN_BYTES", "ONE_ROUND_BYTES", "ONE_ROUND_BYTES_ALONE"):
        monkeypatch.setattr(rounds, name, limit)
    messages: list[int] = []

    def counted(parts: Any) -> torch.Tensor:
        message = pack(parts)
        messages.append(message.numel())
        return message

    monkeypatch.setattr(rounds, "pack", counted)
    save_large(tmp_path / "1", by_rows, 2)
    places = [LocalStore(tmp_path / str(rank)) for rank in range(3)]
    read, needed = data_bytes_read(tmp_path / "1", target, 3, verify=verify, places=places, shared=False)
    assert read == [0, TOTAL_BYTES, 0]
    assert sum(messages) >= needed[0] + needed[2]
    assert max(messages) <= limit


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


# Engines, and many tensors.


def test_a_save_of_an_engine_says_its_layout_and_loads_uneven_parts(tmp_path: Path) -> None:
    plan = LAYOUTS["seven-slice"]
    sw.simulate(7, lambda channel: sw.save(tmp_path, engine_of(plan, channel), channel=channel))
    assert "dp_shard" in checkpoint.open(tmp_path).contents.layout
    assert checkpoint.verify(tmp_path).good


def tiny_states(num_tensors: int) -> Whole:
    return {f"layers.{at}.weight": torch.full((3,), float(at)) for at in range(num_tensors)}


def check_tiny(path: Path, num_tensors: int, size: int, *, seconds: float) -> None:
    """Save, verify and load."""
    began = time.monotonic()
    state = tiny_states(num_tensors)
    targets = [{name: torch.zeros(3) for name in state} for _ in range(size)]
    sw.simulate(size, lambda channel: sw.save(path, state, channel=channel))
    report = checkpoint.verify(path)
    assert report.good
    assert report.num_tensors == num_tensors
    sw.simulate(size, lambda channel: sw.load(path, targets[channel.rank], channel=channel))
    expected = torch.stack(list(state.values()))
    assert all(torch.equal(torch.stack(list(target.values())), expected) for target in targets)
    assert time.monotonic() - began < seconds


def test_a_hundred_thousand_tiny_tensors_are_saved_verified_and_loaded(tmp_path: Path) -> None:
    check_tiny(tmp_path, 100_000, 1, seconds=110)
    assert len(contents(tmp_path)) == 1 + 1 + 5  # manifest, data, tables


def test_many_tiny_tensors_of_two_ranks_are_saved_verified_and_loaded(tmp_path: Path) -> None:
    check_tiny(tmp_path, 10_000, 2, seconds=60)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_hundred_thousand_tiny_tensors_of_two_ranks_are_saved_verified_and_loaded(tmp_path: Path) -> None:
    check_tiny(tmp_path, 100_000, 2, seconds=300)
