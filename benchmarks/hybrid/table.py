"""From what was measured to tables, and to files that say how it was made."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.asked import sides_of
from benchmarks.hybrid.asked import findings, pairs
from benchmarks.hybrid.counting import Count
from benchmarks.hybrid.memory import Peak
from benchmarks.limits import Finding
from benchmarks.markdown import Row, markdown
from benchmarks.rank import Outcome
from benchmarks.rounds_file import write_rounds
from benchmarks.sides import side_named
from benchmarks.table import HEADER, row

__all__ = ["counts_table", "findings_table", "peaks_table", "steps_table", "tables", "write"]


def steps_table(outcomes: Sequence[Outcome]) -> str:
    """A row for each pair of sides that were measured together."""
    rows = []
    for outcome in outcomes:
        cell = outcome.cell
        for pair in pairs(cell):
            if {pair.ours, pair.against} <= outcome.seconds.keys():
                what = "passes" if pair.of_passes else "step"
                rows.append((str(cell.num_ranks), what, *row(outcome, pair)))
    return markdown(("ranks", "what", *HEADER), rows)


def findings_table(peaks: Sequence[Peak], counts: Sequence[Count]) -> str:
    """A row for every number that was asked for beside the ratios."""
    return markdown(("of", "what", "asked", "measured", "verdict"), [_row(each) for each in findings(peaks, counts)])


def _row(finding: Finding[str]) -> Row:
    verdict = "met" if finding.met else "MISSED"
    return finding.cell, finding.what, f"<= {finding.limit:.3g}", f"{finding.median:.3g}", verdict


def peaks_table(peaks: Sequence[Peak]) -> str:
    """A row for every peak, with the parts of its formula."""
    parts = tuple(peaks[0].parts) if peaks else ()
    header = ("ranks", "k", "between MB", "peak MB", "formula MB", "peak / formula", *(f"{part} MB" for part in parts))
    rows = [
        (
            str(peak.num_ranks),
            str(peak.num_microbatches),
            _mb(peak.resident_bytes),
            _mb(peak.measured_bytes),
            _mb(peak.formula_bytes),
            f"{peak.measured_bytes / peak.formula_bytes:.3f}",
            *(_mb(peak.parts[part]) for part in parts),
        )
        for peak in peaks
    ]
    return markdown(header, rows)


def tables(outcomes: Sequence[Outcome], peaks: Sequence[Peak], counts: Sequence[Count]) -> list[str]:
    """All tables of what was measured."""
    found = [steps_table(outcomes)] if outcomes else []
    found += [findings_table(peaks, counts)] if peaks or counts else []
    found += [peaks_table(peaks)] if peaks else []
    return found + ([counts_table(counts)] if counts else [])


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


def counts_table(counts: Sequence[Count]) -> str:
    """A row for every count."""
    rows = [(each.about, each.what, each.formula_text, f"{each.formula:,}", f"{each.counted:,}") for each in counts]
    return markdown(("of", "per update, all ranks", "formula", "is", "counted"), rows)


NOTES = """\
Sides step in turns, each round starting with another one; before anything is timed, all of them have trained from one
loss to one lower loss. Ratios are medians over rounds of (ours / its) within a round. Milliseconds are medians of the
slowest rank: of a step, with optimizer, or of its forwards and backwards ("passes"), which for ours include the copy
of each gradient to its place. Held: bytes of tensors between two steps, ours / its, without activations; over shared
memory ours counts what it has mapped of the others' memory too. More ranks than cores share them.

Tokens are those of a microbatch on a rank. The model is a Llama of 15.7 M parameters in 8 layers, the same fused AdamW
on all sides, 1 thread per rank. `-tcp`: the same over TCP, as gloo goes; `-silent`: with the communication taken out.

Peaks: rank 0, 2 tokens per microbatch; what torch's allocator and the channel (its own shared memory) have given out at
a time, and before the update. Counts: simulated ranks, buckets of 1 MB; N elements, P with the padding of B buckets, d
ranks; L layers, t ranks along tp, T tokens, H channels, V words."""


def write(
    folder: Path,
    name: str,
    outcomes: Sequence[Outcome],
    peaks: Sequence[Peak],
    counts: Sequence[Count],
    command: str,
) -> None:
    """Write `name.md` (all tables) and `name.json` (every round, every peak, every count)."""
    made = write_rounds(folder, name, [*outcomes, *peaks, *counts], command)
    head = (
        f"Made by `{command}` on {made['date']}: {made['cores']} cores, Python {made['python']}, torch "
        f"{made['torch']}; the peers over gloo."
    )
    names = sides_of([pair for outcome in outcomes for pair in pairs(outcome.cell)])
    measured = {side for outcome in outcomes for side in outcome.seconds}
    about = "\n".join(f"- `{side}`: {side_named(side).about}" for side in names if side in measured)
    parts = ["# Stages 2 and 3, tensor parallelism", head, NOTES, *tables(outcomes, peaks, counts), about]
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")
