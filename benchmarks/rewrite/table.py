"""From outcomes to tables, and to files that say how they were made."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.limits import Finding
from benchmarks.markdown import Row, markdown
from benchmarks.rewrite.asked import MEBIBYTE, findings
from benchmarks.rewrite.converting import COPY, OPEN
from benchmarks.rewrite.experts import NAMES_PER_LAYER
from benchmarks.rewrite.experts import STATEMENTS as PLANNED
from benchmarks.rewrite.outcome import Cell, Outcome
from benchmarks.rewrite.planning import NUM_RANKS
from benchmarks.rewrite.weights import STATEMENTS as CONVERTED
from benchmarks.rounds_file import write_rounds

__all__ = ["asked_table", "full_table", "write"]


def asked_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every number that was asked for."""
    return markdown(("size", "what", "asked", "measured", "min - max", "verdict"), list(map(_row, findings(outcomes))))


def _row(finding: Finding[Cell]) -> Row:
    return (
        _size(finding.cell),
        finding.what,
        f"<= {finding.limit:.3g}{finding.unit}",
        f"{finding.median:.3g}{finding.unit}",
        f"{min(finding.values):.3g} - {max(finding.values):.3g}" if len(finding.values) > 1 else "",
        "met" if finding.met else "MISSED",
    )


def _size(cell: Cell) -> str:
    return f"{cell.size:,} names" if cell.work == "planning" else f"{cell.size / 1e6:,.0f} MB"


def full_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every phase and every run."""
    header = ("size", "what", "ms", "min - max", "of a copy", "VmHWM MiB", "above open")
    return markdown(header, [row for outcome in outcomes for row in _rows(outcome)])


def _rows(outcome: Outcome) -> Iterator[Row]:
    copies = outcome.seconds.get(COPY)
    for name, seconds in outcome.seconds.items():
        ratios = [] if copies is None else [its / copy for its, copy in zip(seconds, copies, strict=True)]
        peak = statistics.median(outcome.peaks[name]) if copies is not None else 0
        yield (
            _size(outcome.cell),
            name,
            f"{1e3 * statistics.median(seconds):.1f}",
            f"{1e3 * min(seconds):.1f} - {1e3 * max(seconds):.1f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{peak / MEBIBYTE:.1f}" if ratios else "",
            f"{(peak - statistics.median(outcome.peaks[OPEN])) / MEBIBYTE:.1f}" if ratios else "",
        )


NOTES = f"""\
Planning: {NAMES_PER_LAYER} names per layer, most of them weights of experts; metas only. "A slice of every target" is
what a rank of {NUM_RANKS} wants under tensor parallelism, "one target in {NUM_RANKS}" what it wants that owns tensors
whole. `check` compares with the targets' shapes and dtypes and proves the inverse. One process, one thread; a fresh
process per round.

Converting: a bfloat16 model of random bytes in files of 200 MB, which lie in the page cache. `copy the files` is
`shutil.copyfile` and fsync of each file. Every run is a process of its own, whose time begins after its imports; the
runs take turns in every round, each round beginning with another one; before each, what the one before wrote is removed
and the disk has written everything (`sync`). Ratios are medians over rounds of the ratio within a round. VmHWM is the
kernel's highest mark of the process; `only open` imports the same modules and reads the headers. Both conversions are
compared once, bit by bit, with what plain torch makes of the source: two layers, the embedding and the head."""


def write(folder: Path, name: str, outcomes: Sequence[Outcome], command: str) -> None:
    """Write `name.md` (both tables, how they were made) and `name.json` (every round)."""
    made = write_rounds(folder, name, outcomes, command)
    head = (
        f"Made by `{command}` on {made['date']}: {made['cores']} cores, Python {made['python']}, torch {made['torch']}."
    )
    statements = [f"```\n{each.strip()}\n```" for each in (PLANNED, CONVERTED)]
    about = [f"The statements that are planned:\n\n{statements[0]}", f"Those that convert:\n\n{statements[1]}"]
    parts = ["# Rewrites", head, asked_table(outcomes), NOTES, full_table(outcomes), *about]
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")
