"""A program that ends without `close`: its peers are told why, however it ended."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection

import pytest

from tests.forks.calls import Call
from tests.processes.as_started import PATIENCE_SECONDS, ranks_of, world

PROGRAM = """
import sys, threading
import shardwise as sw


def main():
    channel = sw.processes(timeout_seconds=60, shared_memory=sys.argv[1] == "shared")
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
GOES_ON = "threading.Thread(target=threading.Event().wait).start(); "
"""A thread of the program that never ends, and with it the process."""
WITHOUT_CLOSING = "rank 1 has ended its program (its last line, or sys.exit) without closing its channel, while rank 0"


@pytest.mark.parametrize(
    ("transport", "deed", "words"),
    [
        ("tcp", "sys.exit(0)", WITHOUT_CLOSING),
        ("shared", "return_ = 'as one that has fewer batches'", WITHOUT_CLOSING),
        ("tcp", GOES_ON + "sys.exit(3)", WITHOUT_CLOSING),
        ("tcp", GOES_ON + "raise KeyError('x')", "rank 1 stopped: KeyError: 'x', while rank 0"),
    ],
)
def test_peers_are_told_how_a_program_ended(transport: str, deed: str, words: str) -> None:
    with ranks_of([["-c", PROGRAM, transport, deed]] * 2) as ranks:
        told, _ = ranks[0].communicate(timeout=PATIENCE_SECONDS)
    assert told == f"{words} was in exchange for 'gradients'"


def work(place: dict[str, str], deed: str, answers: "multiprocessing.Queue[str]") -> None:
    import shardwise as sw

    os.environ |= place
    channel = sw.processes(timeout_seconds=60)
    channel.exchange(b"", purpose="start")
    if channel.rank == 1:
        if deed == "exit":
            sys.exit(3)
        raise ValueError("a worker of multiprocessing")
    try:
        channel.exchange(b"", purpose="gradients")
    except sw.errors.PeerError as error:
        answers.put(str(error))


def of_two(end: Connection, places: list[dict[str, str]], deed: str) -> None:
    """A program that starts two workers, and says what rank 0 was told."""
    start = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[str] = start.Queue()
    workers = [start.Process(target=work, args=(place, deed, answers)) for place in places]
    for worker in workers:
        worker.start()
    end.send(answers.get(timeout=PATIENCE_SECONDS))
    for worker in workers:
        worker.join()


@pytest.mark.parametrize(
    ("deed", "words"), [("exit", "SystemExit: 3"), ("raise", "ValueError: a worker of multiprocessing")]
)
def test_workers_of_multiprocessing_tell_it_too(deed: str, words: str) -> None:
    with world(2) as places:
        program = Call(of_two, places, deed)
        try:
            assert program.connection.poll(PATIENCE_SECONDS)
            said = program.connection.recv()
        finally:
            program.end(patience_seconds=60)
    assert said == f"rank 1 stopped: {words}, while rank 0 was in exchange for 'gradients'"
