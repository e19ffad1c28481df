"""What survivors see when a rank dies, stops moving or gives up: an error that names it, soon, and never a hang."""

import os
import signal
import time

import pytest
import torch

from shardwise.comm import Channel
from shardwise.comm.processes import processes
from shardwise.errors import PeerError
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, RankError, Transport

IMPATIENT = (Transport(timeout_seconds=2.0), Transport(timeout_seconds=2.0, without_shared_memory=None))
either = pytest.mark.parametrize("transport", [SHARED_MEMORY, TCP], ids=["shared", "tcp"])
either_impatient = pytest.mark.parametrize("transport", IMPATIENT, ids=["shared", "tcp"])

LARGE = 12 << 20
"""Elements (50 MB, for 2, 3 and 4 ranks): what a rank publishes at once is only a part of its share."""

Told = tuple[str, int | None, str, str, float]


def reduce(channel: Channel, num_elements: int, purpose: str) -> None:
    output = torch.empty(num_elements // channel.size)
    channel.reduce_scatter(output, torch.ones(len(output) * channel.size), purpose=purpose).wait()


def told(channel: Channel, purpose: str, num_elements: int = 64) -> Told:
    """What a survivor is told, and after how long."""
    begin = time.monotonic()
    with pytest.raises(PeerError) as caught:
        reduce(channel, num_elements, purpose)
    first = caught.value
    taken = time.monotonic() - begin
    begin = time.monotonic()
    with pytest.raises(PeerError) as again:
        channel.exchange(b"", purpose="afterwards")
    assert str(again.value) == str(first)
    assert time.monotonic() - begin < 0.5
    return str(first), first.rank, first.operation, first.purpose, taken


def shared_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "shardwise" in name}


def die_in_the_middle(channel: Channel, victim: int) -> Told:
    reduce(channel, 64, "gradients bucket 1")
    if channel.rank == victim:
        output, own = torch.empty(LARGE // channel.size), torch.ones(LARGE)
        channel.reduce_scatter(output, own, purpose="gradients bucket 2")
        os.kill(os.getpid(), signal.SIGKILL)
    return told(channel, "gradients bucket 2", LARGE)


@either
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_to_every_survivor_at_once(pool: Pool, transport: Transport, victim: int) -> None:
    before = shared_names()
    results = pool.run(3, die_in_the_middle, victim, transport=transport, lost=[victim])
    for rank in {0, 1, 2} - {victim}:
        text, culprit, operation, purpose, taken = results[rank]
        where = f"while rank {rank} was in reduce_scatter for 'gradients bucket 2'"
        assert text == f"rank {victim} is gone (its process died), {where}"
        assert (culprit, operation, purpose) == (victim, "reduce_scatter", "gradients bucket 2")
        assert taken < 10
    assert shared_names() == before


def die_with_a_child(channel: Channel) -> float:
    """Rank 1 leaves a forked child behind, as a data loader would."""
    if channel.rank == 1:
        child = os.fork()
        if not child:
            signal.alarm(30)
            signal.pause()
        channel.exchange(str(child).encode(), purpose="child")
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(channel.exchange(b"", purpose="child")[1])
    taken = told(channel, "gradients")[-1]
    os.kill(child, signal.SIGKILL)
    return taken


@either
def test_a_forked_child_does_not_hide_the_death_of_its_parent(pool: Pool, transport: Transport) -> None:
    assert pool.run(2, die_with_a_child, transport=transport, lost=[1])[0] < 10


def stop_moving(channel: Channel) -> Told:
    reduce(channel, 64, "gradients bucket 7")
    if channel.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return told(channel, "gradients bucket 8")


@either_impatient
def test_a_rank_that_stops_moving_is_named_in_time_with_its_last_call(pool: Pool, transport: Transport) -> None:
    results = pool.run(3, stop_moving, transport=transport, lost=[1])
    for rank in (0, 2):
        text, culprit, _, _, taken = results[rank]
        assert text.startswith("rank 1 made no progress for 2 s (last seen in reduce_scatter for 'gradients bucket 7'")
        assert f"while rank {rank} was in reduce_scatter for 'gradients bucket 8'" in text
        assert culprit == 1
        assert 1.5 < taken < 8


def lose_one_of_the_tree(channel: Channel, victim: int, deed: int) -> tuple[str, int | None, float]:
    """A rank that most others have no link to ends, or stops, between two exchanges along the tree."""
    channel.exchange(b"", purpose="start")
    if channel.rank == victim:
        os.kill(os.getpid(), deed)
    begin = time.monotonic()
    with pytest.raises(PeerError) as caught:
        channel.exchange(b"", purpose="figures")
    return str(caught.value), caught.value.rank, time.monotonic() - begin


@either_impatient
@pytest.mark.parametrize(
    ("victim", "deed"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)],
    ids=["root-killed", "killed", "stopped"],
)
def test_a_lost_inner_rank_of_the_tree_is_named_to_all_the_others(
    pool: Pool, transport: Transport, victim: int, deed: int
) -> None:
    results = pool.run(7, lose_one_of_the_tree, victim, deed, transport=transport, lost=[victim])
    words = "made no progress for 2 s (last seen in exchange for 'start'"
    if deed == signal.SIGKILL:
        words = "is gone (its process died), while rank "
    for rank in set(range(7)) - {victim}:
        text, culprit, taken = results[rank]
        assert text.startswith(f"rank {victim} {words}"), text
        assert text.endswith(f", while rank {rank} was in exchange for 'figures'")
        assert culprit == victim
        assert taken < 20


def wait_in_a_chain(channel: Channel) -> Told:
    """Rank 0 waits for rank 1, which waits for rank 2, which does nothing."""
    channel.exchange(b"", purpose="start")
    if channel.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(PeerError) as caught:
        channel.receive(torch.empty(4), channel.rank + 1, purpose=f"activation {channel.rank}").wait()
    error = caught.value
    return str(error), error.rank, error.operation, error.purpose, time.monotonic() - begin


@either_impatient
def test_the_rank_at_the_end_of_a_chain_of_waiting_ranks_is_blamed(pool: Pool, transport: Transport) -> None:
    results = pool.run(3, wait_in_a_chain, transport=transport, lost=[2])
    for rank in (0, 1):
        text, culprit, operation, purpose, _ = results[rank]
        assert (culprit, operation, purpose) == (2, "receive", f"activation {rank}")
        assert text.startswith("rank 2 made no progress for 2 s (last seen in exchange for 'start'")


def wait_for_each_other(channel: Channel) -> str:
    with pytest.raises(PeerError) as caught:
        channel.receive(torch.empty(4), 1 - channel.rank, purpose=f"parcel {channel.rank}").wait()
    return str(caught.value)


@either_impatient
def test_ranks_that_wait_for_each_other_learn_what_the_other_waits_for(pool: Pool, transport: Transport) -> None:
    for text in pool.run(2, wait_for_each_other, transport=transport, poisons=True):
        blamed = 1 if text.startswith("rank 1 made no progress for 2 s") else 0  # whoever was told first
        assert f"it waits for rank {1 - blamed} in receive for 'parcel {blamed}'" in text


def give_up(channel: Channel) -> Told | None:
    channel.exchange(b"", purpose="start")
    if channel.rank == 1:
        channel.receive(torch.empty(1), 0, purpose="rank 0 is about to block").wait()
        channel.abort("ValueError: the loss is not a number")
        return None
    if channel.rank == 0:
        channel.send(torch.empty(1), 1, purpose="rank 0 is about to block").wait()
    return told(channel, "gradients bucket 3", LARGE)


@either
def test_the_reason_of_an_abort_reaches_ranks_that_are_blocked(pool: Pool, transport: Transport) -> None:
    results = pool.run(3, give_up, transport=transport, poisons=True)
    for rank in (0, 2):
        text, culprit, operation, purpose, taken = results[rank]
        assert text == (
            "rank 1 stopped: ValueError: the loss is not a number, "
            f"while rank {rank} was in reduce_scatter for 'gradients bucket 3'"
        )
        assert (culprit, operation, purpose) == (1, "reduce_scatter", "gradients bucket 3")
        assert taken < 10


def finish_without_the_aborted(channel: Channel) -> float:
    """What rank 2 aborts after is complete on all ranks: those that wait for it get it."""
    output = torch.empty(LARGE)
    work = channel.all_gather(output, torch.full((LARGE // 2,), float(channel.rank)), purpose="done by all")
    work.wait()
    if channel.rank == 1:
        channel.abort("enough")
    return float(output.sum())


@either
def test_an_abort_does_not_take_back_what_was_given(pool: Pool, transport: Transport) -> None:
    assert pool.run(2, finish_without_the_aborted, transport=transport, poisons=True) == [LARGE / 2] * 2


def raise_here(channel: Channel) -> None:
    if channel.rank == 1:
        raise ValueError("no such thing as a free lunch")
    channel.exchange(b"", purpose="lunch")


def test_the_pool_puts_the_traceback_of_the_rank_that_caused_a_failure_on_top(pool: Pool) -> None:
    with pytest.raises(
        RankError, match=r"(?s)^rank 1 raised:\nTraceback.*free lunch.*rank 0: PeerError: rank 1 stopped"
    ):
        pool.run(2, raise_here)
    assert pool.run(2, rank_of) == [0, 1]


def rank_of(channel: Channel) -> int:
    return channel.rank


def fall_back(channel: Channel) -> tuple[bool, float]:
    """Rank 1 cannot open its local connections, although it believed so."""
    from shardwise.comm import connections

    original = connections._unix_connector

    def refuse(rank: int, deadline: float) -> object:
        raise ConnectionRefusedError("no local connections today")

    if channel.rank == 1:
        connections._unix_connector = lambda own_rank, token: refuse  # type: ignore[assignment,return-value]
    try:
        fresh = processes(timeout_seconds=20)
        output = torch.empty(4 * channel.size)
        fresh.all_gather(output, torch.full((4,), float(channel.rank)), purpose="over TCP").wait()
        local = [link.local for link in fresh.board.links.values()]  # type: ignore[attr-defined]
        fresh.close()
    finally:
        connections._unix_connector = original
    return any(local), float(output.sum())


def test_all_ranks_fall_back_to_tcp_together_when_one_local_connection_fails(
    pool: Pool,
) -> None:
    assert pool.run(2, fall_back) == [(False, 4.0)] * 2
