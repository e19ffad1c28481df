"""Who updates what an optimizer must see whole: an owner among data ranks, and a home among ranks that hold its parts.

Two matrices of 4 and one of 2 units of work on 2 owners with tp = 2, which cuts w0 and w1:

                 home 0 (tp 0)    home 1 (tp 1)
    owner 0      w0: 4            w2: 2           the parts of w0 come from both ranks of owner 0 to tp 0, and go back
    owner 1      w1: 4

The ranks of an owner take turns in rounds. While one round is updated, the next one comes and the last one goes back:

    round   0    | gather | update | give back |
            1             | gather | update    | give back |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.plan.outlines import Parameter

_ROUNDS = 16
"""Into about so many rounds the matrices of a home go: two or three of them are in memory at a time."""

_LEAST_BYTES = 256 << 10
"""Smaller rounds would cost more messages than they save memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where one parameter is updated as a whole."""

    owner: int
    rank: int
    """Among the ranks that hold parts of the owner's parameters, or copies."""
    num_bytes: int
    """Of the whole master."""


def share_out(
    parameters: Sequence[tuple[Parameter, int]], work: Mapping[str, int], *, num_owners: int, num_homes: int
) -> tuple[dict[str, int], dict[str, Home]]:
    """Owners of parameters that stay whole, and homes of those whose optimizer must see all of them.

    parameters: with the bytes of the whole master. work: of one update, for what needs a home; other updates count as
    nothing. num_homes: how many ranks of an owner share its work. Trainable ones go first, for they carry the state;
    then the largest, each to where its shares of work and of bytes meet the least of both.

    By global sizes, so that ranks along tp, which have other parts, come to the same.
    """
    num_work = {each.name: work.get(each.name, 0) if each.trainable and size else 0 for each, size in parameters}
    # Shares of all work and of all bytes: whole numbers over one denominator, so that all ranks find the same.
    all_work = sum(num_work.values()) or 1
    all_bytes = sum(num_bytes for _, num_bytes in parameters) or 1
    busy = [[0] * num_homes for _ in range(num_owners)]
    held = [[0] * num_homes for _ in range(num_owners)]
    owner_of: dict[str, int] = {}
    homes: dict[str, Home] = {}

    def largest_first(entry: tuple[Parameter, int]) -> tuple[bool, int]:
        parameter, num_bytes = entry
        return not parameter.trainable, -max(num_work[parameter.name] * all_bytes, num_bytes * all_work)

    for parameter, num_bytes in sorted(parameters, key=largest_first):
        cost = num_work[parameter.name]

        # What the sum of squares of all shares grows by, but for the own square: the least of these evens out both.
        def growth(owner: int, ranks: Sequence[int], cost: int = cost, num_bytes: int = num_bytes) -> int:
            added_work = cost * sum(busy[owner][rank] for rank in ranks) * all_bytes**2
            return added_work + num_bytes * sum(held[owner][rank] for rank in ranks) * all_work**2

        every = range(num_homes)
        if not cost:
            owner = min(range(num_owners), key=lambda owner: growth(owner, every))
            held[owner] = [before + num_bytes for before in held[owner]]
        else:
            # Of equal places one of the owner that has least: its parts have to be held too.
            owner, rank = min(
                ((owner, rank) for rank in every for owner in range(num_owners)),
                key=lambda place: (growth(place[0], [place[1]]), growth(place[0], every)),
            )
            busy[owner][rank] += cost
            held[owner][rank] += num_bytes
            if num_homes > 1:
                homes[parameter.name] = Home(owner=owner, rank=rank, num_bytes=num_bytes)
        owner_of[parameter.name] = owner
    return owner_of, homes


def rounds_of(homes: Mapping[str, Home], order: Sequence[str], owner: int) -> tuple[tuple[str, ...], ...]:
    """The matrices of an owner in rounds, in which each of its ranks updates a few of its own.

    order: all names, the same on all of these ranks.
    """
    waiting: dict[int, list[str]] = {}
    for name in order:
        if name in homes and homes[name].owner == owner:
            waiting.setdefault(homes[name].rank, []).append(name)
    most = max((sum(homes[name].num_bytes for name in names) for names in waiting.values()), default=0)
    limit = max(_LEAST_BYTES, most // _ROUNDS)
    rounds: list[tuple[str, ...]] = []
    while any(waiting.values()):
        taken: list[str] = []
        for names in waiting.values():
            num_bytes = 0
            while names and (not num_bytes or num_bytes + homes[names[0]].num_bytes <= limit):
                num_bytes += homes[names[0]].num_bytes
                taken.append(names.pop(0))
        rounds.append(tuple(taken))
    return tuple(rounds)
