"""Processes killed while they save: the newest committed save is whole, and nothing else is ever loaded."""

import os
import random
import signal
import threading
from pathlib import Path

import pytest

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver
from shardwise.comm import Channel
from shardwise.errors import PeerError
from tests.checkpoint.small_states import loaded, rubbish, same, share_of_state, whole_state
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, RankError


def save_until_killed(
    channel: Channel, path: str, first: int, num_before: int, delay_seconds: float, victims: list[int], how: str
) -> str:
    """Saves of the states `first`, `first + 1`, ...; every one that was committed is noted beside the folder.

    The victims are killed `delay_seconds` after the first `num_before` of them.
    """
    saver = AsyncSaver(path, channel=channel, timeout_seconds=30)
    seed = first
    try:
        while True:
            if channel.rank in victims and seed == first + num_before:
                threading.Timer(delay_seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            state = share_of_state(whole_state(seed), channel.rank, channel.size)
            extra = {"state": seed}
            layout = ("pieces", "whole")[seed % 2]
            if how == "async":
                saver.save(state, extra=extra)
                saver.wait()
            else:
                sw.save(path, state, extra=extra, layout=layout, channel=channel)  # type: ignore[arg-type]
            Path(f"{path}.{channel.rank}.{seed}").touch()
            if channel.rank == 0:
                checkpoint.prune(path, keep=2)
            seed += 1
    except PeerError as error:
        return str(error)


def check(path: Path, known: int) -> int:
    """The newest save is whole, and no older than what a rank knew to be committed; its state."""
    known = max([known, *(int(each.suffix[1:]) for each in path.parent.glob(f"{path.name}.*"))])
    if not list(path.glob("save-*/manifest.json")):
        assert known == 0
        return 0
    found, extra = loaded(path)
    seed = extra["state"]
    assert isinstance(seed, int)
    assert seed >= known
    assert same(found, whole_state(seed))
    assert checkpoint.verify(path).good
    return seed


def kill_again_and_again(pool: Pool, path: Path, num_kills: int, *, seed: int) -> None:
    """Processes of one rank or two, in which one is killed or both, at any instant of saving."""
    instants = random.Random(seed)
    newest = 0
    for kill in range(num_kills):
        size = 1 + kill % 2
        victims = instants.choice([[0], [1], [0, 1]]) if size == 2 else [0]
        num_before, delay_seconds = instants.randrange(4), instants.uniform(0.0, 0.2)
        transport, how = instants.choice([SHARED_MEMORY, TCP]), instants.choice(["sync", "async"])
        arguments = (str(path), newest + 1, num_before, delay_seconds, victims, how)
        if len(victims) == size:
            with pytest.raises(RankError, match=r"rank \d died"):
                pool.run(size, save_until_killed, *arguments, transport=transport)
        else:
            results = pool.run(size, save_until_killed, *arguments, transport=transport, lost=victims)
            assert results[1 - victims[0]].startswith(f"rank {victims[0]} is gone (its process died)")
        newest = check(path, newest + num_before)
    checkpoint.save(path, whole_state(0))
    assert same(loaded(path)[0], whole_state(0))
    assert rubbish(path) == []
    assert newest >= num_kills


def test_processes_killed_while_they_save_leave_a_whole_newest_save(pool: Pool, tmp_path: Path) -> None:
    kill_again_and_again(pool, tmp_path / "saves", 8, seed=0)


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_processes_killed_two_hundred_times_leave_a_whole_newest_save(pool: Pool, tmp_path: Path) -> None:
    kill_again_and_again(pool, tmp_path / "saves", 200, seed=1)
