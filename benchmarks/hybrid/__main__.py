"""`python -m benchmarks.hybrid`: measure every side in turns, print what was asked for, write it down.

Whole:      python -m benchmarks.hybrid
Part of it: python -m benchmarks.hybrid --parts sharding,memory --ranks 2 --k 1 --shape 2x128 --rounds 5
Where time goes in our own step: python -m benchmarks --profile stage3 --shape 1x32 --k 1
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import shardwise as sw
from benchmarks import cells
from benchmarks.asked import sides_of
from benchmarks.hybrid import counting, memory, table
from benchmarks.hybrid.asked import pairs
from benchmarks.hybrid.counting import Count
from benchmarks.hybrid.memory import Peak
from benchmarks.hybrid.tensor import HEADS
from benchmarks.rank import Cell, Outcome
from benchmarks.sides import SIDES, installed

RESULTS = Path(__file__).parent.parent / "results"
PARTS = ("sharding", "tensor", "memory", "counts")


def main() -> None:
    """Run what the command line asks for."""
    arguments = _parser().parse_args()
    outcomes: list[Outcome] = []
    for cell in _cells(arguments):
        begun = time.monotonic()
        print(
            f"{cell.num_ranks} ranks, k = {cell.num_microbatches}, {cell.shape}, {len(cell.sides)} sides",
            file=sys.stderr,
        )
        outcomes.append(cells.run(cell))
        print(table.steps_table(outcomes[-1:]), file=sys.stderr)  # a later cell may fail
        print(f"    {time.monotonic() - begun:.0f} s", file=sys.stderr)
    peaks = list(_peaks(arguments)) if "memory" in arguments.parts else []
    counts = list(_counts(arguments)) if "counts" in arguments.parts else []
    for text in table.tables(outcomes, peaks, counts):
        print(text)
    whole = len(sys.argv) == 1
    if results := arguments.write or ("hybrid" if whole else None):
        command = shlex.join(["python", "-m", "benchmarks.hybrid", *sys.argv[1:]])
        table.write(RESULTS, results, outcomes, peaks, counts, command)


def _cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """The cells in order, each with every side that is compared there."""
    for part, num_ranks, k, shape in product(("sharding", "tensor"), arguments.ranks, arguments.k, arguments.shape):
        along_tp = part == "tensor"
        if part not in arguments.parts or (along_tp and k > 1):
            continue
        cell = Cell(
            sides=(),
            shape=shape,
            num_microbatches=k,
            num_rounds=arguments.rounds,
            num_ranks=num_ranks,
            num_heads=HEADS if along_tp else 6,
            same_samples=along_tp,
        )
        compared = installed(sides_of(pairs(cell)))
        sides = tuple(side for side in compared if arguments.sides is None or side in arguments.sides)
        yield replace(cell, sides=sides)


def _peaks(arguments: argparse.Namespace) -> Iterator[Peak]:
    for num_ranks, k in product(arguments.ranks, arguments.k):
        with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
            yield memory.measure(num_ranks, k, Path(folder))


def _counts(arguments: argparse.Namespace) -> Iterator[Count]:
    for num_ranks, k in product(arguments.ranks, arguments.k):
        for stage, keep_gathered in ((1, False), (2, False), (3, False), (3, True)):
            sharding = sw.Sharding(stage=stage, keep_gathered=keep_gathered, bucket_bytes=counting.BUCKET_BYTES)
            yield from counting.of_sharding(num_ranks, k, sharding)
        yield from counting.of_tensor(num_ranks, k)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hybrid", description="Stages 2 and 3, and tp.")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"of {', '.join(PARTS)}; comma-separated")
    parser.add_argument("--sides", type=_known_sides, help="of those that are compared; comma-separated (default all)")
    parser.add_argument("--ranks", type=_numbers, default=[2, 4], help="numbers of ranks (default 2,4)")
    parser.add_argument("--k", type=_numbers, default=[1, 4], help="microbatches per update (default 1,4)")
    parser.add_argument(
        "--shape", type=lambda text: text.split(","), default=["2x128"], help="tokens of a microbatch (default 2x128)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all sides in turns (default 7)")
    parser.add_argument(
        "--write", metavar="NAME", help="write benchmarks/results/NAME.md and .json (a whole run: hybrid)"
    )
    return parser


def _parts(text: str) -> tuple[str, ...]:
    return _some_of(text, PARTS)


def _known_sides(text: str) -> tuple[str, ...]:
    return _some_of(text, tuple(SIDES))


def _some_of(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
