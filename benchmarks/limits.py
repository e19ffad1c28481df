"""What was asked for of a measurement, and whether it meets it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Finding"]

C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Generic[C]):
    """One number that was asked for, and what was measured: the median counts."""

    cell: C
    """What was measured."""
    what: str
    limit: float
    """At most."""
    values: Sequence[float]
    unit: str = ""

    @property
    def median(self) -> float:
        """What counts."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether it is met."""
        return self.median <= self.limit
