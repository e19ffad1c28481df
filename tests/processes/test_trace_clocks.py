"""Clocks of real processes that go wrong by a known time: what a trace takes for their offset."""

import time

from shardwise.comm import Channel
from shardwise.train.run_trace import Rounds, clock_offset, clock_rounds
from tests.processes.pool import Pool

AHEAD_S = (0.0, 1234.5, -987.25)


def compared(channel: Channel) -> Rounds:
    return clock_rounds(channel, lambda: time.perf_counter() + AHEAD_S[channel.rank])


def test_offsets_are_found_as_well_as_the_quickest_exchange_allows(pool: Pool) -> None:
    rounds = pool.run(3, compared)
    for mine, ahead_s in zip(rounds, AHEAD_S, strict=True):
        # Each exchange bounds the offset from both sides, however slow the machine is.
        pairs = zip(mine, rounds[0], strict=True)
        widest_s = min(left - entered + after - before for (entered, left), (before, after) in pairs)
        assert abs(clock_offset(mine, rounds[0]) - ahead_s) <= widest_s / 2 + 1e-6
