"""Every way in which simulated ranks can fail, found at once and told to all."""

import signal
import threading
import time

import pytest
import torch

from shardwise.comm import Channel, Work, simulate
from shardwise.errors import MismatchError, PeerError, PlanError

FOREVER_SECONDS = 1000.0


def meet(channel: Channel, purpose: str = "meet") -> None:
    channel.exchange(b"", purpose=purpose)


def gather(channel: Channel, purpose: str) -> Work:
    return channel.all_gather(torch.zeros(channel.size), torch.zeros(1), purpose=purpose)


def join_ranks() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("simulated rank"):
            thread.join(timeout=30)
            assert not thread.is_alive()


# -- deadlocks


def test_ranks_that_wait_for_each_other_learn_it_at_once_with_what_each_waits_for() -> None:
    def body(channel: Channel) -> None:
        right = (channel.rank + 1) % channel.size
        channel.receive(torch.zeros(2), right, purpose=f"parcel {channel.rank}").wait()

    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        simulate(3, body, timeout_seconds=FOREVER_SECONDS)
    assert time.monotonic() - start < 20
    assert str(caught.value) == (
        "no rank can go on:\n"
        "  - rank 0 waits for rank 1 in receive for 'parcel 0' of float32, counts (2,)\n"
        "  - rank 1 waits for rank 2 in receive for 'parcel 1' of float32, counts (2,)\n"
        "  - rank 2 waits for rank 0 in receive for 'parcel 2' of float32, counts (2,)"
    )
    assert (caught.value.rank, caught.value.operation, caught.value.purpose) == (None, "receive", "parcel 0")
    assert not hasattr(caught.value, "__notes__")  # the same verdict everywhere needs no rank


def test_blocking_sends_on_both_sides_are_a_deadlock() -> None:
    with pytest.raises(PeerError, match="rank 0 waits for rank 1 in send for 'push'"):
        simulate(2, lambda channel: channel.send(torch.zeros(1), 1 - channel.rank, purpose="push").wait())


def test_a_deadlock_among_some_ranks_is_found_when_the_others_have_finished() -> None:
    def body(channel: Channel) -> None:
        if channel.rank < 2:
            channel.receive(torch.zeros(1), 1 - channel.rank, purpose="each from the other").wait()

    with pytest.raises(PeerError, match=r"rank 2 has finished \(no call yet\)"):
        simulate(3, body, timeout_seconds=FOREVER_SECONDS)


def test_a_rank_that_finishes_early_is_named_to_those_who_wait_for_it() -> None:
    seen: list[tuple[str, int | None, str, str]] = []

    def body(channel: Channel) -> None:
        meet(channel)
        if channel.rank == 1:
            return
        try:
            gather(channel, "without rank 1").wait()
        except PeerError as error:
            seen.append((str(error), error.rank, error.operation, error.purpose))
            raise

    with pytest.raises(PeerError, match="rank 1 finished without a matching call"):
        simulate(4, body, timeout_seconds=FOREVER_SECONDS)
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert seen[0][1:] == (1, "all_gather", "without rank 1")


def test_a_rank_may_finish_while_others_go_on_without_it() -> None:
    def body(channel: Channel) -> int:
        if channel.rank == 0:
            return 0
        part = channel.over([1, 2])
        for _ in range(3):
            meet(part)
        return part.rank

    assert simulate(3, body) == [0, 0, 1]


# -- errors of a rank


def test_the_error_of_a_rank_is_raised_as_it_is_with_a_note_and_its_peers_are_told() -> None:
    boom = ValueError("boom")
    told: dict[int, PeerError] = {}

    def body(channel: Channel) -> None:
        meet(channel, "before")
        if channel.rank == 1:
            raise boom
        try:
            meet(channel, "after")
        except PeerError as error:
            told[channel.rank] = error
            raise

    with pytest.raises(ValueError, match="boom") as caught:
        simulate(3, body, timeout_seconds=FOREVER_SECONDS)
    assert caught.value is boom
    assert caught.value.__notes__ == ["raised by rank 1 of 3 simulated ranks"]
    assert sorted(told) == [0, 2]
    for error in told.values():
        assert str(error) == "exchange for 'after' cannot complete: rank 1 stopped with ValueError: boom"
        assert (error.rank, error.operation, error.purpose) == (1, "exchange", "after")


def test_starting_a_transfer_after_a_peer_failed_is_refused_without_a_wait() -> None:
    def body(channel: Channel) -> None:
        if channel.rank == 2:
            raise ValueError("boom")
        with pytest.raises(PeerError):
            meet(channel)
        with pytest.raises(PeerError, match=r"all_gather for 'too late'.*rank 2 stopped with ValueError: boom"):
            gather(channel, "too late")

    with pytest.raises(ValueError, match="boom"):
        simulate(3, body, timeout_seconds=FOREVER_SECONDS)


def test_errors_inside_backward_arrive_like_others() -> None:
    def body(channel: Channel) -> None:
        weight = torch.ones(3, requires_grad=True)
        weight.register_post_accumulate_grad_hook(lambda _: meet(channel))
        if channel.rank == 1:
            raise ValueError("no backward here")
        weight.sum().backward()

    with pytest.raises(ValueError, match="no backward here"):
        simulate(2, body, timeout_seconds=FOREVER_SECONDS)


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


def test_a_verdict_that_all_ranks_share_is_raised_without_a_note() -> None:
    def body(channel: Channel) -> None:
        votes = channel.exchange(b"no" if channel.rank == 1 else b"yes", purpose="vote")
        raise PlanError(f"rank {votes.index(b'no')} says no")

    with pytest.raises(PlanError, match="rank 1 says no") as caught:
        simulate(3, body)
    assert not hasattr(caught.value, "__notes__")


def test_errors_that_differ_name_the_rank_that_failed_first() -> None:
    def body(channel: Channel) -> None:
        meet(channel)  # rank 2 arrives last and goes on first
        raise PlanError(f"verdict of rank {channel.rank}")

    with pytest.raises(PlanError, match="verdict of rank 2") as caught:
        simulate(3, body)
    assert caught.value.__notes__ == ["raised by rank 2 of 3 simulated ranks"]


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


def test_random_states_are_put_back_after_an_error() -> None:
    def body(channel: Channel) -> None:
        torch.manual_seed(channel.rank)
        raise ValueError("boom")

    torch.manual_seed(7)
    expected = torch.rand(())
    torch.manual_seed(7)
    with pytest.raises(ValueError, match="boom"):
        simulate(2, body)
    assert torch.rand(()) == expected


def test_what_differs_is_shown_with_the_ranks_of_each_side() -> None:
    def body(channel: Channel) -> None:
        gather(channel, "beans" if channel.rank == 1 else "apples").wait()

    with pytest.raises(MismatchError) as caught:
        simulate(3, body)
    assert str(caught.value) == (
        "calls of ranks 0, 1, 2 that meet differ; make the same calls in the same order:\n"
        "  - ranks 0, 2: all_gather for 'apples' of float32, counts (1, 1, 1)\n"
        "  - rank 1: all_gather for 'beans' of float32, counts (1, 1, 1)"
    )
    assert not hasattr(caught.value, "__notes__")


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
    told: list[str] = []

    def body(channel: Channel) -> None:
        if channel.rank == 0:
            assert main.ident is not None
            signal.pthread_kill(main.ident, signal.SIGINT)
        try:
            while True:
                meet(channel)
        except PeerError as error:
            told.append(str(error))
            raise

    with pytest.raises(KeyboardInterrupt):
        simulate(3, body, timeout_seconds=FOREVER_SECONDS)
    join_ranks()
    assert len(told) == 3
    assert all("the caller of simulate stopped with KeyboardInterrupt" in text for text in told)
