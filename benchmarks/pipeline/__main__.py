"""`python -m benchmarks.pipeline`: run every side in turns, print what was asked for, write it down.

Whole:      python -m benchmarks.pipeline
Part of it: python -m benchmarks.pipeline --cells computing,sleeping --k 4 --rounds 3
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.pipeline import cells, table
from benchmarks.pipeline.models import Kind, Shape
from benchmarks.pipeline.outcome import Cell

RESULTS = Path(__file__).parent.parent / "results"
NUM_RANKS = {"computing": 2, "short": 2, "sleeping": 4}
"""By cell. Stages of "short" take a few milliseconds: there the engine's own work per module shows."""
CLIPPING_RANKS = (2, 4, 8)
LAYERS_PER_STAGE = 4
FINE_FORWARD_S = 0.0025
"""Of a layer, two on a stage: 5 ms forward, 10 ms backward."""
HOST_KINDS: tuple[Kind, ...] = ("computing", "llama")
FORWARD_S = 0.02
"""Of a layer that sleeps, two on a stage: 40 ms forward, 80 ms backward, as four plain blocks take on 2 EPYC cores."""


def main() -> None:
    """Run what the command line asks for."""
    arguments = _parser().parse_args()
    whole = arguments.cells is None and arguments.k is None
    outcomes = []
    for cell in plan(
        arguments.cells or [*NUM_RANKS, "fine", "host", "clipping"], arguments.k or [4, 8], arguments.rounds
    ):
        begun = time.monotonic()
        print(f"{cell.work}, {cell.kind}: {cell.num_ranks} ranks, k = {cell.num_microbatches}", file=sys.stderr)
        outcomes.append(cells.run(cell))
        print(table.asked_table(outcomes[-1:]), file=sys.stderr)  # a later cell may fail
        print(f"    {time.monotonic() - begun:.0f} s", file=sys.stderr)
    for made in (table.asked_table, table.side_table, table.clipping_table, table.host_table):
        print(made(outcomes))
    if results := arguments.write or ("pipeline" if whole else None):
        table.write(RESULTS, results, outcomes, shlex.join(["python", "-m", "benchmarks.pipeline", *sys.argv[1:]]))


def plan(names: Sequence[str], microbatches: Sequence[int], num_rounds: int) -> Iterator[Cell]:
    """The cells in order."""
    for name, width, num_tokens in (("computing", 512, 128), ("short", 128, 32)):
        for k in microbatches if name in names else ():
            yield Cell(
                work="steps",
                kind="computing",
                shape=Shape(num_layers=LAYERS_PER_STAGE * NUM_RANKS[name], width=width, num_tokens=num_tokens),
                num_ranks=NUM_RANKS[name],
                num_microbatches=k,
                num_rounds=num_rounds,
            )
    for k in microbatches if "fine" in names else ():
        yield Cell(
            work="steps",
            kind="sleeping",
            shape=Shape(num_layers=4, width=16, num_tokens=4, forward_s=FINE_FORWARD_S),
            num_ranks=2,
            num_microbatches=k,
            num_rounds=num_rounds,
        )
    for kind in HOST_KINDS if "host" in names else ():
        for k in microbatches:
            yield Cell(
                work="host",
                kind=kind,
                shape=Shape(num_layers=16, width=16, num_tokens=4),
                num_ranks=2,
                num_microbatches=k,
                num_rounds=5 * num_rounds,
            )
    if "sleeping" in names:
        shape = Shape(num_layers=8, width=512, num_tokens=128, forward_s=FORWARD_S)
        for k in microbatches:
            yield Cell(
                work="steps",
                kind="sleeping",
                shape=shape,
                num_ranks=NUM_RANKS["sleeping"],
                num_microbatches=k,
                num_rounds=num_rounds,
            )
    for num_ranks in CLIPPING_RANKS if "clipping" in names else ():
        yield Cell(
            work="clipping",
            kind="llama",
            shape=Shape(num_layers=LAYERS_PER_STAGE * num_ranks, width=512, num_tokens=512),
            num_ranks=num_ranks,
            num_microbatches=2,
            num_rounds=3,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description="Pipelines, against a peer.")
    parser.add_argument(
        "--cells",
        type=_names,
        help="of computing, short, sleeping, fine, host, clipping; comma-separated (default all)",
    )
    parser.add_argument("--k", type=_numbers, help="numbers of microbatches, comma-separated (default 4,8)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of all sides in turns (default 6)")
    parser.add_argument(
        "--write", metavar="NAME", help="write benchmarks/results/NAME.md and .json (a whole run: pipeline)"
    )
    return parser


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
