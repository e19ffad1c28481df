"""What a cell is, and what it measured."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.pipeline.models import Kind, Shape

__all__ = ["Cell", "Clipping", "Host", "Memory", "Outcome", "Schedules"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One group of processes: a model, a number of ranks, and what they do."""

    work: Literal["steps", "clipping", "host"]
    kind: Kind
    shape: Shape
    num_ranks: int
    num_microbatches: int
    num_rounds: int


@dataclass(kw_only=True, slots=True)
class Schedules:
    """What the spans of one of our sides say, one value per round."""

    num_stages: int
    predicted_s: list[float] = field(default_factory=list)
    """Seconds of all forwards and backwards, by the simulator."""
    bubbles: list[float] = field(default_factory=list)
    """The share of the ranks' time in which they did not compute; or did not sleep, where stages sleep."""
    predicted_bubbles: list[float] = field(default_factory=list)
    forward_s: list[list[float]] = field(default_factory=list)
    """By round, of each stage: what went into the prediction."""
    backward_s: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Of one rank, under 1F1B."""

    rank: int
    resident_bytes: int
    """Storages of all parameters that are not on the meta device."""
    stage_bytes: int
    """Bytes of the parameters of its stage in a model that nobody cut."""
    foreign_calls: int
    foreign_bytes: int
    """Allocated in the calls of modules of other stages, in one update."""
    in_flight: int
    """Microbatches held at a time, at most; by the spans."""
    counted_in_flight: int
    """The same by the engine's own counter."""
    promised_in_flight: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Clipping:
    """Where one rank's time went, per forward and backward of a microbatch: medians over updates."""

    rank: int
    num_local: int
    """Calls of modules of its stage."""
    num_foreign: int
    num_lookups: int
    num_tried: int
    """Signatures that were tried on fake tensors, in all."""
    cpu_s: dict[str, float]
    """Processor seconds of the thread by phase."""
    wall_s: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Of one rank: what its host did for a plain loop of the model, and for its part of it under each schedule."""

    rank: int
    cpu_s: dict[str, list[float]]
    """By side, one value per round: processor seconds of a step."""
    num_tried: dict[str, int]
    """By schedule: signatures that were tried on fake tensors, in all."""
    num_replayed: dict[str, float]
    """By schedule: calls of a microbatch whose outcome was replayed."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What a cell measured: by side, one value per round."""

    cell: Cell
    updates: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of an update, from the first rank's start to the last one's end."""
    passes: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of its forwards and backwards."""
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    """Processor seconds of its forwards and backwards, of all threads of all ranks together."""
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Of the proof steps."""
    schedules: dict[str, Schedules] = field(default_factory=dict)
    transfer_s: float = 0.0
    memory: list[Memory] = field(default_factory=list)
    clipping: list[Clipping] = field(default_factory=list)
    host: list[Host] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        """Read what `write` wrote."""
        fields = json.loads(path.read_text())
        fields["cell"] = cell_of(fields["cell"])
        fields["schedules"] = {side: Schedules(**each) for side, each in fields["schedules"].items()}
        fields["memory"] = [Memory(**each) for each in fields["memory"]]
        fields["clipping"] = [Clipping(**each) for each in fields["clipping"]]
        fields["host"] = [Host(**each) for each in fields.get("host", [])]
        return cls(**fields)


def cell_of(fields: dict[str, object]) -> Cell:
    """From JSON values."""
    shape: dict[str, float] = fields["shape"]  # type: ignore[assignment]
    return Cell(**{**fields, "shape": Shape(**shape)})  # type: ignore[arg-type]
