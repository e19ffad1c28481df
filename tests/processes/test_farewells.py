"""A program that ends without `close`: its peers are told why, however it ended."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection

import pytest

from tests.forks.calls import Call
from tests.forks.programs import started

PROGRAM = """
import os, sys
import shardwise as sw


def main():
    channel = sw.processes(timeout_seconds=30, shared_memory=sys.argv[1] == "shared")
    channel.exchange(b"", purpose="start")
    if channel.rank == 1:
        exec(sys.argv[2])
        return
    try:
        channel.exchange(b"", purpose="gradients")
    except sw.errors.PeerError as error:
        print(error, end="")


main()
"""


def said(transport: str, deed: str) -> str:
    """What rank 0 is told of the end of rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(["-c", PROGRAM, transport, deed], environment={**world, "RANK": str(rank)}),
            )
            for rank in range(2)
        ]
        told = ranks[0].communicate(timeout=60)[0]
        with contextlib.suppress(ProcessLookupError):
            ranks[1].send_signal(signal.SIGKILL)  # where a thread of it still runs
        ranks[1].communicate(timeout=60)
    return told


WITHOUT_CLOSING = "rank 1 has ended its program (its last line, or sys.exit) without closing its channel, while rank 0"


@pytest.mark.parametrize(
    ("transport", "deed", "words"),
    [
        ("tcp", "sys.exit(0)", WITHOUT_CLOSING),
        ("shared", "return_ = 'as one that has fewer batches'", WITHOUT_CLOSING),
        ("tcp", "raise KeyError('no such sample')", "rank 1 stopped: KeyError: 'no such sample', while rank 0"),
    ],
)
def test_peers_are_told_how_a_program_ended(transport: str, deed: str, words: str) -> None:
    assert said(transport, deed) == f"{words} was in exchange for 'gradients'"


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("raise KeyError('x')", "rank 1 stopped: KeyError: 'x', while rank 0"),
        ("sys.exit(3)", WITHOUT_CLOSING),
    ],
)
def test_the_end_is_told_at_once_though_a_thread_of_the_program_still_runs(deed: str, words: str) -> None:
    begun = time.monotonic()
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(25,)).start()"
    assert said("tcp", f"{thread}; {deed}") == f"{words} was in exchange for 'gradients'"
    assert time.monotonic() - begun < 20


def work(rank: int, port: int, deed: str, answers: "multiprocessing.Queue[str]") -> None:
    import shardwise as sw

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    channel = sw.processes(timeout_seconds=30)
    channel.exchange(b"", purpose="start")
    if rank == 1:
        if deed == "exit":
            sys.exit(3)
        raise ValueError("a worker of multiprocessing")
    try:
        channel.exchange(b"", purpose="gradients")
    except sw.errors.PeerError as error:
        answers.put(str(error))


def of_two(end: Connection, port: int, deed: str) -> None:
    """A program that starts two workers, and says what rank 0 was told."""
    start = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = start.Queue()
    workers = [start.Process(target=work, args=(rank, port, deed, answers)) for rank in range(2)]
    for worker in workers:
        worker.start()
    end.send(answers.get(timeout=60))
    for worker in workers:
        worker.join(60)


@pytest.mark.parametrize(
    ("deed", "words"), [("exit", "SystemExit: 3"), ("raise", "ValueError: a worker of multiprocessing")]
)
def test_workers_of_multiprocessing_tell_it_too(deed: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Call(of_two, port, deed)
    try:
        assert program.connection.poll(60)
        said = program.connection.recv()
    finally:
        program.end(patience_seconds=60)
    assert said == f"rank 1 stopped: {words}, while rank 0 was in exchange for 'gradients'"
