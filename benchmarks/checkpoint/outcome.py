"""What a cell is, and what it measured."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.checkpoint.states import Kind

__all__ = ["Cell", "Outcome", "Reads"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One group of processes: a size, a number of ranks, and what they do."""

    work: Literal["save and load", "load what others saved", "alone"]
    num_bytes: int
    num_ranks: int
    num_savers: int
    """Ranks that saved what is loaded."""
    num_rounds: int
    rare: bool
    """Whether sides that are beside the question take part."""
    kind: Kind = "blocks"
    times_saves: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """Bytes of one load, by rank."""

    read: list[int]
    needed: list[int]
    stored: int
    """Bytes of all that anybody needs, as they are stored, each once."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What a cell measured: by job, then by side."""

    cell: Cell
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """One value per round, of the slowest rank."""
    processor: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Seconds of a processor per round and rank, of all threads: other programs on the machine hardly change it."""
    reads: dict[str, dict[str, Reads]] = field(default_factory=dict)
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    """Sampled bytes above what was there before, of the rank with most; without an asynchronous save's snapshot."""
    kernel_peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same by VmHWM."""

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        """Read what `write` wrote."""
        fields = json.loads(path.read_text())
        fields["cell"] = Cell(**fields["cell"])
        fields["reads"] = {
            job: {name: Reads(**each) for name, each in sides.items()} for job, sides in fields["reads"].items()
        }
        return cls(**fields)
