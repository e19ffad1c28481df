"""Every way in which simulated ranks can fail, found at once and told to all."""

import signal
import threading
from collections.abc import Callable

import pytest
import torch

from shardwise.comm import Channel, Work, simulate
from shardwise.errors import MismatchError, PeerError, PlanError
from tests.refusals import Refusals

FOREVER_SECONDS = 1000.0


def meet(channel: Channel, purpose: str = "meet") -> None:
    channel.exchange(b"", purpose=purpose)


def gather(channel: Channel, purpose: str) -> Work:
    return channel.all_gather(torch.zeros(channel.size), torch.zeros(1), purpose=purpose)


def join_ranks() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("simulated rank"):
            thread.join(timeout=60)
            assert not thread.is_alive()


# -- what all ranks are told


def receive_round(channel: Channel) -> None:
    channel.receive(torch.zeros(2), (channel.rank + 1) % channel.size, purpose=f"parcel {channel.rank}").wait()


def send_both(channel: Channel) -> None:
    channel.send(torch.zeros(1), 1 - channel.rank, purpose="push").wait()


def two_for_each_other(channel: Channel) -> None:
    if channel.rank < 2:
        channel.receive(torch.zeros(1), 1 - channel.rank, purpose="each from the other").wait()


def leave_early(channel: Channel) -> None:
    meet(channel)
    if channel.rank != 1:
        gather(channel, "without rank 1").wait()


def call_otherwise(channel: Channel) -> None:
    gather(channel, "beans" if channel.rank == 1 else "apples").wait()


def told(size: int, body: Callable[[Channel], None]) -> Callable[[], object]:
    """The error, once it has been seen that all who wait are told the same."""

    def call() -> None:
        seen: list[str] = []

        def run(channel: Channel) -> None:
            try:
                body(channel)
            except Exception as error:
                seen.append(str(error))
                raise

        with pytest.raises((PeerError, MismatchError)) as caught:
            simulate(size, run, timeout_seconds=FOREVER_SECONDS)
        assert set(seen) == {str(caught.value)}
        raise caught.value

    return call


REFUSED = Refusals(
    "comm.simulated",
    {
        "receives in a round": told(3, receive_round),
        "two sends": told(2, send_both),
        "two wait, another one has ended": told(3, two_for_each_other),
        "one ends early": told(4, leave_early),
        "another call": told(3, call_otherwise),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_stops_all_ranks_is_told_at_once_to_all(case: str) -> None:
    REFUSED.check(case)


# -- errors of a rank


def test_the_error_of_a_rank_is_raised_as_it_is_with_a_note_and_its_peers_are_told_at_each_call() -> None:
    boom = ValueError("boom")
    seen: dict[int, list[PeerError]] = {}

    def body(channel: Channel) -> None:
        meet(channel, "before")
        if channel.rank == 1:
            raise boom
        with pytest.raises(PeerError) as caught:
            meet(channel, "after")
        with pytest.raises(PeerError) as again:
            gather(channel, "too late")
        seen[channel.rank] = [caught.value, again.value]

    with pytest.raises(ValueError, match="boom") as caught:
        simulate(3, body, timeout_seconds=FOREVER_SECONDS)
    assert caught.value is boom
    assert caught.value.__notes__ == ["raised by rank 1 of 3 simulated ranks"]
    assert sorted(seen) == [0, 2]
    for first, second in seen.values():
        assert str(first) == "exchange for 'after' cannot complete: rank 1 stopped with ValueError: boom"
        assert (first.rank, first.operation, first.purpose) == (1, "exchange", "after")
        assert "all_gather for 'too late'" in str(second)


def test_a_transfer_whose_calls_were_all_made_completes_though_a_peer_failed_since() -> None:
    def body(channel: Channel) -> None:
        output = torch.zeros(channel.size)
        work = channel.all_gather(output, torch.tensor([1.0 + channel.rank]), purpose="complete")
        meet(channel)
        if channel.rank == 2:
            raise ValueError("too late to matter")
        work.wait()
        assert output.tolist() == [1.0, 2.0, 3.0]

    with pytest.raises(ValueError, match="too late to matter"):
        simulate(3, body)


@pytest.mark.parametrize(
    ("verdicts", "notes"), [("aaa", []), ("abc", ["raised by rank 2 of 3 simulated ranks"])], ids=["shared", "own"]
)
def test_errors_that_differ_name_the_rank_that_failed_first(verdicts: str, notes: list[str]) -> None:
    def body(channel: Channel) -> None:
        meet(channel)  # rank 2 arrives last and goes on first
        raise PlanError(f"verdict {verdicts[channel.rank]}")

    with pytest.raises(PlanError, match=f"verdict {verdicts[2]}") as caught:
        simulate(3, body)
    assert getattr(caught.value, "__notes__", []) == notes


def test_an_abort_makes_its_rank_the_origin_even_when_a_peer_fails_first() -> None:
    def body(channel: Channel) -> None:
        pair = channel.over([0, 1]) if channel.rank < 2 else None
        if channel.rank == 1:
            channel.abort("cannot go on")
            try:
                meet(channel)
            except PeerError as error:
                raise ValueError("the origin") from error
        if pair is not None:
            meet(pair)
        meet(channel)

    with pytest.raises(ValueError, match="the origin"):
        simulate(3, body)


# -- time and interruption


def test_a_rank_that_computes_too_long_while_others_wait_is_named_with_its_last_call() -> None:
    release = threading.Event()

    def body(channel: Channel) -> None:
        torch.manual_seed(channel.rank)
        meet(channel, "the last thing")
        if channel.rank == 1:
            release.wait()
        meet(channel, "never")

    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    try:
        with pytest.raises(PeerError) as caught:
            simulate(3, body, timeout_seconds=0.2)
        assert torch.rand(1) == expected[0]
        left_behind = [thread for thread in threading.enumerate() if thread.name.startswith("simulated rank")]
        assert len(left_behind) == 3
        assert all(thread.daemon for thread in left_behind)  # so that the interpreter can exit
    finally:
        release.set()
    join_ranks()
    assert torch.rand(1) == expected[1]  # ranks that end late leave the caller's state alone
    assert str(caught.value) == (
        "rank 1 made no call for 0.2 s while others wait:\n"
        "  - rank 0 waits for rank 1 in exchange for 'never'\n"
        "  - rank 1 waits for no other rank (last call: exchange for 'the last thing')\n"
        "  - rank 2 waits for rank 1 in exchange for 'never'"
    )
    error = caught.value
    assert (error.rank, error.operation, error.purpose) == (1, "exchange", "the last thing")


def test_the_last_rank_may_compute_as_long_as_it_likes() -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 2:
            threading.Event().wait(0.3)

    simulate(3, body, timeout_seconds=0.05)


def test_an_interrupt_of_the_caller_stops_all_ranks() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the shell of the tests ignores it
    main = threading.main_thread()
    said: list[str] = []

    def body(channel: Channel) -> None:
        if channel.rank == 0:
            assert main.ident is not None
            signal.pthread_kill(main.ident, signal.SIGINT)
        try:
            while True:
                meet(channel)
        except PeerError as error:
            said.append(str(error))
            raise

    with pytest.raises(KeyboardInterrupt):
        simulate(3, body, timeout_seconds=FOREVER_SECONDS)
    join_ranks()
    assert len(said) == 3
    assert all("the caller of simulate stopped with KeyboardInterrupt" in text for text in said)
