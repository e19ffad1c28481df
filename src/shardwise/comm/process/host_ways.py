"""Which way large parts of an all-gather take between hosts: to one rank of each other host, which passes them on.

Each part crosses once to a host, and not once to each rank there. Ranks of one host share out what they take. Host A
has ranks 0 and 1, host B has 2 and 3. The parts of A::

    part of rank 0    0 --> 2    then 2 --> 3 in the memory that they share
    part of rank 1    1 --> 3    then 3 --> 2
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HostWays:
    """The ways as one rank sees them; ranks are those of the world."""

    takers: Sequence[int]
    """Who gets this rank's part straight from it."""
    givers: Mapping[int, int]
    """By rank, from whom this one gets its part."""
    passed_on: Sequence[int]
    """Whose parts this rank passes on to the others of its host."""
    near: Sequence[int]
    """The others of its host."""


def host_ways(rank: int, members: Sequence[int], kernels: Sequence[int]) -> HostWays:
    """The ways of `rank` among members. kernels: by rank of the world, equal for those that share memory."""
    of_host: dict[int, list[int]] = {}
    for member in members:
        of_host.setdefault(kernels[member], []).append(member)

    def giver(of: int, to: int) -> int:
        there = of_host[kernels[to]]
        first = there[of_host[kernels[of]].index(of) % len(there)]
        return of if kernels[of] == kernels[to] or first == to else first

    others = [member for member in members if member != rank]
    near = [member for member in others if kernels[member] == kernels[rank]]
    givers = {member: giver(member, rank) for member in others}
    return HostWays(
        takers=[member for member in others if giver(rank, member) == rank],
        givers=givers,
        passed_on=[each for each in others if near and givers[each] == each and each not in near],
        near=near,
    )
