"""How often units are gathered: the rule by which they stay and go, carried out on the order of their uses (stage 3).

A unit that nobody uses stays until another one is gathered. Of the last unit of a forward, the backward that follows
needs no second gathering, and of the first one, the next microbatch needs none:

    k microbatches over units 0 .. n-1, one after the other:   2 n k - k - (k - 1)   gatherings; n where they are kept
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """A unit is needed from here on, or no more."""

    unit: int
    begins: bool
    returns: bool = True
    """Whether a backward of it follows."""


def one_by_one(num_units: int) -> list[Use]:
    """A forward that uses every unit once, in their order."""
    return [Use(unit, begins) for unit in range(num_units) for begins in (True, False)]


def count_gathers(
    forward: Mapping[int, Sequence[Use]],
    actions: Sequence[tuple[str, int]],
    *,
    keeps: bool,
    backward: Collection[int] | None = None,
) -> Counter[int]:
    """How often each unit is gathered in one update.

    forward: stage -> the uses in a forward of it; a backward has them in reverse. actions: ("F" or "B", stage) in the
    order in which the rank runs them. keeps: what was gathered stays until the end of the update. backward: the units
    that have one, where not all do (what comes before everything that is trained has none).
    """
    gathers: Counter[int] = Counter()
    num_uses: Counter[int] = Counter()
    resident: set[int] = set()
    for kind, stage in actions:
        uses = forward.get(stage, ())
        if kind == "B":
            uses = [
                Use(use.unit, not use.begins)
                for use in reversed(uses)
                if use.returns and (backward is None or use.unit in backward)
            ]
        for use in uses:
            num_uses[use.unit] += 1 if use.begins else -1
            if use.begins and use.unit not in resident:
                if not keeps:
                    resident = {unit for unit in resident if num_uses[unit]}
                resident.add(use.unit)
                gathers[use.unit] += 1
    return gathers
