"""The most bytes of tensors that a rank holds at a time in an update of stage 3, and the formula.

Almost no tokens, so that what is seen is parameters, gradients and optimizer state, and no activations. What is seen is
what torch's allocator gives out, and what the channel lends out of the memory that this rank shares with the others.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import shardwise as sw
from benchmarks.cells import in_processes
from benchmarks.ours import ONCE, channel, engine, plan_of
from benchmarks.workload import Shape, batches, llama
from shardwise.comm import Channel

__all__ = ["Peak", "formula", "leave_peak", "levels", "measure", "read_peak"]

SHAPE = Shape(num_sequences=1, num_tokens=2)
NUM_WARM_STEPS = 2
"""The first makes the optimizer's state."""
MEASURED = "the update that is measured"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Of rank 0."""

    num_ranks: int
    num_microbatches: int
    resident_bytes: int
    """Between two updates."""
    measured_bytes: int
    """At the most within an update."""
    parts: dict[str, int]
    """The formula, part by part."""

    @property
    def formula_bytes(self) -> int:
        """Their sum."""
        return sum(self.parts.values())

    @property
    def about(self) -> str:
        """The cell, in words."""
        return f"stage 3 on {self.num_ranks} ranks, k = {self.num_microbatches}"


def measure(num_ranks: int, num_microbatches: int, folder: Path, *, num_layers: int = 8) -> Peak:
    """In fresh processes; `folder` is empty."""
    work = partial(leave_peak, num_microbatches=num_microbatches, num_layers=num_layers)
    in_processes(work, folder, num_ranks=num_ranks)
    return read_peak(folder)


def read_peak(folder: Path) -> Peak:
    """What `leave_peak` left."""
    return Peak(**json.loads((folder / "peak.json").read_text()))


def formula(model: nn.Module, num_ranks: int) -> dict[str, int]:
    """What stage 3 needs under bfloat16 and AdamW, of a model in float32 that nobody cut."""
    num_elements = sum(each.numel() for each in model.parameters())
    layers = model.get_submodule("model.layers")
    units = [*layers.children(), model.get_submodule("model.embed_tokens"), model.get_submodule("lm_head")]
    largest = sorted((sum(each.numel() for each in unit.parameters()) for unit in units), reverse=True)
    return {
        "working run": 2 * num_elements // num_ranks,
        "masters": 4 * num_elements // num_ranks,
        "moments": 8 * num_elements // num_ranks,
        "gradient run": 4 * num_elements // num_ranks,
        "two units gathered": 2 * (largest[0] + largest[1]),
        "one bucket": 2 * largest[0],  # of gradients of a unit, as backward leaves them
    }


class Lending:
    """A channel that lists the bytes that it lends to this rank, which gives none of them back before the end."""

    def __init__(self, channel: Channel, lent: list[int]) -> None:
        self._channel = channel
        self._lent = lent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def over(self, ranks: Sequence[int]) -> Channel:
        """See `Channel.over`."""
        return cast("Channel", Lending(self._channel.over(ranks), self._lent))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Channel.allocate`."""
        self._lent.append(num_bytes)
        return self._channel.allocate(num_bytes)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """See `Channel.share`."""
        self._lent.append(num_bytes)
        return self._channel.share(num_bytes)


def leave_peak(rank: int, folder: Path, *, num_microbatches: int, num_layers: int) -> None:
    """Measure on this rank of the default process group; rank 0 leaves what it saw in `folder`."""
    lent: list[int] = []
    over = cast("Channel", Lending(channel("shared memory"), lent))
    plan = plan_of(over.size, num_microbatches, precision=ONCE, sharding=sw.Sharding(stage=3))
    drawn = batches(SHAPE, num_microbatches, rank=rank, count=1)
    # All in one: a profile does not tell of memory that was given out before it began.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = llama(num_layers=num_layers)
        parts = formula(model, over.size)
        trained = engine(model, plan, over=over)
        for _ in range(NUM_WARM_STEPS):
            trained.step(drawn[0].whole)
        with record_function(MEASURED):
            trained.step(drawn[0].whole)
    before, most = levels(seen, MEASURED)
    peak = Peak(
        num_ranks=over.size,
        num_microbatches=num_microbatches,
        resident_bytes=before + sum(lent),
        measured_bytes=most + sum(lent),
        parts=parts,
    )
    if rank == 0:
        (folder / "peak.json").write_text(json.dumps(asdict(peak)))


def levels(seen: profile, mark: str) -> tuple[int, int]:
    """The bytes that torch's allocator had given out where the mark begins, and at the most within it."""
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    (start, stop) = next(
        (event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.name() == mark
    )
    held = before = most = 0
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        if event.start_ns() < start:
            before = most = held
        elif event.start_ns() <= stop:
            most = max(most, held)
    return before, most
