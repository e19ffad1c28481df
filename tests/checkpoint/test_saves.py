"""Folders of saves: their order, who wins one, what is read of them, and storage that only some ranks see."""

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import LocalStore
from shardwise.checkpoint.arrangement import arrange
from shardwise.checkpoint.manifest import Head
from shardwise.checkpoint.saves import clean_up
from shardwise.checkpoint.stores import Store
from shardwise.comm.channel import alone
from shardwise.errors import CheckpointError
from tests.checkpoint.faulty import Operation, T, Watched
from tests.checkpoint.layouts import LAYOUTS, engine_of
from tests.checkpoint.small_states import (
    Whole,
    contents,
    empty_state,
    loaded,
    rubbish,
    same,
    save_state,
    whole_state,
)


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
    with pytest.raises(CheckpointError, match="keep is 0, which leaves no save"):
        checkpoint.prune(tmp_path, keep=0)


def test_what_was_begun_after_a_commit_is_not_cleaned_up_with_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, whole_state(1))
    at_work = tmp_path / "save-00000002" / "0123abcd-rank00000.safetensors"
    at_work.parent.mkdir()
    at_work.write_bytes(b"begun")
    clean_up(LocalStore(tmp_path), 1)
    assert at_work.exists()
    clean_up(LocalStore(tmp_path), 2)
    assert not at_work.exists()
    assert same(loaded(tmp_path)[0], whole_state(1))


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
    [("nothing", "holds no checkpoint: it does not exist"), ("empty", "holds no checkpoint: it is empty")],
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


def test_a_save_of_an_engine_says_its_layout(tmp_path: Path) -> None:
    plan = LAYOUTS["seven-slice"]
    sw.simulate(7, lambda channel: sw.save(tmp_path, engine_of(plan, channel), channel=channel))
    assert "dp_shard" in checkpoint.open(tmp_path).contents.layout
    assert checkpoint.verify(tmp_path).good


def tiny_states(num_tensors: int) -> Whole:
    return {f"layers.{at}.weight": torch.full((3,), float(at)) for at in range(num_tensors)}


def check_tiny(path: Path, num_tensors: int, size: int, *, seconds: float) -> None:
    """Save, verify and load, in seconds of the processor: other tests may share it."""
    began = time.process_time()
    state = tiny_states(num_tensors)
    targets = [{name: torch.zeros(3) for name in state} for _ in range(size)]
    sw.simulate(size, lambda channel: sw.save(path, state, channel=channel))
    report = checkpoint.verify(path)
    assert report.good
    assert report.num_tensors == num_tensors
    sw.simulate(size, lambda channel: sw.load(path, targets[channel.rank], channel=channel))
    expected = torch.stack(list(state.values()))
    assert all(torch.equal(torch.stack(list(target.values())), expected) for target in targets)
    assert time.process_time() - began < seconds


@pytest.mark.stress
def test_tens_of_thousands_of_tiny_tensors_are_saved_verified_and_loaded(tmp_path: Path) -> None:
    check_tiny(tmp_path, 21_000, 1, seconds=24)
    assert len(contents(tmp_path)) == 1 + 1 + 2  # manifest, data, tables of 20,000


def test_many_tiny_tensors_of_two_ranks_are_saved_verified_and_loaded(tmp_path: Path) -> None:
    check_tiny(tmp_path, 2_000, 2, seconds=12)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "seconds"), [(1, 110), (2, 300)])
def test_a_hundred_thousand_tiny_tensors_are_saved_verified_and_loaded(
    tmp_path: Path, size: int, seconds: float
) -> None:
    check_tiny(tmp_path, 100_000, size, seconds=seconds)


@pytest.mark.parametrize("start", [0, 1 << 19])
@pytest.mark.parametrize("num_elements", [1 << 18, (1 << 19) + 3, 1 << 20])
def test_replicas_of_a_large_run_share_its_elements_wherever_it_begins(start: int, num_elements: int) -> None:
    size = start + num_elements + 5
    ends = [(0, start), (start, start + num_elements), (start + num_elements, size)]
    before, run, after = (sw.Piece(name="w", dtype="float32", global_shape=(size,), run=each) for each in ends)
    alone_on = [[before] if start else [], [], [], [after]]
    written = arrange([*([*each, run] for each in alone_on[:3]), alone_on[3]], "pieces", block_bytes=1 << 18).written
    runs = sorted((piece.elements.start, piece.elements.stop) for rank in written for piece in rank)
    assert (runs[0][0], runs[-1][1]) == (0, size)
    assert all(stop == following for (_, stop), (following, _) in pairwise(runs))
    parts = [sum(piece.num_elements for piece in rank if piece != before) for rank in written[:3]]
    assert sum(parts) == num_elements
    assert max(parts) < num_elements or num_elements == 1 << 18, "small ones stay whole"


def test_the_metadata_of_a_save_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sw.save(tmp_path, {"w": torch.ones(2)})
    parsed: list[str] = []

    def noted(manifest: bytes, *, location: str) -> Head:
        parsed.append(location)
        return unpack(manifest, location=location)

    unpack = Head.unpack
    monkeypatch.setattr(Head, "unpack", noted)
    sw.load(tmp_path, {"w": torch.zeros(2)})
    assert parsed == [str(tmp_path / "save-00000001" / "manifest.json")]
