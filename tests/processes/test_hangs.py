"""A rank that hangs, of real processes: one report on the lowest rank that waits, with the line where it hangs."""

import contextlib
import socket
from pathlib import Path

import pytest

from tests.forks.programs import started

PROGRAM = """
import os, signal, sys, threading
import shardwise as sw


def read():
    threading.Event().wait(60)


def main():
    channel = sw.processes(timeout_seconds=3)
    channel.exchange(b"", purpose="start")
    if channel.rank == int(sys.argv[1]):
        if sys.argv[2] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        read()
    try:
        channel.exchange(b"", purpose="gradients")
    except sw.errors.PeerError as error:
        print(error.rank, end="")


main()
"""


def printed(folder: Path, culprit: int, how: str) -> list[str]:
    """What three ranks print on their standard errors, those of the others than `culprit` ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as stack:
        errors = [stack.enter_context(open(folder / f"{rank}.err", "wb")) for rank in range(3)]
        ranks = [
            stack.enter_context(
                started(
                    ["-c", PROGRAM, str(culprit), how],
                    environment={**world, "RANK": str(rank)},
                    errors=errors[rank].fileno(),
                )
            )
            for rank in range(3)
        ]
        for rank in {0, 1, 2} - {culprit}:
            assert ranks[rank].wait(60) == 0
            assert ranks[rank].stdout.read() == str(culprit)
    return [(folder / f"{rank}.err").read_text() for rank in range(3)]


@pytest.mark.parametrize(("culprit", "how", "printer"), [(0, "stopped", 1), (1, "reads", 0)])
def test_the_report_names_the_rank_that_hangs_and_its_line_once(
    culprit: int, how: str, printer: int, tmp_path: Path
) -> None:
    texts = printed(tmp_path, culprit, how)
    assert [rank for rank, text in enumerate(texts) if "nothing has moved for 3 s" in text] == [printer]
    lines = texts[printer].splitlines()
    at = lines.index("shardwise: nothing has moved for 3 s. Where the 3 ranks are:")
    assert lines[at + 1].startswith(f"  rank {culprit} ")
    if how == "stopped":
        assert "has not said where it is" in lines[at + 1]
    else:
        assert "is in no call" in lines[at + 1]
        assert "      <string>:7 in read" in lines
    others = "0, 2" if culprit == 1 else "1-2"
    assert any(
        line.startswith(f"  ranks {others} wait for rank {culprit} in exchange for 'gradients', for ") for line in lines
    )
    assert "      <string>:18 in main" in lines
