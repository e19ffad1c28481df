"""The numbers that were asked for, and whether a measurement meets them."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.checkpoint import jobs
from benchmarks.checkpoint.alone import CONTENTS, PLANNING
from benchmarks.checkpoint.asynchronous import FIRST, JOB
from benchmarks.checkpoint.outcome import Outcome
from benchmarks.checkpoint.states import Kind

__all__ = ["Bound", "Finding", "findings"]

MEBIBYTE = 1 << 20
BUFFERS = 32
"""Mebibytes that count as buffers of a save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A limit, and the side of it on which a measurement is good."""

    limit: float
    unit: str = ""
    at_least: bool = False

    def is_met_by(self, value: float) -> bool:
        """Whether the value is good."""
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}{self.unit}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One number that was asked for, and what was measured: the median counts."""

    what: str
    bound: Bound
    values: Sequence[float]

    @property
    def median(self) -> float:
        """What counts."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether it is met."""
        return self.bound.is_met_by(self.median)


SAVE = Bound(limit=1.5, at_least=True)
FLOOR = Bound(limit=1.25)
SAME = Bound(limit=1.0, at_least=True)
RESHARDED = Bound(limit=2.0, at_least=True)
NO_SLOWER = Bound(limit=1.0)
MAPPED = Bound(limit=1.2)
READ = Bound(limit=1.05)
LOAD_PEAK = Bound(limit=64, unit=" MiB")
SAVE_PEAK = Bound(limit=BUFFERS, unit=" MiB")
BLOCKING = Bound(limit=1.2)
PLAN = Bound(limit=10, unit=" s")
TOLD = Bound(limit=2, unit=" s")
TOLD_PEAK = Bound(limit=38, unit=" MiB")


def findings(outcome: Outcome) -> list[Finding]:
    """Everything that was asked for and that this outcome measured."""
    return [*_times(outcome), *_reads(outcome), *_peaks(outcome)]


def _times(outcome: Outcome) -> Iterator[Finding]:
    for job, seconds in outcome.seconds.items():
        for ours, against, bound in [*_pairs(job), *_by_default(job, outcome.cell.kind)]:
            if {ours, against} <= seconds.keys():
                rounds = zip(seconds[ours], seconds[against], strict=True)
                yield _ratio(job, ours, against, bound, rounds)
                if job.startswith("load ") and {ours, against} <= (used := outcome.processor.get(job, {})).keys():
                    rounds = zip(used[ours], used[against], strict=True)
                    yield _ratio(f"{job}, processor", ours, against, bound, rounds)
        if job == PLANNING:
            yield Finding(what=job, bound=PLAN, values=seconds["ours"])
        if job == CONTENTS:
            yield Finding(what=job, bound=TOLD, values=seconds["ours"])


def _ratio(job: str, ours: str, against: str, bound: Bound, rounds: Iterable[tuple[float, float]]) -> Finding:
    if bound.at_least:
        return Finding(what=f"{job}: {against} / {ours}", bound=bound, values=[its / mine for mine, its in rounds])
    return Finding(what=f"{job}: {ours} / {against}", bound=bound, values=[mine / its for mine, its in rounds])


def _pairs(job: str) -> list[tuple[str, str, Bound]]:
    """Who is compared with whom."""
    if job == "save":
        return [
            ("ours", "dcp", SAVE),
            ("ours-slices", "dcp", SAVE),
            ("ours", "plain", FLOOR),
            ("ours-slices", "plain", FLOOR),
        ]
    if job == jobs.ROWS:
        return [("ours", "dcp", SAME)]
    if job == jobs.SLICES:
        return [("ours-slices", "dcp-flat", SAME)]
    if job == JOB:
        return [("ours", "copy", BLOCKING)]
    if job == FIRST:
        return [("ours", "copy to new memory", BLOCKING)]
    if job.startswith("load slices"):
        return [("ours-slices", peer, RESHARDED) for peer in ("dcp", "dcp-flat-cut", "dcp-flat")]
    return [("ours", "dcp", RESHARDED)] if job.startswith("load rows") else []


def _by_default(job: str, kind: Kind) -> list[tuple[str, str, Bound]]:
    """Of calls without a channel, verified and not: how much faster than the peer they are to be."""
    if not job.startswith("load "):
        return []
    verified, unverified = (1.4, 2.0) if job.startswith("load rows,") else (1.2, 1.6 if job == jobs.ROWS else 1.4)
    if kind == "blocks":
        verified = unverified = 1.5
    rows = [("default", verified), ("default-unverified", unverified)]
    found = [
        (f"{ours}-{name}", "dcp", Bound(limit=limit, at_least=True))
        for ours in ("ours", "ours-slices")
        for name, limit in rows
    ]
    found += [(f"{ours}-default-unverified", f"{ours}-default", NO_SLOWER) for ours in ("ours", "ours-slices")]
    return [*found, ("ours-of-hf-unverified", "hf", MAPPED)]


def _reads(outcome: Outcome) -> Iterator[Finding]:
    for job, sides in outcome.reads.items():
        for name, reads in sides.items():
            if not name.startswith("ours"):
                continue
            if name.endswith("unverified"):
                values = [read / needed for read, needed in zip(reads.read, reads.needed, strict=True)]
                yield Finding(what=f"{job}: {name}: a rank's bytes read / needed", bound=READ, values=[max(values)])
            else:
                value = sum(reads.read) / reads.stored
                yield Finding(what=f"{job}: {name}: all ranks' bytes read / stored", bound=READ, values=[value])


def _peaks(outcome: Outcome) -> Iterator[Finding]:
    for job, sides in outcome.peaks.items():
        for name, num_bytes in sides.items():
            if name.startswith("ours"):
                bound = LOAD_PEAK if job.startswith("load") else TOLD_PEAK if job == CONTENTS else SAVE_PEAK
                what = f"{job}: {name}: " + ("bytes" if job == CONTENTS else "peak memory")
                what += " beside the snapshot" if job == JOB else ""
                yield Finding(what=what, bound=bound, values=[num_bytes / MEBIBYTE])
