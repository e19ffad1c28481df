"""A rank that hangs, of real processes: one report on the lowest rank that waits, with the line where it hangs."""

import pytest

from tests.processes.as_started import PATIENCE_SECONDS, ranks_of

PROGRAM = """
import os, signal, sys, threading
import shardwise as sw


def read():
    threading.Event().wait()


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


@pytest.mark.parametrize(("culprit", "how", "printer"), [(0, "stopped", 1), (1, "reads", 0)])
def test_the_report_names_the_rank_that_hangs_and_its_line_once(culprit: int, how: str, printer: int) -> None:
    with ranks_of([["-c", PROGRAM, str(culprit), how]] * 3) as ranks:
        told = {rank: ranks[rank].communicate(timeout=PATIENCE_SECONDS) for rank in {0, 1, 2} - {culprit}}
    assert {blamed for blamed, _ in told.values()} == {str(culprit)}
    assert [rank for rank, (_, text) in told.items() if "nothing has moved for 3 s" in text] == [printer]
    lines = told[printer][1].splitlines()
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
