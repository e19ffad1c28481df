"""What this rank knows of all others, and which of them is to blame when nothing moves.

It comes with messages, in the words that ranks say to all (`relay`), and out of exchanges, which all members have made.
"""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shardwise.comm.hosts import RankNames
from shardwise.comm.process.frames import ChannelVerdict, Status
from shardwise.comm.process.messages import Stamp


class KnownRank:
    """One other rank."""

    __slots__ = ("has_ended", "last_call", "last_heard", "said_bye", "status")

    def __init__(self, since: float) -> None:
        """since: when this rank began to listen."""
        self.said_bye = False
        """It has closed its channel."""
        self.has_ended = False
        """It is lost, or has failed: it sends nothing more."""
        self.status: Status | None = None
        """Where it waits, if it has said so since its last message."""
        self.last_call: str | None = None
        self.last_heard = since

    def moved(self, call: str) -> None:
        """It has sent something in this call, so that it does not wait where it said."""
        self.status = None
        self.last_call = call
        self.last_heard = time.monotonic()

    def in_words(self, names: RankNames) -> str:
        """What was last seen of it."""
        if self.status is not None:
            awaited = ", ".join(names[rank] for rank in self.status.awaited)
            return f"it waits for rank {awaited} in {self.status.operation} for {self.status.purpose!r}"
        if self.last_call is None:
            return "it has made no call yet"
        return f"last seen in {self.last_call}, {time.monotonic() - self.last_heard:.0f} s ago"


class KnownRanks:
    """All other ranks."""

    def __init__(self, own_rank: int, names: RankNames, *, timeout_seconds: float) -> None:
        self._own_rank = own_rank
        self._names = names
        self._since = time.monotonic()
        self._timeout_seconds = timeout_seconds
        self._ranks: dict[int, KnownRank] = {}
        self._met: dict[int, tuple[Sequence[int], Stamp, float]] = {}
        """By lane the members, their last exchange, and when it was over: they have all made it."""

    def __getitem__(self, rank: int) -> KnownRank:
        found = self._ranks.get(rank)
        if found is None:
            found = self._ranks[rank] = KnownRank(self._since)
        return found

    def met(self, lane: int, members: Sequence[int], stamp: Stamp) -> None:
        """An exchange is over: all of its members have made it, also those from which nothing came straight here."""
        self._met[lane] = members, stamp, time.monotonic()

    def likeliest(self, awaited: Sequence[int]) -> int:
        """Of these ranks the one that is the likeliest cause: who waits as well is none."""
        self._recall_exchanges()
        candidates = [rank for rank in awaited if self[rank].status is None] or awaited
        return min(candidates, key=lambda rank: self[rank].last_heard)

    def stuck(self, awaited: int, problems: Mapping[int, str] = MappingProxyType({})) -> ChannelVerdict:
        """The verdict on the rank at the end of the chain of waiting ranks that begins with `awaited`.

        problems: by rank, why there is no connection to it.
        Each rank that waits for a while says so to all (STATUS). With these, rank 0 of 4 follows the chain::

            0 --waits for--> 1 --waits for--> 2 --waits for--> 3, which has said nothing: rank 3 made no progress

        That rank 1 did not answer is true, but rank 3 is where to look for the cause.
        """
        self._recall_exchanges()
        names = self._names
        culprit = awaited
        chain = []
        passed = {self._own_rank}  # where ranks wait in a circle the walk ends before it comes round
        while (status := self[culprit].status) is not None:
            passed.add(culprit)
            following = [rank for rank in status.awaited if rank not in passed]
            if not following:
                break
            # Of several, one that does not wait itself: the walk ends there.
            following.sort(key=lambda rank: self[rank].status is not None)
            waits = f"rank {names[culprit]} waits for rank {names[following[0]]}"
            chain.append(f"{waits} in {status.operation} for {status.purpose!r}")
            culprit = following[0]
        unreached = [f"no connection to it: {problems[culprit]}"] if culprit in problems else []
        seen = "; ".join([self[culprit].in_words(names), *unreached, *chain])
        fact = f"rank {names[culprit]} made no progress for {self._timeout_seconds:g} s ({seen})"
        return ChannelVerdict(fact=fact, culprit=culprit, hangs=True)

    def _recall_exchanges(self) -> None:
        """Note what exchanges have shown of ranks, before one of them is blamed."""
        for members, stamp, when in self._met.values():
            for member in members:
                known = self[member]
                if member != self._own_rank and known.last_heard < when:
                    known.last_heard, known.last_call, known.status = when, stamp.text, None
