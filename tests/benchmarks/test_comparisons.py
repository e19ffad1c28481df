"""What the benchmark compares, and that it refuses to time something that does not train."""

import pytest
import torch

from benchmarks.asked import Asked, pairs, sides_of
from benchmarks.rank import Cell, Outcome, prove_training
from benchmarks.sides import SIDES
from benchmarks.silence import Silence
from benchmarks.table import table
from benchmarks.workload import Side, Training


def _side(name: str, *, trains_fully: bool = True) -> Side:
    return Side(
        name=name, about="", prepare=lambda model, k: Training(step=lambda batch: 0.0), trains_fully=trains_fully
    )


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("shape", ["2x128", "1x32"])
def test_every_compared_side_exists(shape: str, num_microbatches: int) -> None:
    assert set(sides_of(pairs(shape, num_microbatches))) <= SIDES.keys()


def test_a_bound_says_below_or_at_most() -> None:
    assert Asked(limit=0.8).is_met_by(0.8)
    assert not Asked(limit=0.8, strictly=True).is_met_by(0.8)


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    outcome = Outcome(
        cell=Cell(sides=("ours", "ddp"), shape="1x32", num_microbatches=1, num_rounds=3),
        num_steps_per_turn=1,
        seconds={"ours": [0.5, 3.0, 2.0], "ddp": [1.0, 10.0, 1.0]},  # ratios 0.5, 0.3, 2.0; of the medians 2.0
        passes={},
        losses={},
        held_bytes={"ours": 1_000_000, "ddp": 2_000_000},
        predicted_bytes={},
    )
    cells = [cell.strip() for cell in table([outcome]).splitlines()[-1].strip("|").split("|")]
    assert cells[:7] == ["1", "1x32", "ours", "ddp", "2000.0", "1000.0", "0.500"]
    assert cells[8:] == ["<= 0.62", "yes", "1 / 2"]


@pytest.mark.parametrize(
    ("losses", "problem"),
    [
        ([8.0, 8.0], "should fall"),
        ([9.0, 7.0], "the first loss is 9.0000"),
        ([8.0, 6.0], "the last loss is 6.0000"),
        ([8.0, float("nan")], "should fall"),
    ],
)
def test_a_side_that_does_not_train_as_the_others_is_refused(losses: list[float], problem: str) -> None:
    sides = [_side("a"), _side("b"), _side("odd")]
    with pytest.raises(RuntimeError, match=problem) as refusal:
        prove_training(sides, {"a": [8.0, 7.0], "b": [8.0, 7.0], "odd": losses})
    assert "\na:" not in str(refusal.value)


def test_a_side_that_exchanges_nothing_may_end_elsewhere() -> None:
    sides = [_side("a"), _side("silent", trains_fully=False)]
    prove_training(sides, {"a": [8.0, 7.0], "silent": [8.0, 7.5]})


def test_silence_moves_only_the_own_part() -> None:
    channel = Silence(rank=1, size=2)
    gathered, reduced = torch.zeros(5), torch.zeros(2)
    channel.all_gather(gathered, torch.ones(2), purpose="weights", counts=[3, 2]).wait()
    channel.reduce_scatter(reduced, torch.arange(5.0), purpose="gradients", counts=[3, 2]).wait()
    assert gathered.tolist() == [0, 0, 0, 1, 1]
    assert reduced.tolist() == [3, 4]
    assert channel.exchange(b"x", purpose="losses") == [b"x", b"x"]
