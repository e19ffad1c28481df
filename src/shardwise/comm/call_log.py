"""The calls that one rank has made on one channel, as a rolling digest, and the last of them.

Between devices the backend moves tensors, and does not compare what ranks call. To compare each call would cost
messages to all ranks. So a signature is compared once, and later calls only go into a digest. Every exchange between
hosts sums up one number of each rank, which is 0 where the digests of all are the same::

    rank 0    h(0, its digest) - h(1, its digest)      h is a hash; all modulo 2**64
    rank 1    h(1, its digest) - h(2, its digest)
    rank 2    h(2, its digest) - h(0, its digest)      equal digests: each h is there once with each sign

A sum that is not 0 makes the ranks look for the first call that differs (`first_difference`). Ranks that wait for
long, and those that make a call for the first time, say their last calls (`FrameKind.CALLS`). Calls of one number are
compared, so that a rank that is behind differs from no other.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from shardwise.comm.process.messages import Stamp

KEPT_CALLS = 1 << 12
"""More than a step makes: a rank that leaves out a whole pass is behind by as many."""

_MOST_AHEAD = 1 << 12
"""Numbers of calls that others have made and this rank has not; later ones are not remembered."""

_SAID_CALLS = 8
"""Of the last ones, in a frame: ranks that differ stop soon after."""


class LoggedCall(NamedTuple):
    """One call, as others hear of it."""

    number: int
    digest: int
    """Of this call and all before it."""
    text: str


class CallLog:
    """The calls of this rank on the channel of `members`, world ranks."""

    def __init__(self, lane: int, members: tuple[int, ...], rank: int) -> None:
        self.lane = lane
        self.members = members
        self.has_transfers = False
        """Whether transfers are in it that are compared nowhere else; exchanges alone need no digest."""
        self._place = members.index(rank)
        self._num_calls = 0
        self._digest = 0
        self._last: deque[LoggedCall] = deque(maxlen=KEPT_CALLS)
        self._ahead: dict[int, dict[int, LoggedCall]] = {}
        """By number, then by rank, the calls of other ranks that this one has heard of and not made."""

    def add(self, stamp: Stamp) -> dict[int, str] | None:
        """Note a call; the texts by rank where another rank has said that it made another call of this number."""
        self._num_calls += 1
        content = self._digest.to_bytes(8, "little") + stamp.digest.to_bytes(8, "little")
        self._digest = xxhash.xxh3_64_intdigest(content, seed=self.lane & 0xFFFFFFFF)
        made = LoggedCall(self._num_calls, self._digest, stamp.text)
        self._last.append(made)
        if self._ahead:
            for rank, call in self._ahead.pop(self._num_calls, {}).items():
                if call.digest != self._digest:
                    return _texts(self.members[self._place], made, rank, call)
        return None

    @property
    def share(self) -> int:
        """This rank's number; those of all members sum up to 0 where they have made the same calls."""
        following = (self._place + 1) % len(self.members)
        return self._hash(self._place) - self._hash(following)

    def _hash(self, place: int) -> int:
        content = self._digest.to_bytes(8, "little") + place.to_bytes(8, "little")
        return xxhash.xxh3_64_intdigest(content, seed=self.lane & 0xFFFFFFFF)

    def hear(self, rank: int, calls: Sequence[LoggedCall]) -> dict[int, str] | None:
        """Compare with the last calls of another rank; the texts by rank of the first that differ.

        Raises ValueError where that is no member.
        """
        if rank not in self.members:
            raise ValueError("calls on a channel that the rank is no member of")
        for call in calls:
            if self._num_calls < call.number <= self._num_calls + _MOST_AHEAD:
                self._ahead.setdefault(call.number, {})[rank] = call
            elif (mine := self.at(call.number)) is not None and mine.digest != call.digest:
                is_first = call.number == 1 or call is not calls[0]
                return _texts(self.members[self._place], mine, rank, call, is_first=is_first)
        return None

    def at(self, number: int) -> LoggedCall | None:
        """The call of this number, if it is known still."""
        index = number - self._num_calls + len(self._last) - 1
        return self._last[index] if 0 <= index < len(self._last) else None

    def last(self) -> list[LoggedCall]:
        """Some of the last calls, the oldest first."""
        numbers = range(max(1, self._num_calls - _SAID_CALLS + 1), self._num_calls + 1)
        return [call for number in numbers if (call := self.at(number)) is not None]

    def ends(self) -> list[LoggedCall]:
        """The oldest call that is known still, and the last one."""
        return [self._last[0], self._last[-1]] if self._last else []


def _texts(
    one_rank: int, one: LoggedCall, other_rank: int, other: LoggedCall, *, is_first: bool = True
) -> dict[int, str]:
    """is_first: whether all calls before are known to be alike."""
    addition = "" if is_first else ", if no earlier call differs"
    # The digest covers all earlier calls. The log may have dropped the first one that differs.
    if one.text == other.text:
        addition = ", after an earlier call that differs"
    return {one_rank: one.text + addition, other_rank: other.text + addition}


def packed_calls(calls: Mapping[int, Sequence[LoggedCall]]) -> bytes:
    """Calls by lane."""
    return json.dumps(list(calls.items())).encode()


def parsed_calls(payload: bytes) -> dict[int, list[LoggedCall]]:
    """What `packed_calls` has made. Raises ValueError or TypeError for anything else."""
    return {
        int(lane): [LoggedCall(int(number), int(digest), str(text)) for number, digest, text in calls]
        for lane, calls in json.loads(payload)
    }


Calls = Mapping[int, Sequence[LoggedCall]]


def first_difference(
    logs: Sequence[CallLog], exchange: Callable[[Calls], Mapping[int, Calls]], *, even: int
) -> dict[int, str] | None:
    """The first calls that differ between two ranks, as texts by rank; None where those that can be compared are alike.

    A digest holds all calls before. So it is found by halving, in a few exchanges, the same on all ranks. exchange:
    gives the calls of each world rank, by lane. even: the lane on which all have to be equally far.
    """
    own = {log.lane: log for log in logs}

    def made(numbers: Mapping[int, int]) -> Mapping[int, dict[int, LoggedCall]]:
        """By lane and rank the calls of these numbers."""
        mine = {lane: [call] for lane, number in numbers.items() if lane in own and (call := own[lane].at(number))}
        said = exchange(mine)
        return {lane: {rank: calls[lane][0] for rank, calls in said.items() if calls.get(lane)} for lane in numbers}

    ends = exchange({lane: log.ends() for lane, log in own.items()})
    low, high, uneven = {}, {}, None
    for lane in sorted({lane for calls in ends.values() for lane in calls if calls[lane]}):
        spans = {rank: calls[lane] for rank, calls in ends.items() if calls.get(lane)}
        oldest = max(calls[0].number for calls in spans.values())
        newest = min(calls[-1].number for calls in spans.values())
        if oldest <= newest:
            low[lane], high[lane] = max(oldest - 1, newest - KEPT_CALLS), newest
        elif lane == even:
            uneven = _first_pair({rank: calls[-1] for rank, calls in spans.items()})
    forgotten = dict(low)
    calls = made(high)
    high = {lane: number for lane, number in high.items() if _first_pair(calls[lane]) is not None}
    while middle := {lane: (low[lane] + number) // 2 for lane, number in high.items() if number - low[lane] > 1}:
        calls = made(middle)
        for lane, number in middle.items():
            (low if _first_pair(calls[lane]) is None else high)[lane] = number
    if not high:
        return None if uneven is None else _texts(*uneven)
    calls = made(high)
    # Numbers of different lanes have no common order. All ranks have to choose the same one.
    lane = min(high, key=lambda each: (high[each], each))
    pair = _first_pair(calls[lane])
    return None if pair is None else _texts(*pair, is_first=not forgotten[lane] or high[lane] > forgotten[lane] + 1)


def _first_pair(calls: Mapping[int, LoggedCall]) -> tuple[int, LoggedCall, int, LoggedCall] | None:
    """The first rank, and the first one that differs from it, with their calls."""
    first = min(calls, default=0)
    differing = (rank for rank in sorted(calls) if calls[rank].digest != calls[first].digest)
    return next(((first, calls[first], rank, calls[rank]) for rank in differing), None)
