"""From outcomes to one table, and to files that say how they were made."""

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

from benchmarks.asked import Pair, pairs, sides_of
from benchmarks.markdown import Row, markdown
from benchmarks.rank import Outcome
from benchmarks.sides import side_named

HEADER = ("k", "tokens", "ours", "against", "ours ms", "its ms", "ratio", "quartiles", "asked", "met", "held MB")


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a markdown table with a row for each pair of sides that were measured together."""
    return markdown(HEADER, [row(outcome, pair) for outcome in outcomes for pair in _measured_pairs(outcome)])


def partial(outcomes: Sequence[Outcome]) -> str:
    """Return the table, and a line for each side that is in none of its rows."""
    lines = [table(outcomes)]
    for outcome in outcomes:
        compared = sides_of(_measured_pairs(outcome))
        cell = f"k = {outcome.cell.num_microbatches}, {outcome.cell.shape}"
        lines += [
            f"{cell}: {name} {milliseconds(seconds)} ms"
            for name, seconds in outcome.seconds.items()
            if name not in compared
        ]
    return "\n".join(lines)


def write(folder: Path, name: str, outcomes: Sequence[Outcome], command: str) -> None:
    """Write `name.md` (the table, what the sides are) and `name.json` (every round)."""
    made = {
        "command": command,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(
        json.dumps({"made": made, "outcomes": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n"
    )
    notes = [
        f"Made by `{command}` on {made['date']}: {made['processor']}, Python {made['python']}, torch {made['torch']}; "
        "2 processes, 1 thread each; the peers over gloo.",
        "Ratios are medians over rounds of (ours / its) within a round; the sides step in turns. Milliseconds are "
        "medians of a step of the slower rank. Held: bytes of tensors between two steps, ours / its, without "
        "activations. Over shared memory ours counts the other rank's gradients and working copies too: it has them "
        "mapped, but they are the other's memory.",
        *_predictions(outcomes),
    ]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.seconds)
    sides = [f"- `{side}`: {side_named(side).about}" for side in names]
    text = "\n\n".join(["# Step times", *notes, table(outcomes), "\n".join(sides)])
    (folder / f"{name}.md").write_text(text + "\n")


def _measured_pairs(outcome: Outcome) -> list[Pair]:
    listed = pairs(outcome.cell.shape, outcome.cell.num_microbatches)
    return [pair for pair in listed if {pair.ours, pair.against} <= outcome.seconds.keys()]


def row(outcome: Outcome, pair: Pair) -> Row:
    """What was measured of a pair of sides, under `HEADER`."""
    measured = outcome.passes if pair.of_passes else outcome.seconds
    ours, its = measured[pair.ours], measured[pair.against]
    ratios = [mine / theirs for mine, theirs in zip(ours, its, strict=True)]
    ratio = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratio, ratio, ratio)
    held = outcome.held_bytes
    return (
        str(outcome.cell.num_microbatches),
        outcome.cell.shape,
        pair.ours,
        pair.against,
        milliseconds(ours),
        milliseconds(its),
        f"{ratio:.3f}",
        f"{low:.2f}-{high:.2f}",
        str(pair.asked or ""),
        "" if pair.asked is None else "yes" if pair.asked.is_met_by(ratio) else "NO",
        f"{held[pair.ours] / 1e6:.0f} / {held[pair.against] / 1e6:.0f}",
    )


def _predictions(outcomes: Sequence[Outcome]) -> list[str]:
    lines = [
        f"{name} at k = {outcome.cell.num_microbatches}: {predicted / 1e6:.1f} MB by formula, "
        f"{outcome.held_bytes[name] / 1e6:.1f} MB held."
        for outcome in outcomes
        for name, predicted in outcome.predicted_bytes.items()
    ]
    return [" ".join(dict.fromkeys(lines))] if lines else []


def milliseconds(seconds: Sequence[float]) -> str:
    """Their median."""
    return f"{1e3 * statistics.median(seconds):.1f}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()
