"""From outcomes to tables, and to files that say how they were made."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.markdown import Row, markdown
from benchmarks.pipeline.asked import busy_s, findings, foreign_s, formula, host_share, is_fine
from benchmarks.pipeline.clipping import PHASES
from benchmarks.pipeline.outcome import Cell, Outcome
from benchmarks.rounds_file import write_rounds

__all__ = ["asked_table", "clipping_table", "host_table", "memory_table", "side_table", "write"]

KINDS = {"computing": "plain blocks", "sleeping": "stages that sleep", "llama": "Llama"}


def asked_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every number that was asked for: the median of the rounds counts."""
    header = ("model", "ranks", "k", "what", "asked", "measured", "min - max", "verdict")
    rows = [
        (
            *_cell(each.cell),
            each.what,
            f"<= {each.limit:.3g}{each.unit}",
            f"{each.median:.3g}{each.unit}",
            f"{min(each.values):.3g} - {max(each.values):.3g}" if len(each.values) > 1 else "",
            "met" if each.met else "MISSED",
        )
        for each in findings(outcomes)
    ]
    return markdown(header, rows)


def side_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every side: medians."""
    header = (
        "model",
        "ranks",
        "k",
        "side",
        "update ms",
        "passes ms",
        "passes cpu ms",
        "predicted ms",
        "bubble",
        "formula",
    )
    return markdown(header, [row for outcome in outcomes for row in _side_rows(outcome)])


def _side_rows(outcome: Outcome) -> Iterator[Row]:
    for name, seconds in outcome.updates.items():
        times = [_ms(seconds), _ms(outcome.passes[name]), _ms(outcome.cpu_s[name])]
        seen = outcome.schedules.get(name)
        if seen is None:
            yield (*_cell(outcome.cell), name, *times, "", "", "")
            continue
        bubble = f"{statistics.median(seen.bubbles):.3f}"
        ideal = f"{formula(outcome.cell, name.removeprefix('ours ')):.3f}"
        yield (*_cell(outcome.cell), name, *times, _ms(seen.predicted_s), bubble, ideal)


def stage_table(outcomes: Sequence[Outcome]) -> str:
    """What the predictions were made of: the medians over rounds."""
    header = ("model", "ranks", "k", "side", "forward ms by stage", "backward ms by stage", "transfer ms")
    rows = [
        (
            *_cell(outcome.cell),
            name,
            " ".join(_ms(values) for values in zip(*seen.forward_s, strict=True)),
            " ".join(_ms(values) for values in zip(*seen.backward_s, strict=True)),
            f"{1e3 * outcome.transfer_s:.2f}",
        )
        for outcome in outcomes
        for name, seen in outcome.schedules.items()
    ]
    return markdown(header, rows)


def memory_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every rank, under 1F1B."""
    header = ("model", "ranks", "k", "rank", "parameters B", "its stage's B", "foreign calls", "foreign B", "in flight")
    rows = [
        (
            *_cell(outcome.cell),
            str(each.rank),
            f"{each.resident_bytes:,}",
            f"{each.stage_bytes:,}",
            str(each.foreign_calls),
            str(each.foreign_bytes),
            f"{each.in_flight} of {each.promised_in_flight}",
        )
        for outcome in outcomes
        for each in outcome.memory
    ]
    return markdown(header, rows)


def clipping_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every rank: processor milliseconds of a microbatch by phase."""
    phases = tuple(f"{phase} ms" for phase in PHASES)
    header = ("ranks", "rank", "own modules", "foreign", "look-ups", "tried", *phases, "foreign + glue", "of the wall")
    rows = [
        (
            str(outcome.cell.num_ranks),
            str(each.rank),
            str(each.num_local),
            str(each.num_foreign),
            str(each.num_lookups),
            str(each.num_tried),
            *(f"{1e3 * each.cpu_s[phase]:.2f}" for phase in PHASES),
            f"{foreign_s(each) / busy_s(each):.2%}",
            f"{(each.wall_s['foreign'] + each.wall_s['glue']) / sum(each.wall_s.values()):.2%}",
        )
        for outcome in outcomes
        for each in outcome.clipping
    ]
    return markdown(header, rows)


def host_table(outcomes: Sequence[Outcome]) -> str:
    """A row for every rank and side: processor milliseconds of a step."""
    header = (
        "model",
        "ranks",
        "k",
        "rank",
        "side",
        "least cpu ms",
        "middle cpu ms",
        "of the loop",
        "tried",
        "replayed",
    )
    rows = [
        (
            *_cell(outcome.cell),
            str(each.rank),
            side,
            f"{1e3 * min(seconds):.1f}",
            _ms(seconds),
            *(
                (f"{host_share(each, side):.2f}", str(each.num_tried[side]), f"{each.num_replayed[side]:.1f}")
                if side in each.num_tried
                else ("", "", "")
            ),
        )
        for outcome in outcomes
        for each in outcome.host
        for side, seconds in each.cpu_s.items()
    ]
    return markdown(header, rows)


def _cell(cell: Cell) -> Row:
    return (_model(cell), str(cell.num_ranks), str(cell.num_microbatches))


def _model(cell: Cell) -> str:
    if is_fine(cell):
        return "stages of 5 + 10 ms"
    return f"{KINDS[cell.kind]}, width {cell.shape.width}" if cell.kind == "computing" else KINDS[cell.kind]


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f}"


NOTES = {
    "steps": """\
All sides update in turns in every round, each round starting with another one, from a barrier; an update lasts from the
first rank's start to the last rank's end, and so do its forwards and backwards ("passes"). Ratios are medians over
rounds of the ratio within a round. Before anything is timed, all sides have given the same losses over three updates on
one batch (to 1e-5; they add gradients up in different orders).

Models. Plain blocks: embedding, pre-norm transformer blocks (fused qkv, causal scaled_dot_product_attention, GELU
MLP), head; one sequence per microbatch. Stages that sleep: a block multiplies by a parameter and sleeps a known time,
twice as long in backward; 4 ranks then need no 4 cores. The peer has the same pieces in an `nn.Sequential` per stage,
cut by hand; we get them as one model. A stage sleeps as long as one of plain blocks computes (40 and 80 ms): what a
microbatch costs beside that does not depend on it, so that shorter stages come out worse and longer ones better. Llama:
transformers' own, unmodified.

`torch`: torch.distributed.pipelining over gloo (`PipelineStage`; `ScheduleGPipe`, `Schedule1F1B`,
`ScheduleInterleaved1F1B`, `return_outputs=False`), then AdamW and `zero_grad` on each rank. Forwards and backwards are
compared, with all that belongs to them: of ours the comparison of what all ranks' forwards did, of theirs the division
of gradients by k (`scale_grads`). Whole updates do different things and are shown without a verdict: ours agrees on
weights, loss and whether gradients are finite, takes the norm of the gradient over all ranks, and publishes the
weights; theirs does none of that. Ours runs over shared memory, draws random numbers by microbatch and call, and
records spans while it is timed. The same fused AdamW on both sides, 1 thread per rank. Interleaved has 2 stages on each
rank; against the peer it was not asked for.

Predicted: `simulate_schedule` with the transfers that the model has. Stages that compute: the median over the
microbatches of one round of what a stage's forwards and backwards took in that round, less the waits in them; stages
that sleep: what they are told to sleep, so that everything else counts against us. A transfer: half of a round trip of
one activation between ranks 0 and 1, measured apart, while nobody computes. The bubble of stages that compute is the
share of time in which ranks were in no forward or backward, or waited in one; of stages that sleep, in which they did
not sleep. `passes cpu ms`: processor time of forwards and backwards, of all threads of all ranks.

Memory: parameters are the storages behind all parameters not on the meta device, against the same modules of a model
that nobody cut. Foreign bytes: what torch's allocator gave out during calls of modules of other stages in one update,
except to send what is the rank's own. In flight: forwards begun and backwards not ended, from the spans.""",
    "clipping": """\
Clipping: processor time of the rank's thread per microbatch, in its forwards and backwards, by phase; medians. `own`:
modules of its stage, and operations between modules that are executed on it (a norm, the loss); `foreign`: modules of
other stages; `glue`: all else, the user's code between modules and what all ranks compute (masks, position tables)
included; `waiting`: for messages, taking them over, and the exchange at the end. The share is that of foreign and glue
in all but waiting: bubble and optimizer are not in it, which would make it smaller. `of the wall`: of a step's forwards
and backwards with waits. With more ranks than cores only processor time means anything. 1F1B, 4 layers per stage.""",
    "host": """\
Host: processor time of the process in a step, for 16 layers of width 16 and 4 tokens. A plain loop of the whole model
and the schedules run in turns in the same processes, with the same losses and the same fused AdamW. All ranks run the
plain loop at the same time. The share is the middle over rounds of the ratio within a round. `tried`: signatures that
were tried on fake tensors, once for all steps; `replayed`: calls of a microbatch whose outcome was known.""",
}
"""By what a cell does."""


def write(folder: Path, name: str, outcomes: Sequence[Outcome], command: str) -> None:
    """Write `name.md` (all tables) and `name.json` (every round)."""
    made = write_rounds(folder, name, outcomes, command)
    head = (
        f"Made by `{command}` on {made['date']}: {made['cores']} cores, Python {made['python']}, torch "
        f"{made['torch']}; 1 thread per rank."
    )
    shapes = "\n".join(f"- {line}" for line in dict.fromkeys(_shape(outcome.cell) for outcome in outcomes))
    tables = [side_table(outcomes), stage_table(outcomes), memory_table(outcomes), clipping_table(outcomes)]
    tables.append(host_table(outcomes))
    works = {outcome.cell.work for outcome in outcomes}
    notes = [text for work, text in NOTES.items() if work in works]
    with_rows = [each for each in tables if each.count("\n") > 1]
    parts = ["# Pipelines", head, asked_table(outcomes), shapes, *notes, *with_rows]
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def _shape(cell: Cell) -> str:
    shape = cell.shape
    text = f"{KINDS[cell.kind]} on {cell.num_ranks} ranks: {shape.num_layers} layers of width {shape.width}, "
    text += f"{shape.num_tokens} tokens per microbatch, {cell.num_rounds} rounds"
    return text + (f", {1e3 * shape.forward_s:g} ms per forward of a layer" if shape.forward_s else "")
