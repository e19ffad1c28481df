"""`make bench-gpu`, or `python -m benchmarks.device`: our steps against a plain loop, DDP and FSDP2, on accelerators.

Whole:      python -m benchmarks.device                        every power of two of the accelerators here
Part of it: python -m benchmarks.device --ranks 2 --model 1b --k 4
Dry run:    python -m benchmarks.device --device cpu --ranks 2 --model tiny --rounds 1 --steps 1

A run on CPU processes shows that the benchmark runs, and nothing about accelerators: it is never written down.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.device.rank import MODELS, DeviceCell, DeviceOutcome, enter, median
from benchmarks.device.sides import SIDES, pairs_on
from benchmarks.markdown import markdown
from benchmarks.rounds_file import write_rounds

RESULTS = Path(__file__).parents[1] / "results"
HEADER = ("ranks", "k", "ours", "against", "ours ms", "its ms", "ratio", "quartiles", "peak MB, ours / its")


def main(words: Sequence[str] | None = None) -> str:
    """Run what the command line asks for; returns the table."""
    arguments = _parser().parse_args(words)
    kind = _kind(arguments.device)
    outcomes = [
        _measure(
            DeviceCell(
                device=kind,
                num_ranks=num_ranks,
                model=arguments.model,
                rows=arguments.rows,
                tokens=arguments.tokens,
                num_microbatches=k,
                num_rounds=arguments.rounds,
                num_steps=arguments.steps,
            )
        )
        for num_ranks in arguments.ranks or _all_sizes(kind)
        for k in arguments.k
    ]
    shown = table(outcomes)
    print(shown)
    if kind != "cpu":
        _write(outcomes, shown, shlex.join(["python", "-m", "benchmarks.device", *(words or sys.argv[1:])]))
    return shown


def table(outcomes: Sequence[DeviceOutcome]) -> str:
    """A row for each pair of sides; ratios are medians over rounds."""
    rows = []
    for outcome in outcomes:
        for pair in pairs_on(outcome.cell.num_ranks):
            ours, its = outcome.seconds[pair.ours], outcome.seconds[pair.against]
            ratios = [mine / theirs for mine, theirs in zip(ours, its, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
            peaks = [
                f"{outcome.peak_bytes[name] / 1e6:.0f}" for name in (pair.ours, pair.against) if outcome.peak_bytes
            ]
            rows.append(
                (
                    str(outcome.cell.num_ranks),
                    str(outcome.cell.num_microbatches),
                    pair.ours,
                    pair.against,
                    f"{1e3 * median(ours):.1f}",
                    f"{1e3 * median(its):.1f}",
                    f"{statistics.median(ratios):.3f}",
                    f"{low:.2f}-{high:.2f}",
                    " / ".join(peaks) or "not counted",
                )
            )
    return markdown(HEADER, rows)


def _measure(cell: DeviceCell) -> DeviceOutcome:
    print(f"{cell.num_ranks} ranks, k = {cell.num_microbatches}, {cell.model}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        spawn(enter, args=(cell, folder), nprocs=cell.num_ranks, join=True)
        fields = json.loads((Path(folder) / "outcome.json").read_text())
    return DeviceOutcome(**{**fields, "cell": DeviceCell(**fields["cell"])})


def _kind(asked: str) -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if asked == "auto" and found is None:
        sys.exit("this host has no accelerator; --device cpu makes a dry run on CPU processes")
    if asked not in ("auto", "cpu") and (found is None or found.type != asked):
        sys.exit(f"--device {asked}: torch sees {'no accelerator' if found is None else found.type} here")
    return "cpu" if asked == "cpu" or found is None else found.type


def _all_sizes(kind: str) -> list[int]:
    num_seen = 2 if kind == "cpu" else torch.accelerator.device_count()
    return [size for size in (1, 2, 4, 8) if size <= num_seen]


def _write(outcomes: Sequence[DeviceOutcome], shown: str, command: str) -> None:
    first = outcomes[0]
    made = write_rounds(RESULTS, "devices", outcomes, command, device=first.device_name)
    cell = first.cell
    sides = [f"- `{name}`: {side.about}" for name, side in SIDES.items()]
    about = (
        f"Made by `{command}` on {made['date']}: {first.device_name}, torch {made['torch']}. A Llama of "
        f"{first.num_parameters / 1e6:.0f} M parameters, microbatches of {cell.rows} x {cell.tokens} tokens. Ratios "
        "are medians over rounds of (ours / its) within a round; the sides step in turns. Peak: the most that the "
        "allocator of rank 0 gave out at a time from building a side on."
    )
    text = "\n\n".join(["# Steps on accelerators", about, shown, "\n".join(sides)])
    (RESULTS / "devices.md").write_text(text + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description="Steps on accelerators.")
    parser.add_argument("--device", default="auto", help="auto, cpu (a dry run), or a kind of device (default auto)")
    parser.add_argument("--ranks", type=_numbers, help="numbers of ranks, comma-separated (default 1,2,4,8 if visible)")
    parser.add_argument("--model", choices=MODELS, default="small", help="default small: 15.7 M parameters")
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch (default 2)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a row (default 128)")
    parser.add_argument("--k", type=_numbers, default=[1, 4], help="microbatches per update (default 1,4)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of all sides in turns (default 9)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a side in a round (default 10)")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    main()
