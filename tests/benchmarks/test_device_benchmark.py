"""The benchmark of accelerators, as far as CPU processes can show it: every side trains, and every pair has a row."""

import multiprocessing
from functools import partial

import pytest
from torch.multiprocessing.spawn import start_processes

from benchmarks.device.__main__ import main
from benchmarks.device.sides import PAIRS, SIDES, pairs_on

DRY_RUN = [
    "--device",
    "cpu",
    "--ranks",
    "1,2",
    "--model",
    "tiny",
    "--tokens",
    "16",
    "--k",
    "2",
    "--rounds",
    "1",
    "--steps",
    "1",
]


def test_every_compared_side_exists_and_runs_on_some_number_of_ranks() -> None:
    assert {each for pair in PAIRS for each in (pair.ours, pair.against)} <= SIDES.keys()
    assert {*pairs_on(1), *pairs_on(2)} == set(PAIRS)


def test_without_an_accelerator_the_benchmark_says_how_to_make_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    with pytest.raises(SystemExit, match="this host has no accelerator; --device cpu makes a dry run"):
        main([])
    with pytest.raises(SystemExit, match="--device xpu: torch sees no accelerator here"):
        main(["--device", "xpu"])


# Every side proves, before it is timed, that it trains as the others do.
@pytest.mark.stress
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_dry_run_on_cpu_processes_measures_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.forks.preloaded"])
    started = partial(start_processes, start_method="forkserver")
    monkeypatch.setattr("benchmarks.device.__main__.spawn", started)
    lines = main(DRY_RUN).splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        (str(size), pair.ours, pair.against) for size in (1, 2) for pair in pairs_on(size)
    ]
    assert all(float(row[6]) > 0 and row[8] == "not counted" for row in rows)
