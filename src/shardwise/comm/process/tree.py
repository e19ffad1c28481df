"""The tree along which ranks exchange: within each host first, then between the first ranks of the hosts.

A rank talks to at most five others, whatever the number of ranks, and few messages cross between hosts. The 7 members
of a channel on 3 hosts (a: 0 1 2 3, b: 4, c: 5 6)::

                     0
          +------+---+---+------+          within a host: 0-1, 1-2, 0-3 and 5-6
          1      3       4      5          between hosts: 0-4 and 0-5
          |                     |
          2                     6          order of the tree: 0 1 2 3 | 4 | 5 6

Below each rank is a run of the order. So the values of its part of the tree are joined by putting the parts of its
children behind its own, and only a reader of all values brings them into the order of the channel.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank is in the tree of a channel. All are world ranks."""

    parent: int | None
    children: tuple[int, ...]
    """In the order of the tree."""
    positions: tuple[int, ...] | None
    """Per rank of the channel its position in the order of the tree; None where the two orders are one."""

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that this one talks to."""
        return self.children if self.parent is None else (self.parent, *self.children)


def place_in_tree(rank: int, members: Sequence[int], hosts: Sequence[int]) -> Place:
    """The place of a member. hosts: a number per world rank, equal for those that share memory."""
    by_host = _by_host(members, hosts)
    here = by_host[hosts[rank]]
    parent, children = _halved(here, here.index(rank))
    if parent is None:  # the first of its host
        firsts = [ranks[0] for ranks in by_host.values()]
        parent, further = _halved(firsts, firsts.index(rank))
        children += further
    order = [member for ranks in by_host.values() for member in ranks]
    positions = None
    if order != list(members):
        position = {member: at for at, member in enumerate(order)}
        positions = tuple(position[member] for member in members)
    return Place(parent=parent, children=tuple(children), positions=positions)


def relay_neighbours(rank: int, hosts: Sequence[int]) -> list[int]:
    """The world ranks to which a rank passes on what all have to hear: those of the tree, and those of a ring.

    The ring is the order of the tree, in which the ranks of a host are one run. Without any one rank, or without all
    ranks of one host, the others are still connected: they are a line. Each rank has at most seven neighbours.
    """
    ranks = range(len(hosts))
    order = [each for ranks_of_host in _by_host(ranks, hosts).values() for each in ranks_of_host]
    at = order.index(rank)
    beside = {order[at - 1], order[(at + 1) % len(order)]}
    return sorted({*place_in_tree(rank, ranks, hosts).neighbours, *beside} - {rank})


def _by_host(members: Sequence[int], hosts: Sequence[int]) -> dict[int, list[int]]:
    by_host: dict[int, list[int]] = {}
    for member in members:
        by_host.setdefault(hosts[member], []).append(member)
    return by_host


def _halved(ranks: Sequence[int], index: int) -> tuple[int | None, list[int]]:
    """The parent and the children of ranks[index] where the first is the root and the rest is halved, and so on."""
    low, high = 0, len(ranks)
    parent = None
    while True:
        middle = (low + 1 + high + 1) // 2 if high - low > 2 else high
        starts = [start for start, stop in ((low + 1, middle), (middle, high)) if start < stop]
        if index == low:
            return parent, [ranks[start] for start in starts]
        parent = ranks[low]
        low, high = (middle, high) if index >= middle else (low + 1, middle)
