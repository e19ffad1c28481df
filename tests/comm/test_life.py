"""A process that has ended is known to others of its host, also where no channel is kept."""

import contextlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.comm.processes import ProcessChannel, _drop_in_children
from shardwise.comm.rendezvous import START_SECONDS, is_gone, own_record
from shardwise.errors import PeerError
from tests.comm.boards import boards
from tests.forks.programs import started


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
    deadline = time.monotonic() + 30
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


def test_a_forked_child_that_calls_its_parents_channel_hears_whose_it_is() -> None:
    ours, theirs = boards(2)
    _drop_in_children(ours)
    channel, peer = (ProcessChannel(board, (0, 1), owns_board=True) for board in (ours, theirs))
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            channel.exchange(b"", purpose="in a worker")
        except PeerError as error:
            os.write(tell, str(error).encode())
        os._exit(0)
    os.close(tell)
    said = os.read(told, 1000).decode()
    os.close(told)
    os.waitpid(child, 0)
    assert said.startswith("this process was forked from rank 0, which alone can use its channel")
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(peer.exchange, b"1", purpose="goes on")
        assert channel.exchange(b"0", purpose="goes on") == waiting.result(20) == [b"0", b"1"]
    channel.close()
    peer.close()


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
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(["-c", PROGRAM, str(tmp_path)], environment={**place, "WORLD_SIZE": "2", "RANK": str(rank)})
            )
            for rank in range(2)
        ]
        told, _ = ranks[0].communicate(timeout=110)
    number, seconds, text = told.split(" ", 2)
    assert number == "1"
    assert float(seconds) < START_SECONDS / 3
    assert "rank 1 has ended" in text
