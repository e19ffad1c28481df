"""All runs of a cell, in turns."""

import os
import shutil
from pathlib import Path

from benchmarks.rewrite import job
from benchmarks.rewrite.converting import CONVERSIONS, RUNS
from benchmarks.rewrite.outcome import Cell, Outcome
from benchmarks.rewrite.weights import Weights, prove
from shardwise import checkpoint

__all__ = ["measure"]


def measure(cell: Cell, folder: Path) -> Outcome:
    """Measure a cell in `folder`, which is empty before and afterwards."""
    return _planning(cell) if cell.work == "planning" else _converting(cell, folder)


def _planning(cell: Cell) -> Outcome:
    outcome = Outcome(cell=cell)
    for _ in range(cell.num_rounds):
        for phase, seconds in job.planned(cell.size).items():
            outcome.seconds.setdefault(phase, []).append(seconds)
    return outcome


def _converting(cell: Cell, folder: Path) -> Outcome:
    """Each round begins with another run. What a run wrote goes before the next begins, and the disk is idle then."""
    outcome = Outcome(cell=cell, seconds={name: [] for name in RUNS}, peaks={name: [] for name in RUNS})
    weights, source, destination = Weights.of_bytes(cell.size), folder / "source", folder / "destination"
    source.mkdir()
    weights.write(source)
    names = list(RUNS)
    for number in range(cell.num_rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            _warm(source)
            os.sync()
            taken = job.converted(name, source, destination)
            outcome.seconds[name].append(taken["seconds"])
            outcome.peaks[name].append(taken["peak_bytes"])
            if number == 0 and name in CONVERSIONS:
                prove(weights, source, checkpoint.open(destination).read)
            shutil.rmtree(destination, ignore_errors=True)
    shutil.rmtree(source)
    return outcome


def _warm(folder: Path) -> None:
    """Read the files, so that they lie in the page cache."""
    buffer = bytearray(1 << 20)
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
