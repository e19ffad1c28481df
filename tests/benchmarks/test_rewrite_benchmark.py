"""What the rewrite benchmark measures: it proves what it times, and says what was met."""

from pathlib import Path

import pytest
import torch

from benchmarks.limits import Finding
from benchmarks.rewrite import planning, rounds, table
from benchmarks.rewrite.__main__ import plan
from benchmarks.rewrite.asked import findings
from benchmarks.rewrite.converting import COPY, OPEN, RUNS
from benchmarks.rewrite.experts import NAMES_PER_LAYER, ExpertModel
from benchmarks.rewrite.outcome import Cell, Outcome
from benchmarks.rewrite.weights import Weights, prove

SMALL = Cell(work="converting", size=26 * 10**6, num_rounds=1)


def planned(num_names: int, seconds: float) -> Outcome:
    """Planning in which each phase takes as long."""
    cell = Cell(work="planning", size=num_names, num_rounds=1)
    return Outcome(cell=cell, seconds={phase: [seconds] for phase in planning.PHASES})


def converted(copies: list[float], ours: list[float], peaks: list[int]) -> Outcome:
    outcome = Outcome(cell=SMALL, seconds=dict.fromkeys(RUNS, ours), peaks=dict.fromkeys(RUNS, peaks))
    outcome.seconds[COPY] = copies
    outcome.peaks[OPEN] = [100 << 20] * len(copies)
    return outcome


def test_planning_of_one_layer_finds_what_it_asks_for_in_every_phase() -> None:
    assert planning.plan(NAMES_PER_LAYER).keys() == set(planning.PHASES)


def test_a_layer_of_the_model_has_as_many_names_as_it_says_and_loses_none() -> None:
    model = ExpertModel(num_layers=2)
    assert len(model.sources()) == 2 * NAMES_PER_LAYER
    elements = [
        sum(torch.Size(meta.shape).numel() for meta in side.values()) for side in (model.sources(), model.targets())
    ]
    assert elements[0] == elements[1]


@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_small_model_is_converted_by_every_run_and_every_verdict_is_printed(tmp_path: Path) -> None:
    outcome = rounds.measure(SMALL, tmp_path)
    assert not list(tmp_path.iterdir())
    assert outcome.seconds.keys() == outcome.peaks.keys() == RUNS.keys()
    assert all(len(seconds) == 1 for seconds in outcome.seconds.values())
    text = table.asked_table([outcome])
    assert text.count("\n") == 1 + len(findings([outcome])) == 5
    table.write(tmp_path, "small", [outcome], "made here")
    assert text in (tmp_path / "small.md").read_text()


def test_a_converted_model_that_differs_in_one_element_is_refused(tmp_path: Path) -> None:
    weights = Weights(num_layers=1, num_words=8)
    weights.write(tmp_path)
    with pytest.raises(RuntimeError, match=r"layers\.0\.qkv is not what plain torch makes"):
        prove(weights, tmp_path, lambda name: torch.zeros(1024, 1536, dtype=torch.bfloat16))


def test_sizes_of_zero_are_left_out_of_the_plan() -> None:
    assert [(cell.work, cell.size) for cell in plan([0], [5], 1)] == [("converting", 5 * 10**6)]


@pytest.mark.parametrize("megabytes", [26, 200, 1000])
def test_a_model_has_about_the_size_that_was_asked_for(megabytes: int) -> None:
    assert abs(Weights.of_bytes(megabytes * 10**6).num_bytes / 10**6 - megabytes) < 12


def test_seconds_are_asked_of_the_most_names_and_growth_of_most_and_fewest() -> None:
    found = findings([planned(10_000, 0.1), planned(30_000, 0.2), planned(100_000, 1.0)])
    assert [(each.cell.size, each.median, each.met) for each in found] == [
        (100_000, 3.0, True),
        (100_000, 3.0, True),
        (100_000, pytest.approx(1.0), True),
        (100_000, pytest.approx(1.0), True),
    ]
    assert not findings([planned(10_000, 0.1), planned(100_000, 2.0)])[0].met


def test_the_ratio_of_a_conversion_is_the_median_of_the_rounds_ratios_and_its_peak_is_above_opening() -> None:
    ratio, peak = findings([converted([1.0, 1.0, 2.0], [1.4, 2.0, 2.0], [200 << 20, 300 << 20, 220 << 20])])[:2]
    assert (ratio.median, ratio.met) == (1.4, True)
    assert (peak.median, peak.met, peak.unit) == (120, True, " MiB")
    assert not Finding(cell=SMALL, what="", limit=1.3, values=ratio.values).met
