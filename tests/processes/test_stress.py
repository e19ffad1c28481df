"""Ranks killed at instants that nobody chose."""

import os
import random
import signal
import threading

import pytest

from shardwise.comm import Channel
from shardwise.errors import PeerError
from tests.oracle.program import plan_of
from tests.oracle.programs import PROGRAMS
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport


def train_until_a_rank_dies(channel: Channel, victim: int, delay_seconds: float) -> str:
    program = PROGRAMS["words"]
    engine = program.engine(plan_of(program, f"dp_shard={channel.size}", bucket_bytes=600), channel)
    if channel.rank == victim:
        threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        try:
            engine.step(program.batches[0])
        except PeerError as error:
            return str(error)


@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", [SHARED_MEMORY, TCP], ids=["shared", "tcp"])
def test_a_rank_killed_at_any_instant_is_named_to_every_survivor(pool: Pool, transport: Transport) -> None:
    instants = random.Random(0)
    for _ in range(40):
        victim = instants.randrange(3)
        delay_seconds = instants.uniform(0.0, 0.3)
        results = pool.run(
            3, train_until_a_rank_dies, victim, delay_seconds, transport=transport, lost=[victim], patience_seconds=60
        )
        for rank in {0, 1, 2} - {victim}:
            assert results[rank].startswith(f"rank {victim} is gone (its process died)")
