"""What a cell is, and what it measured."""

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Cell", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One size of one kind of work."""

    work: Literal["planning", "converting"]
    size: int
    """Names of sources; or bytes of the model."""
    num_rounds: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a cell measured: a value per round, each of a process of its own."""

    cell: Cell
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By phase of planning, or by run of a conversion."""
    peaks: dict[str, list[int]] = field(default_factory=dict)
    """Bytes by run, of the whole process."""
