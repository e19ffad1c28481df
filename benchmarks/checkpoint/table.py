"""From outcomes to tables, and to files that say how they were made."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.checkpoint import peers
from benchmarks.checkpoint.asked import MEBIBYTE, Finding, findings
from benchmarks.checkpoint.outcome import Outcome
from benchmarks.checkpoint.sides import LOADERS, SAVERS
from benchmarks.markdown import Row, markdown
from benchmarks.rounds_file import write_rounds

__all__ = ["asked_table", "full_table", "write"]


def asked_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every number that was asked for: the median of the rounds' ratios counts."""
    header = ("state", "ranks", "what", "asked", "measured", "min - max", "verdict")
    rows = [_asked_row(outcome, each) for outcome in outcomes for each in findings(outcome)]
    return markdown(header, rows)


def _asked_row(outcome: Outcome, finding: Finding) -> Row:
    return (
        *_cell(outcome),
        finding.what,
        str(finding.bound),
        f"{finding.median:.3g}{finding.bound.unit}",
        f"{min(finding.values):.3g} - {max(finding.values):.3g}" if len(finding.values) > 1 else "",
        "met" if finding.met else "MISSED",
    )


def full_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every side of every job."""
    header = (
        "state",
        "ranks",
        "job",
        "side",
        "ms",
        "processor ms",
        "its / ours",
        "min - max",
        "read / needed",
        "peak MiB",
        "VmHWM MiB",
    )
    rows = [row for outcome in outcomes for job in outcome.seconds for row in _job_rows(outcome, job)]
    return markdown(header, rows)


def _job_rows(outcome: Outcome, job: str) -> Iterable[Row]:
    sides = outcome.seconds[job]
    ours = next(iter(sides.values()))
    for name, seconds in sides.items():
        ratios = [its / mine for its, mine in zip(seconds, ours, strict=True)]
        reads = outcome.reads.get(job, {}).get(name)
        yield (
            *_cell(outcome),
            job,
            name,
            f"{1e3 * statistics.median(seconds):.1f}",
            _milliseconds(outcome.processor, job, name),
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} - {max(ratios):.2f}",
            "" if reads is None else f"{sum(reads.read) / sum(reads.needed):.3f}",
            _mebibytes(outcome.peaks, job, name),
            _mebibytes(outcome.kernel_peaks, job, name),
        )


def _cell(outcome: Outcome) -> tuple[str, str]:
    cell = outcome.cell
    ranks = str(cell.num_ranks) if cell.num_savers == cell.num_ranks else f"{cell.num_savers} to {cell.num_ranks}"
    return (f"{cell.num_bytes / MEBIBYTE:.0f} MiB, {cell.kind}" if cell.num_bytes else "10,000 tensors", ranks)


def _milliseconds(processor: dict[str, dict[str, list[float]]], job: str, name: str) -> str:
    return f"{1e3 * statistics.median(processor[job][name]):.1f}" if name in processor.get(job, {}) else ""


def _mebibytes(peaks: dict[str, dict[str, int]], job: str, name: str) -> str:
    return f"{peaks[job][name] / MEBIBYTE:.1f}" if name in peaks.get(job, {}) else ""


NOTES = """\
All sides take turns in every round, each round starting with another one; a time is that of the slowest rank from a
common start, and that of the processor the mean of all ranks, with all their threads. Ratios are medians over rounds of
the ratio within a round. Before a save the folder is emptied and the disk has written everything (`sync`). Files to be
loaded have been read once before: they are in the page cache. Every loader has been proven once, bit by bit, before it
is timed. Every process has allocated and freed blocks of 28 MiB first, as training programs have: glibc then keeps such
blocks instead of mapping new ones. float32 only. "blocks": 12 blocks of 16 tensors and an embedding, each with two
moments. "large": matrices of 8 MiB.

Read / needed: bytes read by all ranks by the bytes of their targets, counted at the store for ours (manifest
included; of files that are mapped, all that lies between the strips that are needed), by the kernel's `rchar` for the
others; not known for those that map files. Peak: memory of the process
itself (anonymous and shared) above what was there before, sampled every half millisecond, of the rank with most;
targets and states are there before. VmHWM: the kernel's own highest mark, with mapped files. Of an asynchronous save,
the snapshot is taken off both.

DCP stores boxes: it cannot save slices (runs of a flat buffer) as parts of the tensors in it. Its nearest is one flat
1-d tensor per buffer (`dcp-flat`), of which a rank that wants boxes has to load everything and cut (`dcp-flat-cut`).
"Slices as columns" is therefore also compared with what DCP needs for rows as columns.

torch_checkpointing 0.1.1 runs on the CPU only without a resharder (with one, `save` gathers metadata in tensors with
`device="cuda"`), so it saves and loads rank by rank; without O_DIRECT (its writes to ext4 are refused, EINVAL); and
synchronously. It does not sync what it writes: that is added."""


def write(folder: Path, name: str, outcomes: Sequence[Outcome], command: str) -> None:
    """Write `name.md` (both tables, what the sides are) and `name.json` (every round)."""
    made = write_rounds(folder, name, outcomes, command, torch_checkpointing=peers.HAS_TORCH_CHECKPOINTING)
    sides = "\n".join(f"- `{each.name}` saves: {each.about}" for each in SAVERS.values())
    loads = "\n".join(f"- `{each.name}` loads: {each.about}" for each in LOADERS.values())
    head = (
        f"Made by `{command}` on {made['date']}: {made['cores']} cores, Python {made['python']}, torch "
        f"{made['torch']}; 1 thread per rank, gloo for the peers, shared memory for ours."
    )
    parts = ["# Saving and loading", head, asked_table(outcomes), NOTES, full_table(outcomes), sides, loads]
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")
