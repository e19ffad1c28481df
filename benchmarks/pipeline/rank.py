"""What one process of a cell does: prove that all sides train alike, let them update in turns, and look."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from benchmarks.joined import joined
from benchmarks.pipeline import timelines
from benchmarks.pipeline.clipping import measure_clipping
from benchmarks.pipeline.host import measure_host
from benchmarks.pipeline.memory import measure_memory
from benchmarks.pipeline.models import batches, net
from benchmarks.pipeline.ours import SCHEDULES, Ours, engine_of
from benchmarks.pipeline.outcome import Cell, Outcome, Schedules, cell_of
from benchmarks.pipeline.step import Do, Taken
from benchmarks.pipeline.theirs import PEERS, Theirs
from benchmarks.pipeline.timelines import StageTimes
from shardwise.comm import Channel
from shardwise.plan.timeline import Timeline

__all__ = ["measure", "prove"]

NUM_PROOF_STEPS = 3
TOLERANCE = 1e-5
"""Of losses, relative: the peer adds its gradients up in another order."""
OF_MEMORY = "1f1b"


def measure_cell(cell: Cell, channel: Channel) -> Outcome:
    """Run a cell on this rank; rank 0 gets the outcome."""
    if cell.work == "clipping":
        engine = engine_of(cell.kind, cell.shape, "1f1b", cell.num_microbatches, channel)
        drawn = batches(cell.kind, cell.shape, cell.num_microbatches, cell.num_rounds)
        return Outcome(cell=cell, clipping=_of_all_ranks(measure_clipping(engine, drawn)))
    if cell.work == "host":
        host, proven = measure_host(cell, channel)
        prove(proven)
        return Outcome(cell=cell, host=_of_all_ranks(host))
    ours = {name: Ours(cell.kind, cell.shape, name, cell.num_microbatches, channel) for name in SCHEDULES}
    theirs = {PEERS[name]: Theirs(cell.kind, cell.shape, name, cell.num_microbatches) for name in SCHEDULES}
    sides: dict[str, Do] = {f"ours {name}": side.do for name, side in ours.items()}
    sides |= {f"torch {name}": side.do for name, side in theirs.items()}
    outcome = Outcome(cell=cell, transfer_s=timelines.transfer_seconds(channel, cell.shape))
    (proof,) = batches(cell.kind, cell.shape, cell.num_microbatches, 1)
    for name, do in sides.items():
        losses = [_of_all_ranks(do(proof).loss) for _ in range(NUM_PROOF_STEPS)]
        outcome.losses[name] = [next((each for each in step if not math.isnan(each)), math.nan) for step in losses]
    prove(_of_all_ranks(outcome.losses)[0])
    taken = _in_turns(cell, sides)
    for name, rounds in taken.items():
        outcome.updates[name] = [_seconds(each, "start_s", "stop_s") for each in rounds]
        outcome.cpu_s[name] = [sum(each.cpu_s for each in ranks) for ranks in rounds]
        outcome.passes[name] = [_seconds(each, "passes_start_s", "passes_stop_s") for each in rounds]
    for name, side in ours.items():
        outcome.schedules[f"ours {name}"] = _schedules(cell, side, taken[f"ours {name}"], outcome.transfer_s)
    whole, _ = net(cell.kind, cell.shape, cell.num_ranks)
    outcome.memory = _of_all_ranks(measure_memory(cell, ours[OF_MEMORY], proof, whole))
    return outcome


def prove(losses: Mapping[str, list[float]]) -> None:
    """Raise RuntimeError unless all sides have the same losses, update for update, and these fall."""
    first = next(iter(losses.values()))
    problems = [
        f"{name}: {values} instead of {first}"
        for name, values in losses.items()
        if not all(abs(value - wanted) <= TOLERANCE * abs(wanted) for value, wanted in zip(values, first, strict=True))
    ]
    if not first[-1] < first[0]:
        problems.append(f"the loss does not fall: {first}")
    if problems:
        raise RuntimeError("the sides do not train alike:\n" + "\n".join(problems))


def _in_turns(cell: Cell, sides: Mapping[str, Do]) -> dict[str, list[list[Taken]]]:
    """By side, by round, what each rank took."""
    drawn = batches(cell.kind, cell.shape, cell.num_microbatches, cell.num_rounds)
    taken: dict[str, list[list[Taken]]] = {name: [] for name in sides}
    order = list(sides)
    for index, batch in enumerate(drawn):
        # Each round starts with another side, every second one runs backwards: nobody has one neighbour all the time.
        at = index % len(order)
        turned = order[at:] + order[:at]
        for name in turned if index % 2 == 0 else reversed(turned):
            dist.barrier()
            taken[name].append(_of_all_ranks(sides[name](batch)))
        if dist.get_rank() == 0:
            print(f"    round {index + 1} of {cell.num_rounds}", file=sys.stderr, flush=True)
    return taken


def _seconds(ranks: list[Taken], start: str, stop: str) -> float:
    """From the first rank's start to the last one's end."""
    return float(max(getattr(each, stop) for each in ranks) - min(getattr(each, start) for each in ranks))


def _schedules(cell: Cell, side: Ours, rounds: list[list[Taken]], transfer_s: float) -> Schedules:
    schedule, transfers = side.runner.schedule, side.runner.transfers
    assert schedule is not None
    assert transfers is not None
    found = Schedules(num_stages=schedule.num_stages)
    for ranks in rounds:
        timeline = Timeline(cell.num_ranks, tuple(span for each in ranks for span in each.spans))
        if cell.kind == "sleeping":
            times = timelines.known(cell.shape, schedule.num_stages)
        else:
            times = timelines.measured(timeline, schedule.num_stages)
        predicted = timelines.predicted(schedule, transfers, times, transfer_s)
        found.predicted_s.append(predicted.makespan_s)
        found.predicted_bubbles.append(predicted.bubble)
        found.bubbles.append(_bubble(cell, timeline, times))
        found.forward_s.append(list(times.forward_s))
        found.backward_s.append(list(times.backward_s))
    return found


def _bubble(cell: Cell, timeline: Timeline, times: StageTimes) -> float:
    if cell.kind != "sleeping":
        return timeline.bubble
    slept_s = cell.num_microbatches * (sum(times.forward_s) + sum(times.backward_s))
    return 1 - slept_s / (cell.num_ranks * timeline.makespan_s)


def _of_all_ranks(mine: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def measure(rank: int, num_ranks: int, folder: str) -> None:
    """Run the cell described in `folder`, in a fresh process; rank 0 leaves the outcome there."""
    with joined(rank, num_ranks, folder, timeout_seconds=120.0) as (place, channel):
        outcome = measure_cell(cell_of(json.loads((place / "cell.json").read_text())), channel)
        if rank == 0:
            outcome.write(place / "outcome.json")
