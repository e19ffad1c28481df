"""The numbers that were asked for, and whether a measurement meets them."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.limits import Finding
from benchmarks.rewrite.converting import CONVERSIONS, COPY, OPEN
from benchmarks.rewrite.outcome import Cell, Outcome
from benchmarks.rewrite.planning import NUM_RANKS, PHASES

__all__ = ["MEBIBYTE", "findings"]

MEBIBYTE = 1 << 20
PLANNING_S = 5.0
NUM_NAMES = 100_000
"""For which the seconds were asked."""
GROWTH = 1.2
"""Near linear: the time per name with most names, over that with fewest."""
COPIES = 1.5
PEAK_MIB = 128


def findings(outcomes: Sequence[Outcome]) -> list[Finding[Cell]]:
    """Everything that was asked for and that these outcomes measured."""
    planned = sorted((each for each in outcomes if each.cell.work == "planning"), key=lambda each: each.cell.size)
    found = [each for outcome in planned for each in _seconds(outcome)]
    found += _growth(planned[0], planned[-1]) if len(planned) > 1 else []
    return found + [each for outcome in outcomes if outcome.cell.work == "converting" for each in _conversions(outcome)]


def _totals(outcome: Outcome) -> Iterator[tuple[str, list[float]]]:
    """For each way to share targets out: seconds of a round until one rank knows where its elements come from."""
    parse, check, *ways = PHASES
    for way in ways:
        columns = [outcome.seconds[phase] for phase in (parse, check, way)]
        yield f"parse, check, {way}", [sum(each) for each in zip(*columns, strict=True)]


def _seconds(outcome: Outcome) -> Iterator[Finding[Cell]]:
    if outcome.cell.size < NUM_NAMES:
        return
    for what, seconds in _totals(outcome):
        what = f"{what}, for one rank of {NUM_RANKS}"
        yield Finding(cell=outcome.cell, what=what, limit=PLANNING_S, values=seconds, unit=" s")


def _growth(fewest: Outcome, most: Outcome) -> Iterator[Finding[Cell]]:
    for (what, few), (_, many) in zip(_totals(fewest), _totals(most), strict=True):
        per_name = statistics.median(few) / fewest.cell.size
        values = [each / most.cell.size / per_name for each in many]
        what = f"time per name, over that of {fewest.cell.size:,} names: {what}"
        yield Finding(cell=most.cell, what=what, limit=GROWTH, values=values)


def _conversions(outcome: Outcome) -> Iterator[Finding[Cell]]:
    opened = statistics.median(outcome.peaks[OPEN])
    for name in CONVERSIONS:
        ratios = [its / copy for its, copy in zip(outcome.seconds[name], outcome.seconds[COPY], strict=True)]
        yield Finding(cell=outcome.cell, what=f"{name} / {COPY}", limit=COPIES, values=ratios)
        above = [(peak - opened) / MEBIBYTE for peak in outcome.peaks[name]]
        what = f"{name}: peak memory above a process that only opens the files"
        yield Finding(cell=outcome.cell, what=what, limit=PEAK_MIB, values=above, unit=" MiB")
