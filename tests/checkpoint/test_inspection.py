"""Damage of every kind is found, and named: flipped bits, files that are missing, cut, grown or swapped."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import Address, LocalStore
from shardwise.checkpoint.loading import Verify
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from shardwise.space import Piece
from tests.checkpoint.faulty import FailingAt
from tests.checkpoint.small_limits import small_limits
from tests.checkpoint.small_states import (
    Whole,
    empty_state,
    loaded,
    same,
    save_state,
    whole_state,
)

VERIFIED: tuple[Verify, Verify] = (True, "first")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two saves of two ranks each, in small blocks: of state 1, and of state 2."""
    with small_limits(block_bytes=32):
        for seed in (1, 2):
            save_state(tmp_path / "saves", seed, size=2)
    return tmp_path / "saves"


def files_of(path: Path, number: int) -> dict[str, Path]:
    """The files of a save by what they are: "manifest", "table", "rank 0", "rank 1"."""
    folder = path / f"save-{number:08d}"
    [table] = folder.glob("*-tensors-*.json")
    ranks = {f"rank {int(each.stem[-5:])}": each for each in folder.glob("*.safetensors")}
    return {"manifest": folder / "manifest.json", "table": table, **ranks}


def load_by_ranks(
    places: Sequence[Address], *, verify: Verify = True, empty: Callable[[], Whole] = empty_state
) -> tuple[list[Whole], str]:
    """What the target of each rank is after a load from its place, and the error that all ranks got, if they did."""
    errors: list[str] = []
    targets = [empty() for _ in places]

    def run(channel: Channel) -> None:
        try:
            sw.load(places[channel.rank], targets[channel.rank], verify=verify, channel=channel)
        except CheckpointError as error:
            errors.append(str(error))

    sw.simulate(len(places), run)
    assert len(errors) in (0, len(places))
    assert len(set(errors)) <= 1
    return targets, errors[0] if errors else ""


def check_refused(path: Path, *named: str) -> None:
    """Verification and loads say what is wrong, by name, and change nothing."""
    try:
        report = checkpoint.verify(path)
        assert not report.good
        problems = "\n".join(report.findings)
    except CheckpointError as error:
        problems = str(error)
    for each in named:
        assert each in problems
    for num_ranks, verify in zip((1, 3), VERIFIED, strict=True):
        targets, refusal = load_by_ranks([path] * num_ranks, verify=verify)
        for each in named:
            assert each in refusal
        assert all(same(target, empty_state()) for target in targets)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("kind", ["table", "rank 0", "rank 1"])
def test_files_swapped_between_two_saves_are_named(kind: str, path: Path) -> None:
    one, other = files_of(path, 1)[kind], files_of(path, 2)[kind]
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    check_refused(path, other.name)
    one.write_bytes(first)
    other.write_bytes(second)
    assert same(loaded(path)[0], whole_state(2))


def test_files_swapped_between_two_ranks_are_named(tmp_path: Path) -> None:
    """Even where they have the same size, and one header would do for both."""

    def run(channel: Channel) -> None:
        piece = Piece(name="w", dtype="int64", global_shape=(4,), offset=(2 * channel.rank,), shape=(2,))
        sw.save(tmp_path / "saves", {piece: torch.arange(2) + 2 * channel.rank}, channel=channel)

    sw.simulate(2, run)
    one, other = files_of(tmp_path / "saves", 1)["rank 0"], files_of(tmp_path / "saves", 1)["rank 1"]
    first, second = one.read_bytes(), other.read_bytes()
    assert len(first) == len(second)
    for a, b in [(second, first), (first[:-16] + second[-16:], second[:-16] + first[-16:])]:
        one.write_bytes(a)
        other.write_bytes(b)
        target = {"w": torch.full((4,), 9)}
        with pytest.raises(CheckpointError) as caught:
            sw.load(tmp_path / "saves", target)
        findings = "\n".join(checkpoint.verify(tmp_path / "saves").findings)
        for file in (one, other):
            assert file.name in str(caught.value)
            assert file.name in findings
        assert same(target, {"w": torch.full((4,), 9)})


def test_a_step_is_found_behind_a_damaged_manifest(path: Path) -> None:
    cut(files_of(path, 2)["manifest"])
    assert same(loaded(path, step=10)[0], whole_state(1))
    with pytest.raises(CheckpointError) as caught:
        loaded(path, step=20)
    assert "has no save of step 20; it has saves of these steps: 10" in str(caught.value)
    assert "save-00000002/manifest.json is damaged" in str(caught.value)


@pytest.fixture
def small_rounds() -> Iterator[None]:
    with small_limits(256, block_bytes=64):
        yield


def harm_block_of(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(("num_ranks", "place"), [(1, 0), (2, 0), (2, 900), (1, -1)])
def test_damage_in_any_round_leaves_the_target_or_says_that_it_is_overwritten(
    num_ranks: int, place: int, small_rounds: None, tmp_path: Path
) -> None:
    values = torch.arange(256)
    checkpoint.save(tmp_path, {"w": values})
    file = files_of(tmp_path, 1)["rank 0"]
    header = len(file.read_bytes()) - 2048
    harm_block_of(file, place if place < 0 else header + place)
    untouched = {"w": torch.full((256,), -1)}
    results = {}
    for verify in VERIFIED:
        targets, error = load_by_ranks(
            [tmp_path] * num_ranks, verify=verify, empty=lambda: {"w": torch.full((256,), -1)}
        )
        assert file.name in error
        results[verify] = all(same(target, untouched) for target in targets), error
    assert results["first"][0]
    assert "nothing of the target was changed" in results["first"][1]
    # What one rank needs for itself is read straight into the target, and verified there.
    assert results[True][0] == (place == 0 and num_ranks == 2)
    assert results[True][0] or "the target is partly overwritten by now" in results[True][1]
    harm_block_of(file, place if place < 0 else header + place)
    target = {"w": torch.full((256,), -1)}
    sw.load(tmp_path, target, verify="first")
    assert torch.equal(target["w"], values)


def test_a_store_that_fails_at_any_operation_of_a_load_is_an_error_on_all_ranks(path: Path) -> None:
    for victim, verify in ((0, True), (1, False)):
        for n in range(1, 100):
            failing = FailingAt(LocalStore(path), n, PermissionError(13, "Permission denied"))
            places: list[Address] = [path, path]
            places[victim] = failing
            targets, error = load_by_ranks(places, verify=verify)
            if not failing.failed:
                break
            assert "Permission denied" in error, n
            assert str(path) in error
            assert "overwritten" in error or all(same(target, empty_state()) for target in targets)
        assert n > (3 if victim else 10)
        assert not error
        assert all(same(target, whole_state(2)) for target in targets)
