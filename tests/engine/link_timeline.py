"""The timeline of a rank whose transfers go over one link: as it was logged, and the best of all orders.

    device   | F 0 | F 1 | ....       computations one after the other, each after the waits before it
    link     | gather 1 | gather 2    transfers one after the other, each after what the device had before it

The best is found by trying every order of the transfers, under what holds for any engine that keeps two units: what is
computed next needs its transfers, and a transfer needs the computations before it.

Under stage 2 a block may fill more buckets than there are buffers for gradients. Then the device waits for a buffer:

    device   | B 2 | fills 0, 1 | waits    | fills 2 | B 1 ..      two buffers: bucket 2 takes the one that the
    link                        | reduce 0 | reduce 1 | ..         reduction of bucket 0 gives back

Other orders would be shorter there (a small bucket before a large one). But ranks have to agree on one order before
they know what is complete, and it is that of the first backward.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.engine.late_channels import Event


@dataclass(frozen=True)
class Transfer:
    """A transfer of a step."""

    seconds: float
    after: int
    """How many computations must have ended before it begins."""
    before: int
    """The number of the computation that needs it; that of all computations, where none does."""


def makespan(events: Sequence[Event], seconds_of: Callable[[str], float], bytes_per_second: float) -> float:
    """Seconds from the first event to the last."""
    device = link = 0.0
    ends: dict[int, float] = {}
    for event in events:
        if event.kind == "compute":
            device += seconds_of(event.what)
        elif event.kind == "issue":
            link = ends[event.number] = max(link, device) + event.num_bytes / bytes_per_second
        else:
            device = max(device, ends[event.number])
    return max(device, link)


def transfers_of(events: Sequence[Event], bytes_per_second: float, *, num_kept: int) -> list[Transfer]:
    """The transfers of a log, with what limits each: a gathered unit needs room, a gradient has to be computed.

    num_kept: units that are in memory at a time.
    """
    found: dict[int, Transfer] = {}
    num_computed = 0
    waiting: list[int] = []
    for event in events:
        if event.kind == "compute":
            for number in waiting:
                found[number] = Transfer(found[number].seconds, found[number].after, num_computed)
            waiting.clear()
            num_computed += 1
        elif event.kind == "issue":
            found[event.number] = Transfer(event.num_bytes / bytes_per_second, num_computed, math.inf)  # type: ignore[arg-type]
        elif event.what.startswith("parameters of unit"):
            waiting.append(event.number)
    transfers = []
    for each in found.values():
        before = num_computed if each.before is math.inf else each.before
        # A gather needs the place of the unit that was computed `num_kept` before the one that needs it.
        after = each.after if each.before is math.inf else max(0, before - num_kept + 1)
        transfers.append(Transfer(each.seconds, after, before))
    return transfers


def least_makespan(durations: Sequence[float], transfers: Sequence[Transfer]) -> float:
    """Seconds of the best order of the transfers; `durations` of the computations."""
    needed = [[at for at, each in enumerate(transfers) if each.before == number] for number in range(len(durations))]
    least = math.inf

    def computed(ends: Mapping[int, float]) -> list[float]:
        """When each computation ends, as far as what has arrived lets them."""
        device, found = 0.0, []
        for duration, wanted in zip(durations, needed, strict=True):
            if not all(each in ends for each in wanted):
                break
            device = max([device, *(ends[each] for each in wanted)]) + duration
            found.append(device)
        return found

    def search(ends: dict[int, float], link: float, left: float) -> None:
        nonlocal least
        so_far = computed(ends)
        device = (so_far[-1] if so_far else 0.0) + sum(durations[len(so_far) :])
        if max(link + left, device) >= least:  # no order of the rest is better
            return
        if len(ends) == len(transfers):
            least = max(link, device)
            return
        seen = set()
        for at, each in enumerate(transfers):
            if at in ends or each in seen or each.after > len(so_far):
                continue
            seen.add(each)  # of those that are alike, any
            end = max(link, so_far[each.after - 1] if each.after else 0.0) + each.seconds
            search({**ends, at: end}, end, left - each.seconds)

    search({}, 0.0, sum(each.seconds for each in transfers))
    return least


def makespan_of_gradients(durations: Sequence[float], transfers: Sequence[Transfer], *, num_buffers: int) -> float:
    """Seconds where gradients go in the order in which they come, each in a buffer until it has arrived."""
    device = link = 0.0
    ends: list[float] = []
    for number, duration in enumerate(durations):
        device += duration
        for each in transfers:
            if each.after == number + 1:
                if len(ends) >= num_buffers:
                    device = max(device, ends[-num_buffers])
                link = max(link, device) + each.seconds
                ends.append(link)
    return max(device, link)
