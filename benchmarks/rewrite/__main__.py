"""`python -m benchmarks.rewrite`: plan and convert, print what was asked for, write it down.

Whole:      python -m benchmarks.rewrite
Part of it: python -m benchmarks.rewrite --names 10000,30000 --mb 0 --rounds 3
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.rewrite import rounds, table
from benchmarks.rewrite.outcome import Cell

RESULTS = Path(__file__).parent.parent / "results"
NAMES = (10_000, 30_000, 100_000)
MEGABYTES = (1_000,)


def main() -> None:
    """Run what the command line asks for."""
    arguments = _parser().parse_args()
    whole = arguments.names is None and arguments.mb is None
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes of the runs read it at import
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=arguments.folder) as name:
        for cell in plan(
            NAMES if arguments.names is None else arguments.names,
            MEGABYTES if arguments.mb is None else arguments.mb,
            arguments.rounds,
        ):
            begun = time.monotonic()
            print(f"{cell.work}: {cell.size:,}", file=sys.stderr)
            outcomes.append(rounds.measure(cell, Path(name)))
            print(table.asked_table(outcomes[-1:]), file=sys.stderr)  # a later cell may fail
            print(f"    {time.monotonic() - begun:.0f} s", file=sys.stderr)
    print(table.asked_table(outcomes))
    print(table.full_table(outcomes))
    if results := arguments.write or ("rewrite" if whole else None):
        table.write(RESULTS, results, outcomes, shlex.join(["python", "-m", "benchmarks.rewrite", *sys.argv[1:]]))


def plan(names: Sequence[int], megabytes: Sequence[int], num_rounds: int) -> Iterator[Cell]:
    """The cells in order; sizes of 0 are none."""
    for size in filter(None, names):
        yield Cell(work="planning", size=size, num_rounds=num_rounds)
    for size in filter(None, megabytes):
        yield Cell(work="converting", size=size * 10**6, num_rounds=num_rounds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewrite", description="Rewrites: planning, converting.")
    parser.add_argument("--names", type=_numbers, help="numbers of names, comma-separated (default 10000,30000,100000)")
    parser.add_argument("--mb", type=_numbers, help="sizes of the model in MB, comma-separated (default 1000)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of everything, in turns (default 5)")
    parser.add_argument("--folder", help="where to convert (default: the folder for temporary files)")
    parser.add_argument(
        "--write", metavar="NAME", help="write benchmarks/results/NAME.md and .json (a whole run: rewrite)"
    )
    return parser


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
