"""The report of a hang: one screen, the ranks that all wait for first, ranks in the same place on one line."""

import re
import threading

import pytest

from shardwise.comm import Channel, simulate
from shardwise.comm.hang_report import MAX_LINES, Whereabouts, lines_of, report
from shardwise.errors import PeerError

STEP = "exchange for 'figures of a step'"


def waiting(rank: int, awaited: tuple[int, ...], call: str = STEP, line: str = "a.py:7 in main: step()") -> Whereabouts:
    return Whereabouts(rank=rank, call=call, awaited=awaited, seconds=60.2, lines=(line,))


def test_who_waits_for_no_rank_is_first_and_ranks_in_one_place_share_a_line() -> None:
    lost = Whereabouts(rank=6, note="has not said where it is")
    elsewhere = Whereabouts(rank=3, host="b", call=STEP, seconds=61.4, lines=("a.py:3 in read: wait()",))
    gathers = waiting(1, (3, 6), "all_gather for 'weights'")
    places = [gathers if rank == 1 else waiting(rank, (1, 3, 6)) for rank in (0, 1, 2, 4, 5, 7)]
    assert report([*places, lost, elsewhere], waited_seconds=60).splitlines() == [
        "shardwise: nothing has moved for 60 s. Where the 8 ranks are:",
        "  rank 3 is in no call; its last one, 61 s ago, was exchange for 'figures of a step'",
        "      a.py:3 in read: wait()",
        "  rank 6 has not said where it is",
        "  rank 1 waits for ranks 3, 6 in all_gather for 'weights', for 60 s",
        "      a.py:7 in main: step()",
        "  ranks 0, 2, 4-5, 7 wait for ranks 1, 3, 6 in exchange for 'figures of a step', for 60 s",
        "      a.py:7 in main: step()",
    ]


def test_hosts_are_named_where_there_are_several_and_no_text_of_a_rank_reaches_the_terminal_raw() -> None:
    places = [
        Whereabouts(rank=0, host="a", call="\x1b[2J" + "c" * 200),
        Whereabouts(rank=1, host="b"),
        Whereabouts(rank=2, host="c"),
    ]
    lines = report(places, waited_seconds=1).splitlines()
    assert lines[1].startswith("  rank 0 on a is in no call; its last one, 0 s ago, was ?[2Jccc")
    assert len(lines[1]) == 120
    assert lines[2] == "  ranks 1-2 on b and 1 other hosts are in no call; they have made none yet"


@pytest.mark.parametrize("num_ranks", [8, 9, 10, 11, 1024])
def test_a_report_is_one_screen_and_counts_what_it_leaves_out(num_ranks: int) -> None:
    places = [
        Whereabouts(rank=rank, call=STEP, awaited=(0,), lines=(f"a.py:{rank}", "b.py:1", "c.py:1"))
        for rank in range(num_ranks)
    ]
    lines = report(places, waited_seconds=60).splitlines()
    assert len(lines) <= MAX_LINES
    shown = sum(line.startswith("  rank ") for line in lines)
    if shown < num_ranks:
        assert lines[-1] == f"  and {'rank' if num_ranks - shown == 1 else 'ranks'} " + (
            f"{shown}-{num_ranks - 1} in {num_ranks - shown} other places"
            if num_ranks - shown > 1
            else f"{shown} in 1 other places"
        )
    assert num_ranks > 8 or shown == 8


def test_the_lines_of_a_thread_are_those_of_the_program_and_where_others_wait_for_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def read() -> None:
        entered.set()
        leave.wait()

    thread = threading.Thread(target=read)
    thread.start()
    assert entered.wait(60)
    lines = lines_of(thread.ident)
    leave.set()
    thread.join()
    program, beyond = lines
    assert program.startswith("comm/test_hang_report.py:")
    assert program.endswith("in read: leave.wait()")
    assert "threading.py" in beyond
    assert lines_of(thread.ident) == lines_of(None) == ()


def test_simulated_ranks_print_it_where_one_makes_no_call(capfd: pytest.CaptureFixture[str]) -> None:
    leave = threading.Event()

    def body(channel: Channel) -> None:
        channel.exchange(b"", purpose="start")
        if channel.rank == 1:
            leave.wait()
        channel.exchange(b"", purpose="figures")

    with pytest.raises(PeerError, match=r"rank 1 made no call for 0\.5 s while others wait"):
        simulate(3, body, timeout_seconds=0.5)
    leave.set()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "shardwise: nothing has moved for 0.5 s. Where the 3 ranks are:"
    assert re.fullmatch(r"  rank 1 is in no call; its last one, \d+ s ago, was exchange for 'start'", lines[1])
    assert [line for line in lines if line.endswith("in body: leave.wait()")]
    waiting = "  ranks 0, 2 wait for rank 1 in exchange for 'figures', for "
    assert any(line.startswith(waiting) for line in lines)
