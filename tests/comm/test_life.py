"""A process that has ended is known to others of its host, also where no channel is kept."""

import json
import os
import time
from pathlib import Path

import pytest

from shardwise.comm.process.rendezvous import is_gone, own_record
from tests.processes.as_started import PATIENCE_SECONDS, ranks_of


def test_a_living_process_is_there_and_an_ended_one_is_gone_even_before_it_is_waited_for() -> None:
    assert not is_gone(own_record())
    (told, tell), (asked, ask) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, own_record().encode())
        os.read(asked, 1)
        os._exit(0)
    record = os.read(told, 1000).decode()
    assert record != own_record()
    assert not is_gone(record)
    os.write(ask, b".")
    deadline = time.monotonic() + 60
    while not is_gone(record):
        assert time.monotonic() < deadline
    os.waitpid(child, 0)
    assert is_gone(record)
    for descriptor in (told, tell, asked, ask):
        os.close(descriptor)


def test_what_cannot_be_known_is_not_called_gone() -> None:
    host, space, number, start = json.loads(own_record())
    assert is_gone(json.dumps([host, space, number, f"{start}0"]))  # another process with the number
    for record in (["another", space, number, "0"], [host, "pid:[0]", number, "0"]):
        assert not is_gone(json.dumps(record))
    assert not is_gone("")


PROGRAM = """
import os, sys, torch, shardwise as sw
from shardwise.errors import PeerError
sw.save(sys.argv[1], {"w": torch.ones(3)})
if os.environ["RANK"] == "1":
    os._exit(0)
try:
    sw.save(sys.argv[1], {"w": torch.ones(3)})
except PeerError as error:
    print(error.rank, error)
"""


@pytest.mark.processes
def test_a_save_beside_a_dead_peer_is_told_though_no_channel_was_kept(tmp_path: Path) -> None:
    program = ["-c", PROGRAM, str(tmp_path)]
    with ranks_of([program] * 2) as ranks:
        told, _ = ranks[0].communicate(timeout=PATIENCE_SECONDS)
    assert told.startswith("1 rank 1 has ended")  # not: it did not appear within a minute
