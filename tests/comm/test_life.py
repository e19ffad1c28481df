"""A process that has ended is known to others of its host, also where no channel is kept."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.comm.rendezvous import START_SECONDS, is_gone, own_record


def test_a_living_process_is_there_and_an_ended_one_is_gone_even_before_it_is_waited_for() -> None:
    assert not is_gone(own_record())
    code = "from shardwise.comm.rendezvous import own_record; print(own_record(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        record = child.stdout.readline()
        assert not is_gone(record)
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.read()  # until it closes, at its end
        deadline = time.monotonic() + 30
        while not is_gone(record):
            assert time.monotonic() < deadline
    assert is_gone(record)


def test_what_cannot_be_known_is_not_called_gone() -> None:
    host, space, number, start = json.loads(own_record())
    assert is_gone(json.dumps([host, space, number, f"{start}0"]))  # another process with the number
    for record in (["another", space, number, "0"], [host, "pid:[0]", number, "0"]):
        assert not is_gone(json.dumps(record))
    assert not is_gone("")


PROGRAM = """
import os, sys, time, torch, shardwise as sw
from shardwise.errors import PeerError
sw.save(sys.argv[1], {"w": torch.ones(3)})
if os.environ["RANK"] == "1":
    os._exit(0)
began = time.monotonic()
try:
    sw.save(sys.argv[1], {"w": torch.ones(3)})
except PeerError as error:
    print(error.rank, time.monotonic() - began, error)
"""


@pytest.mark.processes
def test_a_save_beside_a_dead_peer_fails_soon_though_no_channel_was_kept(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # as the agent of torchrun serves it
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    world = {**os.environ, **place, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env={**world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=110)[0] for rank in ranks]
    number, seconds, text = told[0].split(" ", 2)
    assert number == "1"
    assert float(seconds) < START_SECONDS / 3
    assert "rank 1 has ended" in text
