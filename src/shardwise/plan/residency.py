"""Which units a rank gathers, waits for and frees, and when (stage 3): the engine does it, a forecast counts it.

A unit stays after its use until another one is gathered. So the last unit of a forward needs no second gathering for
the backward, and the first unit none for the next microbatch:

    k microbatches over units 0 .. n-1, one after the other:   2 n k - k - (k - 1)   gatherings; n where they are kept

Where transfers go on alone, the unit that was used next in the last pass is gathered while one is used (`ahead`). Two
stay then, and the last two of a forward are there for the backward: 2 n k - 2 k - 2 (k - 1), for n > 1. When a unit's
backwards have ended, the one after the next is gathered in its room, before its gradients are reduced.

    of 4 units, what happens   one at a time              where transfers go on alone
    forward of 1 begins        free 0, gather 1, wait 1   wait 1, free 0, gather 2
    backward of 3 begins       (3 is here)                (3 and 2 are here)
    gradients of 3 leave                                  free 3, gather 1
    backward of 2 begins       free 3, gather 2, wait 2   (2 is here)
    gradients of 2 leave                                  free 2, gather 0
    backward of 1 begins       free 2, gather 1, wait 1   wait 1
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

FORWARD, BACKWARD, RECOMPUTATION = "forward", "backward", "recomputation"

Order: TypeAlias = tuple[Literal["gather", "wait", "free"], int]
"""What is to be done with a unit. "gather" begins transfers, "wait" ends them."""


class Residency:
    """The units that are gathered on one rank. Whoever tells of an event carries out what it returns, in its order."""

    def __init__(self, *, keeps: bool, ahead: bool) -> None:
        """keeps: what was gathered stays until the end of the pass. ahead: what comes next is gathered meanwhile."""
        # Elsewhere a transfer goes on only while somebody waits: nothing would be won, and a second unit held.
        self.ahead = ahead
        self.keeps = self._keeps_always = keeps
        self.is_held = False
        """Whether `hold` was called since the last `begin_training`."""
        # A count and no flag: a module inside of another may have the same unit (ties), and forwards run inside of
        # backwards (recomputation).
        self.num_uses: defaultdict[int, int] = defaultdict(int)
        """Unit -> forwards and backwards that need it now."""
        self.resident: dict[int, bool] = {}
        """Of the units that have memory: whether they were waited for."""
        self._next: dict[tuple[str, int], tuple[str, int]] = {}
        """(phase, unit) -> phase and unit of the use after it."""
        self._last: tuple[str, int] | None = None

    def begin_training(self) -> None:
        """A pass of forwards and backwards begins."""
        self.keeps, self.is_held = self._keeps_always or self.is_held, False

    def release(self) -> list[int]:
        """Everything is let go, whatever state it is in; the units that have memory."""
        units = [*self.resident]
        self.num_uses.clear()
        self.resident.clear()
        self._last = None
        return units

    def hold(self) -> None:
        """What is gathered stays from now on, also in the next pass of forwards and backwards."""
        self.keeps = self.is_held = True

    def begin(self, phase: str, unit: int) -> Sequence[Order]:
        """A forward or a backward of the unit is about to begin."""
        self.num_uses[unit] = num = self.num_uses[unit] + 1
        if num > 1:
            return ()
        orders: list[Order] = []
        resident = self.resident
        if unit not in resident:
            self._gather(unit, orders)
        if not resident[unit]:
            resident[unit] = True
            orders.append(("wait", unit))
        if self.ahead:
            # A wrong guess costs one gather too many, and no deadlock: all ranks have used the same units in the same
            # order, and guess alike.
            use = phase, unit
            if self._last is not None:
                self._next[self._last] = use
            self._last = use
            if (following := self._next.get(use)) is not None and following[1] not in resident:
                self._gather(following[1], orders)
        return orders

    def end(self, unit: int) -> None:
        """A forward or a backward of it has ended. It stays until there is need for room."""
        # Not freed here: the last unit of a forward is the first of the backward, and saves a gather.
        self.num_uses[unit] -= 1

    def reduce(self, unit: int) -> Sequence[Order]:
        """The backwards of a unit have ended, and its gradients are about to leave."""
        # What is used after the next unit comes in its room, and before the gradients leave: the backward after the
        # next waits for this gather, and nothing waits for them.
        if not self.ahead or self.num_uses[unit] or (following := self._next.get((BACKWARD, unit))) is None:
            return ()
        after = self._next.get(following)
        if after is None or after[1] in self.resident or following[1] not in self.resident:
            return ()
        orders: list[Order] = []
        self._gather(after[1], orders, stays=following[1])
        return orders

    def _gather(self, unit: int, orders: list[Order], stays: int | None = None) -> None:
        resident, num_uses = self.resident, self.num_uses
        if not self.keeps:
            for each in tuple(resident):
                if not num_uses[each] and each != stays:
                    del resident[each]
                    orders.append(("free", each))
        resident[unit] = False
        orders.append(("gather", unit))


def count_gathers(
    stages: Mapping[int, Sequence[int]], actions: Sequence[tuple[str, int]], *, keeps: bool, ahead: bool
) -> Counter[int]:
    """How often each unit is gathered in one update.

    stages: stage -> its units, each of which its forward uses once, in their order, and its backward in reverse.
    actions: ("F" or "B", stage) in the order in which the rank runs them. keeps, ahead: see `Residency`.
    """
    residency = Residency(keeps=keeps, ahead=ahead)
    if ahead:  # the update before shows what comes next
        list(_orders(residency, stages, actions))
        residency.release()
    return Counter(unit for what, unit in _orders(residency, stages, actions) if what == "gather")


def _orders(
    residency: Residency, stages: Mapping[int, Sequence[int]], actions: Sequence[tuple[str, int]]
) -> Iterator[Order]:
    for kind, stage in actions:
        units = stages.get(stage, ())
        for unit in units if kind == "F" else reversed(units):
            yield from residency.begin(FORWARD if kind == "F" else BACKWARD, unit)
            residency.end(unit)
            if kind == "B":
                yield from residency.reduce(unit)
