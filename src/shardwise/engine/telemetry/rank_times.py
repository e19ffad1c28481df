"""What each rank did with its time up to the exchange that closes a step; how that travels, and who is slow.

    step n - 1       |                      step n                                  | step n + 1
    closed update,   | outside: data,  open  forward, backward, reduce       closed | update, publish ...
           publish   | evaluation                                                   |
    <------------------- what the message that closes step n has ------------------>

One message has it, which the ranks exchange anyway. So the update of a step counts in the next one. Two parts:

    amounts    sent, received, late                                          18 bytes, which many ranks have alike
    seconds    compute, waiting, outside, peak, (rank, seconds for it) ..    20 bytes, and 8 for each of up to 4 ranks

Seconds travel in float32, because each rank has its own, and 4,096 ranks take all of them in every step.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.comm.agreement import understood
from shardwise.comm.rank_values import RankValues
from shardwise.plan.timeline import slow_ranks

_AMOUNTS = struct.Struct("<QQH")
_SECONDS = struct.Struct("<fffQ")
_PAIR = struct.Struct("<if")
_NOBODY = -1
_MOST_NAMED = 4
"""Ranks that a message names as waited for: those for which it was longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """What one rank did from the close of one step to that of the next, in seconds and bytes.

    Where a device computes, the seconds are those of its stream, of an earlier step (`late_steps`).
    """

    rank: int
    compute_s: float
    """In `engine.step`, waits left out. On a device also the time in which it had nothing to do."""
    waiting_s: float
    """In `engine.step`, until other ranks gave what this one needed."""
    waited_for: Mapping[int, float]
    """Of it, by the rank that came last, the longest first and four at most. Waits of a device in a collective of three
    and more ranks are for none of them."""
    outside_s: float
    """Between two steps: data, evaluations, saves, and what else the loop does."""
    sent_bytes: int
    """Of exchanges and tensors, as any implementation has to send them at least. Memory that ranks of one host read in
    place is not sent."""
    received_bytes: int
    peak_bytes: int
    """Most memory so far: of the device's allocator, on the CPU of the whole process. Looked up once per second."""
    late_steps: int
    """How many steps ago this was; 0 on the CPU."""

    @property
    def busy_s(self) -> float:
        """All time in which the rank did not wait for others."""
        return self.compute_s + self.outside_s

    def packed(self, *, num_ranks: int, late_steps: int = 0) -> list[bytes]:
        """As it travels: without the rank, which the order of the messages tells. num_ranks: of the world."""
        # As long on all ranks, however many they have waited for: values of one length travel in one piece.
        num_named = min(_MOST_NAMED, num_ranks - 1)
        named = [*self.waited_for.items(), *[(_NOBODY, 0.0)] * num_named][:num_named]
        amounts = _AMOUNTS.pack(self.sent_bytes, self.received_bytes, min(late_steps, 0xFFFF))
        seconds = _SECONDS.pack(self.compute_s, self.waiting_s, self.outside_s, self.peak_bytes)
        return [amounts, seconds + b"".join(_PAIR.pack(*each) for each in named)]


def rank_times(parts: Sequence[RankValues]) -> tuple[RankTimes, ...]:
    """Of all ranks, from what each has packed; empty where nothing is known yet."""
    of_amounts, of_seconds = parts
    if not (all(value for value, _ in of_amounts.runs) and all(value for value, _ in of_seconds.runs)):
        return ()
    amounts = understood(of_amounts, _AMOUNTS.unpack, purpose="losses and norms")
    times = understood(of_seconds, _seconds_in, purpose="losses and norms")
    return tuple(
        replace(each, rank=rank, sent_bytes=sent, received_bytes=received, late_steps=late)
        for rank, (each, (sent, received, late)) in enumerate(zip(times, amounts, strict=True))
    )


def _seconds_in(packed: bytes) -> RankTimes:
    compute_s, waiting_s, outside_s, peak = _SECONDS.unpack_from(packed)
    return RankTimes(
        rank=0,
        compute_s=compute_s,
        waiting_s=waiting_s,
        waited_for={rank: s for rank, s in _PAIR.iter_unpack(packed[_SECONDS.size :]) if rank != _NOBODY},
        outside_s=outside_s,
        sent_bytes=0,
        received_bytes=0,
        peak_bytes=peak,
        late_steps=0,
    )


def slowest(ranks: Sequence[RankTimes]) -> tuple[int, ...]:
    """The slow ones among them, by what they were busy; see `slow_ranks`."""
    return slow_ranks({each.rank: each.busy_s for each in ranks})
