"""`python -m benchmarks`: measure every side in turns, print one table, write it down.

Whole:      python -m benchmarks
Part of it: python -m benchmarks --sides ours,ddp --shape 1x32 --k 1 --rounds 5
Where time goes in our own step: python -m benchmarks --profile ours --shape 1x32 --k 4
"""

import argparse
import shlex
import sys
from pathlib import Path

from benchmarks import asked, cells, phases, table
from benchmarks.rank import Cell, Outcome
from benchmarks.sides import SIDES, installed

RESULTS = Path(__file__).parent / "results"
SHAPES = ("2x128", "1x32")
NUM_MICROBATCHES = (1, 4)


def main() -> None:
    """Run what the command line asks for."""
    arguments = _parser().parse_args()
    if arguments.profile:
        for num_microbatches, shape in _grid(arguments):
            print(phases.run(arguments.profile, shape, num_microbatches))
        return
    whole = not (arguments.sides or arguments.shape or arguments.k)
    outcomes = [_measure(arguments, num_microbatches, shape) for num_microbatches, shape in _grid(arguments)]
    print(table.table(outcomes) if whole else table.partial(outcomes))
    name = arguments.write or ("steps" if whole else None)
    if name:
        table.write(RESULTS, name, outcomes, shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Step times of shardwise and its peers.")
    parser.add_argument("--sides", type=_known_sides, help=f"some of: {', '.join(SIDES)}")
    parser.add_argument("--shape", help=f"tokens of a microbatch, comma-separated (default {','.join(SHAPES)})")
    parser.add_argument("--k", help="microbatches per update, comma-separated (default 1,4)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of all sides in turns (default 9)")
    parser.add_argument(
        "--write", metavar="NAME", help="write benchmarks/results/NAME.md and .json (a whole run: steps)"
    )
    parser.add_argument("--profile", metavar="SIDE", help="instead, show the phases of a step of one of our sides")
    return parser


def _known_sides(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in SIDES]:
        raise argparse.ArgumentTypeError(f"no side is named {', '.join(unknown)}; there are {', '.join(SIDES)}")
    return names


def _grid(arguments: argparse.Namespace) -> list[tuple[int, str]]:
    counts = [int(k) for k in arguments.k.split(",")] if arguments.k else NUM_MICROBATCHES
    shapes = arguments.shape.split(",") if arguments.shape else SHAPES
    return [(count, shape) for count in counts for shape in shapes]


def _measure(arguments: argparse.Namespace, num_microbatches: int, shape: str) -> Outcome:
    names = arguments.sides or asked.sides_of(asked.pairs(shape, num_microbatches))
    names = installed(names)
    print(f"k = {num_microbatches}, {shape} tokens, {len(names)} sides", file=sys.stderr)
    cell = Cell(sides=names, shape=shape, num_microbatches=num_microbatches, num_rounds=arguments.rounds)
    return cells.run(cell)


if __name__ == "__main__":
    main()
