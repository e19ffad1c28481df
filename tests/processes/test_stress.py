"""Ranks killed at instants that nobody chose."""

import os
import random
import signal
import threading
import time

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.errors import PeerError
from tests.oracle.batches import word_batch, word_loss
from tests.oracle.words import words
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport


def train_until_a_rank_dies(channel: Channel, victim: int, delay_seconds: float) -> tuple[str, float]:
    torch.manual_seed(0)
    engine = sw.parallelize(
        words(),
        sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), sharding=sw.Sharding(bucket_bytes=600)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss=word_loss,
        channel=channel,
    )
    if channel.rank == victim:
        threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    batch = word_batch(channel.rank, 4)
    while True:
        began = time.monotonic()
        try:
            engine.step(batch)
        except PeerError as error:
            return str(error), time.monotonic() - began


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
            text, seconds = results[rank]
            assert text.startswith(f"rank {victim} is gone (its process died)")
            assert seconds < 10
