"""The numbers that were asked for, and whether a measurement meets them."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.limits import Finding
from benchmarks.pipeline.clipping import PHASES
from benchmarks.pipeline.host import PLAIN
from benchmarks.pipeline.ours import SCHEDULES
from benchmarks.pipeline.outcome import Cell, Clipping, Host, Outcome
from benchmarks.pipeline.theirs import PEERS
from shardwise.plan.timeline import ideal_bubble

__all__ = ["busy_s", "findings", "foreign_s", "formula", "growth", "host_share", "is_fine"]

PREDICTION = 1.07
PEER = 1.0
CLIPPING = 0.02
HOST = 1.0
FINE = 1.1
FINE_S = 0.02
"""Stages shorter than this, forward and backward together, are fine."""
LOOKUPS = 1.0
OF_PEERS = ("fthenb", "1f1b")
"""Our schedules whose peers were asked for; interleaved is shown beside them."""


def findings(outcomes: Sequence[Outcome]) -> list[Finding[Cell]]:
    """Everything that was asked for and that these outcomes measured."""
    found = [
        each
        for outcome in outcomes
        for each in (*_times(outcome), *_memory(outcome), *_clipping(outcome), *_host(outcome))
    ]
    return [*found, *_growth([each for each in outcomes if each.clipping])]


def formula(cell: Cell, schedule: str) -> float:
    """The bubble of a schedule on this cell's ranks."""
    num_chunks = 2 if schedule == "interleaved" else 1
    return ideal_bubble(
        schedule, num_ranks=cell.num_ranks, num_chunks=num_chunks, num_microbatches=cell.num_microbatches
    )


def _times(outcome: Outcome) -> Iterator[Finding[Cell]]:
    cell = outcome.cell
    for name in SCHEDULES if outcome.updates else ():
        ours = f"ours {name}"
        seen = outcome.schedules[ours]
        ratios = _ratios(outcome.passes[ours], seen.predicted_s)
        limit = FINE if is_fine(cell) else PREDICTION
        yield Finding(cell=cell, what=f"{name}: forwards and backwards / predicted", limit=limit, values=ratios)
        if cell.kind == "sleeping" and not is_fine(
            cell
        ):  # else the stages are not quite equal, as the formula wants them
            limit = 1 - (1 - formula(cell, name)) / PREDICTION
            what = f"{name}: bubble (formula {formula(cell, name):.3f}, in a step {PREDICTION} times as long)"
            yield Finding(cell=cell, what=what, limit=limit, values=seen.bubbles)
    if outcome.updates and not is_fine(cell):
        # The work is the same: steps are as long as their bubbles allow.
        limit = PREDICTION * (1 - formula(cell, "1f1b")) / (1 - formula(cell, "interleaved"))
        ratios = _ratios(outcome.passes["ours interleaved"], outcome.passes["ours 1f1b"])
        what = f"interleaved / 1f1b, forwards and backwards (formula {limit / PREDICTION:.3f})"
        yield Finding(cell=cell, what=what, limit=limit, values=ratios)
    for name in OF_PEERS if outcome.updates else ():
        peer = f"torch {PEERS[name]}"
        ratios = _ratios(outcome.passes[f"ours {name}"], outcome.passes[peer])
        what = f"forwards and backwards: ours {name} / {peer}"
        yield Finding(cell=cell, what=what, limit=PEER, values=ratios)


def _ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    return [mine / its for mine, its in zip(ours, others, strict=True)]


def _memory(outcome: Outcome) -> Iterator[Finding[Cell]]:
    cell, ranks = outcome.cell, outcome.memory
    if not ranks:
        return
    beyond = [abs(each.resident_bytes - each.stage_bytes) for each in ranks]
    yield Finding(
        cell=cell, what="1f1b: parameter bytes other than a stage's", limit=0, values=[max(beyond)], unit=" B"
    )
    foreign = [each.foreign_bytes for each in ranks]
    what = "1f1b: allocated for modules of other stages"
    yield Finding(cell=cell, what=what, limit=0, values=[max(foreign)], unit=" B")
    over = [max(each.in_flight, each.counted_in_flight) - each.promised_in_flight for each in ranks]
    what = "1f1b: microbatches in flight, over min(stages - stage, k)"
    yield Finding(cell=cell, what=what, limit=0, values=[max(over)])


def is_fine(cell: Cell) -> bool:
    """Whether stages are so short that what a microbatch costs besides them shows."""
    of_a_layer_s = cell.shape.forward_s + cell.shape.backward_s
    return 0 < of_a_layer_s * cell.shape.num_layers / cell.num_ranks < FINE_S


def _host(outcome: Outcome) -> Iterator[Finding[Cell]]:
    for schedule in outcome.host[0].num_tried if outcome.host else ():
        ratios = [host_share(rank, schedule) for rank in outcome.host]
        what = f"{schedule}: host time of a rank / of a plain loop, worst rank"
        yield Finding(cell=outcome.cell, what=what, limit=HOST, values=[max(ratios)])


def host_share(rank: Host, schedule: str) -> float:
    """The middle over rounds of a rank's processor time, in the plain loop's of the same round."""
    return statistics.median(_ratios(rank.cpu_s[schedule], rank.cpu_s[PLAIN]))


def busy_s(rank: Clipping) -> float:
    """Processor seconds of a microbatch, but for waiting."""
    return sum(rank.cpu_s[phase] for phase in PHASES if phase != "waiting")


def foreign_s(rank: Clipping) -> float:
    """Of these, on modules of other stages and on glue."""
    return rank.cpu_s["foreign"] + rank.cpu_s["glue"]


def _clipping(outcome: Outcome) -> Iterator[Finding[Cell]]:
    if outcome.clipping:
        share = max(foreign_s(each) / busy_s(each) for each in outcome.clipping)
        what = "foreign modules and glue / forwards and backwards, worst rank"
        yield Finding(cell=outcome.cell, what=what, limit=CLIPPING, values=[share])


def growth(few: Outcome, many: Outcome) -> tuple[float, float]:
    """What one more foreign module costs in a forward: look-ups; and processor seconds, in the middle over ranks."""
    more = many.clipping[0].num_foreign - few.clipping[0].num_foreign
    lookups = many.clipping[0].num_lookups - few.clipping[0].num_lookups
    seconds = [statistics.median(foreign_s(rank) for rank in each.clipping) for each in (few, many)]
    return lookups / more, (seconds[1] - seconds[0]) / more


def _growth(outcomes: Sequence[Outcome]) -> Iterator[Finding[Cell]]:
    for many in outcomes[1:]:
        few = outcomes[0]
        lookups, seconds = growth(few, many)
        what = f"look-ups per foreign module, beyond {few.cell.num_ranks} ranks ({1e6 * seconds:.0f} us)"
        yield Finding(cell=many.cell, what=what, limit=LOOKUPS, values=[lookups])
