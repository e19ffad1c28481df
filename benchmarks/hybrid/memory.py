"""The most bytes of tensors that a rank holds at a time in an update of stage 3, and the formula.

Almost no tokens, so that what is seen is parameters, gradients and optimizer state, and no activations. The ranks are
processes that talk over TCP: what lies in shared memory would not be seen.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from benchmarks.cells import in_processes
from benchmarks.ours import ONCE, channel, engine, plan_of
from benchmarks.rank import live_tensor_bytes
from benchmarks.workload import Shape, batches, llama

__all__ = ["Peak", "formula", "measure"]

SHAPE = Shape(num_sequences=1, num_tokens=2)
NUM_WARM_STEPS = 2
"""The first makes the optimizer's state."""


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
    work = partial(_measure, num_microbatches=num_microbatches, num_layers=num_layers)
    in_processes(work, folder, num_ranks=num_ranks)
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


def _measure(rank: int, folder: Path, *, num_microbatches: int, num_layers: int) -> None:
    over = channel("tcp")
    model = llama(num_layers=num_layers)
    parts = formula(model, over.size)
    drawn = batches(SHAPE, num_microbatches, rank=rank, count=1)
    plan = plan_of(over.size, num_microbatches, precision=ONCE, sharding=sw.Sharding(stage=3))
    trained = engine(model, plan, over=over)
    for _ in range(NUM_WARM_STEPS):
        trained.step(drawn[0].whole)
    resident = live_tensor_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trained.step(drawn[0].whole)
    peak = Peak(
        num_ranks=over.size,
        num_microbatches=num_microbatches,
        resident_bytes=resident,
        measured_bytes=resident + most_allocated(seen),
        parts=parts,
    )
    if rank == 0:
        (folder / "peak.json").write_text(json.dumps(asdict(peak)))


def most_allocated(seen: profile) -> int:
    """The most bytes of tensors that were there at a time, beside those that were there before."""
    held = most = 0
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most
