"""`python -m benchmarks.checkpoint`: save and load with every side in turns, print what was asked for, write it down.

Whole:      python -m benchmarks.checkpoint
Part of it: python -m benchmarks.checkpoint --mib 16 --ranks 2 --rounds 3
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.checkpoint import alone, cells, table
from benchmarks.checkpoint.outcome import Cell, Outcome
from benchmarks.checkpoint.states import Kind

KINDS: tuple[Kind, ...] = ("blocks", "large")
RESULTS = Path(__file__).parent.parent / "results"
LARGE = 512 << 20
"""From here on, and with more than two ranks, only what was asked for is measured: a side costs seconds a round."""


def main() -> None:
    """Run what the command line asks for."""
    arguments = _parser().parse_args()
    whole = not (arguments.mib or arguments.ranks)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=arguments.folder) as name:
        cells_of_kinds = [
            replace(cell, kind=kind, times_saves=not arguments.loads)
            for kind in arguments.tensors
            for cell in plan(arguments.mib or [256, 1024], arguments.ranks or [1, 2, 4], arguments.rounds)
        ]
        for cell in cells_of_kinds:
            begun = time.monotonic()
            print(f"{cell.work}: {cell.num_bytes >> 20} MiB, {cell.kind}, {cell.num_ranks} ranks", file=sys.stderr)
            folder = Path(name) / f"{cell.kind}-{cell.num_bytes}-{cell.num_savers}"
            folder.mkdir(exist_ok=True)
            outcomes.append(cells.run(cell, folder))
            print(table.asked_table(outcomes[-1:]), file=sys.stderr)  # a later cell may fail
            print(f"    {time.monotonic() - begun:.0f} s", file=sys.stderr)
        if whole or arguments.alone:
            outcomes += _alone(Path(name))
    print(table.asked_table(outcomes))
    print(table.full_table(outcomes))
    if results := arguments.write or ("checkpoint" if whole else None):
        table.write(RESULTS, results, outcomes, shlex.join(["python", "-m", "benchmarks.checkpoint", *sys.argv[1:]]))


def plan(mebibytes: list[int], ranks: list[int], num_rounds: int) -> Iterator[Cell]:
    """The cells in order: a cell that loads what others saved follows them."""
    for size in mebibytes:
        for count in ranks:
            num_bytes = size << 20
            if count == 1 and num_bytes >= LARGE and len(mebibytes) > 1:
                continue  # a supplement
            cell = Cell(
                work="save and load",
                num_bytes=num_bytes,
                num_ranks=count,
                num_savers=count,
                num_rounds=num_rounds,
                rare=num_bytes < LARGE and count <= 2,
            )
            yield cell
            if count > 1:
                yield replace(cell, work="load what others saved", num_ranks=3)


def _alone(folder: Path) -> list[Outcome]:
    one = Cell(work="alone", num_bytes=64 * alone.NUM_TINY, num_ranks=1, num_savers=1, num_rounds=1, rare=True)
    many = Cell(work="alone", num_bytes=0, num_ranks=1024, num_savers=1024, num_rounds=3, rare=True)
    return [alone.measure_tiny(one, folder), alone.measure_planning(many), alone.measure_contents(many)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description="Checkpoints, against peers.")
    parser.add_argument("--mib", type=_numbers, help="sizes of the state, comma-separated (default 256,1024)")
    parser.add_argument(
        "--tensors", type=_kinds, default=KINDS, help=f"of {', '.join(KINDS)}; comma-separated (default all)"
    )
    parser.add_argument("--ranks", type=_numbers, help="numbers of ranks, comma-separated (default 1,2,4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all sides in turns (default 5)")
    parser.add_argument("--loads", action="store_true", help="time loads alone: each side saves once")
    parser.add_argument("--alone", action="store_true", help="with --mib or --ranks: planning and tiny tensors as well")
    parser.add_argument("--folder", help="where to save (default: the folder for temporary files)")
    parser.add_argument(
        "--write", metavar="NAME", help="write benchmarks/results/NAME.md and .json (a whole run: checkpoint)"
    )
    return parser


def _kinds(text: str) -> tuple[Kind, ...]:
    return tuple(kind for kind in KINDS if kind in text.split(","))


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
