"""How often units are gathered: the rule by which they stay and go, carried out on the order of their uses (stage 3).

A unit stays after its use until another one is gathered. So the last unit of a forward needs no second gathering for
the backward, and the first unit none for the next microbatch:

    k microbatches over units 0 .. n-1, one after the other:   2 n k - k - (k - 1)   gatherings; n where they are kept

Where transfers go on alone, the unit that was used next in the last pass is gathered while one is used (`ahead`). Two
stay then, and the last two of a forward are there for the backward: 2 n k - 2 k - 2 (k - 1), for n > 1. When a unit's
backwards have ended, the one after the next is gathered in its room, before its gradients are reduced.
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
    is_noticed: bool = True
    """Whether that backward is known to have ended before the whole backward has."""


def one_by_one(num_units: int) -> list[Use]:
    """A forward that uses every unit once, in their order."""
    return [Use(unit, begins) for unit in range(num_units) for begins in (True, False)]


def count_gathers(
    forward: Mapping[int, Sequence[Use]],
    actions: Sequence[tuple[str, int]],
    *,
    keeps: bool,
    backward: Collection[int] | None = None,
    ahead: bool = False,
) -> Counter[int]:
    """How often each unit is gathered in one update.

    forward: stage -> the uses in a forward of it; a backward has them in reverse. actions: ("F" or "B", stage) in the
    order in which the rank runs them. keeps: what was gathered stays until the end of the update. backward: the units
    that have one, where not all do (what comes before everything that is trained has none). ahead: the next unit is
    gathered while one is used, as the update before had them.
    """
    following: dict[tuple[str, int], tuple[str, int]] = {}
    if ahead:
        _count(forward, actions, keeps=keeps, backward=backward, following=following)  # the update before
    return _count(forward, actions, keeps=keeps, backward=backward, following=following if ahead else None)


def _count(
    forward: Mapping[int, Sequence[Use]],
    actions: Sequence[tuple[str, int]],
    *,
    keeps: bool,
    backward: Collection[int] | None,
    following: dict[tuple[str, int], tuple[str, int]] | None,
) -> Counter[int]:
    """following: (forward or backward, unit) -> the use after it; learnt here, too. None: not looked at."""
    tally = _GatheringTally(keeps=keeps, following=following)
    for kind, stage in actions:
        uses = forward.get(stage, ())
        if kind == "B":
            uses = _reversed(uses, backward)
        last_of = {use.unit: at for at, use in enumerate(uses)}
        for at, use in enumerate(uses):
            if use.begins:
                tally.begin(kind, use.unit)
            else:
                # The first module has no input with a gradient: nothing shows that its backward has ended.
                tally.end(use.unit, reduces=kind == "B" and last_of[use.unit] == at and use.is_noticed)
    return tally.gathers


class _GatheringTally:
    """Those that are here, and what was gathered so far."""

    def __init__(self, *, keeps: bool, following: dict[tuple[str, int], tuple[str, int]] | None) -> None:
        self.gathers: Counter[int] = Counter()
        self._keeps = keeps
        self._following = following
        self._num_uses: Counter[int] = Counter()
        self._here: set[int] = set()
        self._last: tuple[str, int] | None = None

    def begin(self, kind: str, unit: int) -> None:
        self._num_uses[unit] += 1
        self._gather(unit)
        if self._following is None or self._num_uses[unit] > 1:
            return
        if self._last is not None:
            self._following[self._last] = kind, unit
        self._last = kind, unit
        if self._last in self._following:
            self._gather(self._following[self._last][1])

    def end(self, unit: int, *, reduces: bool) -> None:
        self._num_uses[unit] -= 1
        if self._following is None or not reduces or self._num_uses[unit]:
            return
        between = self._following.get(("B", unit))
        if between in self._following and between[1] in self._here:
            self._gather(self._following[between][1], stays=between[1])

    def _gather(self, unit: int, stays: int | None = None) -> None:
        if unit not in self._here:
            if not self._keeps:
                self._here = {each for each in self._here if self._num_uses[each] or each == stays}
            self._here.add(unit)
            self.gathers[unit] += 1


def _reversed(uses: Sequence[Use], backward: Collection[int] | None) -> list[Use]:
    return [
        Use(use.unit, not use.begins, is_noticed=use.is_noticed)
        for use in reversed(uses)
        if use.returns and (backward is None or use.unit in backward)
    ]
