"""Who updates what an optimizer must see whole: an owner among data ranks, and a home among ranks that hold its parts.

Two matrices of 4 and one of 2 units of work on 2 owners with tp = 2, which cuts w0 and w1:

                 home 0 (tp 0)    home 1 (tp 1)
    owner 0      w0: 4            w2: 2           the parts of w0 come from both ranks of owner 0 to tp 0, and go back
    owner 1      w1: 4

The matrices of an owner go in rounds, in which each of its ranks updates a few. Where these ranks share memory, each
has room for a few rounds, which others write and read (`engine/optimizers/matrix_updates.py`):

    while round 3 is updated     masters     | round 3 | round 4 comes | round 2 goes back |
                                 gradients   | round 4 comes | round 3 |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.plan.outlines import Parameter

_ROUNDS = 8
"""Into about so many rounds the matrices of a home go: a few of them are in memory at a time. More rounds save memory
and cost time: 16 cost a tenth of an update of 28 matrices in messages, and save 7 % of a rank's bytes."""

_MASTERS, _GRADIENTS = 3, 2
"""For so many rounds there is shared memory. When the parts of a round are put there, slower ranks may still update the
round before, and read masters of the one before that."""

_LINE_BYTES = 64
"""Where a matrix begins in shared memory: torch's own memory begins so, and some kernels round otherwise elsewhere."""

LEAST_BYTES = 256 << 10
"""Smaller rounds would cost more messages than they save memory."""

_PER_BYTE = 1 / 8
"""A share of all bytes counts so much, where an equal share of all work counts 1. An update waits for the rank that has
most to do, so work counts more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rooms:
    """Where matrices are in the shared memory of their homes."""

    masters: Mapping[str, int]
    """Where each begins, in bytes."""
    gradients: Mapping[str, int]
    num_bytes: int
    """Of the home with most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where one parameter is updated as a whole."""

    owner: int
    rank: int
    """Among the ranks that hold parts of the owner's parameters, or copies."""
    num_bytes: int
    """Of the whole master."""
    work: int
    """Of one update."""


def share_out(
    parameters: Sequence[tuple[Parameter, int]], work: Mapping[str, int], *, num_owners: int, num_homes: int
) -> tuple[dict[str, int], dict[str, Home]]:
    """Owners of parameters that stay whole, and homes of those whose optimizer must see all of them.

    parameters: with the bytes of the whole master. work: of one update, for what needs a home; other updates count as
    nothing. num_homes: how many ranks of an owner share its work. Trainable ones go first, for they carry the state;
    then the largest, each to where its shares of work and of bytes meet the least of both.

    All by global sizes: ranks along tp, which have other parts, come to the same.
    """
    num_work = {each.name: work.get(each.name, 0) if each.trainable and size else 0 for each, size in parameters}
    all_work = sum(num_work.values()) or 1
    all_bytes = sum(num_bytes for _, num_bytes in parameters) or 1

    def largest_first(entry: tuple[Parameter, int]) -> tuple[bool, float]:
        parameter, num_bytes = entry
        return not parameter.trainable, -max(num_work[parameter.name] / all_work, num_bytes / all_bytes)

    # Places in a flat list: the first rank of each owner, then the second of each. Shares of all work, and bytes.
    busy, held = [0.0] * (num_owners * num_homes), [0] * (num_owners * num_homes)
    of_owner = [0] * num_owners
    owner_of: dict[str, int] = {}
    homes: dict[str, Home] = {}
    for parameter, num_bytes in sorted(parameters, key=largest_first):
        work_share, byte_share = num_work[parameter.name] / all_work, num_bytes / all_bytes
        if not work_share:
            owner = of_owner.index(min(of_owner))
            of_owner[owner] += num_bytes * num_homes
            for place in range(owner, len(held), num_owners):
                held[place] += num_bytes
        else:
            # By this the weighted sum of the squares of all shares grows, half and without the new square, which is the
            # same in each place. The least growth keeps work and bytes even.
            growth = [
                work_share * done + byte_share * (there / all_bytes) * _PER_BYTE
                for done, there in zip(busy, held, strict=True)
            ]
            least = min(growth)
            # Of equal places one of the owner that has least: its parts have to be held too.
            equal = [place for place, grown in enumerate(growth) if grown == least]
            place = min(equal, key=lambda place: of_owner[place % num_owners])
            rank, owner = divmod(place, num_owners)
            of_owner[owner] += num_bytes
            busy[place] += work_share
            held[place] += num_bytes
            if num_homes > 1:
                homes[parameter.name] = Home(owner=owner, rank=rank, num_bytes=num_bytes, work=num_work[parameter.name])
        owner_of[parameter.name] = owner
    return owner_of, homes


def rounds_of(homes: Mapping[str, Home], order: Sequence[str], owner: int) -> tuple[tuple[str, ...], ...]:
    """The matrices of an owner in rounds, in which each of its ranks updates a few.

    order: all names, the same on all of these ranks.
    """
    waiting: dict[int, list[str]] = {}
    for name in order:
        if name in homes and homes[name].owner == owner:
            waiting.setdefault(homes[name].rank, []).append(name)
    num_bytes = [sum(homes[name].num_bytes for name in names) for names in waiting.values()]
    most = max(num_bytes, default=0)
    num_rounds = min(-(-most // max(LEAST_BYTES, most // _ROUNDS)), max(map(len, waiting.values()))) if most else 0
    rounds: list[list[str]] = [[] for _ in range(num_rounds)]
    for names in waiting.values():
        # By the middle of each in the work of its home: in every round all homes have about as much to do.
        ends = list(accumulate(homes[name].work for name in names))
        for name, end in zip(names, ends, strict=True):
            rounds[num_rounds * (2 * end - homes[name].work) // (2 * ends[-1])].append(name)
    return tuple(tuple(names) for names in rounds if names)


def rooms_of(homes: Mapping[str, Home], rounds: Sequence[Sequence[str]], num_homes: int) -> Rooms:
    """Where the matrices of an owner are in shared memory: the rounds take turns with it.

    All ranks of the owner come to the same, and find the matrices of the others by it.
    """
    num_bytes = [0] * num_homes

    def starts_of(num_turns: int) -> dict[str, int]:
        starts: dict[str, int] = {}
        for turn in range(num_turns):
            firsts = list(num_bytes)
            for names in rounds[turn::num_turns]:
                ends = list(firsts)
                for name in names:
                    home = homes[name]
                    starts[name] = ends[home.rank]
                    ends[home.rank] += -(-home.num_bytes // _LINE_BYTES) * _LINE_BYTES
                num_bytes[:] = map(max, num_bytes, ends)
        return starts

    return Rooms(masters=starts_of(_MASTERS), gradients=starts_of(_GRADIENTS), num_bytes=max(num_bytes))
