"""What the process channel does beyond its contract: buffered sends, bounded staging, liveness between calls."""

import socket
import threading
import time

import pytest
import torch

from shardwise.comm.process.board import Switchboard
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.link import PeerLink
from shardwise.comm.process.messages import INLINE_BYTES_BETWEEN_HOSTS
from shardwise.comm.process.shared_memory import BASE_SLOTS, RETAINED_SLOTS, SLOT_BYTES
from shardwise.errors import PeerError
from tests.comm.boards import PATIENCE_SECONDS, boards, on_threads, tcp_pair, until_no_thread_has

kinds = pytest.mark.parametrize("remote", [(), (0, 1)], ids=["shared", "bytes"])
LARGE = 40 << 20
"""Bytes: more than all slots and all socket buffers."""


@kinds
def test_two_ranks_may_both_wait_for_their_sends_before_they_receive(remote: tuple[int, ...]) -> None:
    def swap(channel: ProcessChannel) -> None:
        peer = 1 - channel.rank
        mine = torch.full((LARGE,), channel.rank, dtype=torch.uint8)
        got = torch.empty_like(mine)
        channel.send(mine, peer, purpose="swap").wait()
        mine.fill_(9)
        channel.receive(got, peer, purpose="swap").wait()
        assert bool((got == peer).all())

    on_threads(2, swap, remote=remote)


@kinds
def test_a_message_arrives_while_its_sender_makes_no_call(remote: tuple[int, ...]) -> None:
    received = threading.Event()

    def body(channel: ProcessChannel) -> None:
        small, large = torch.full((8,), 1, dtype=torch.uint8), torch.full((LARGE,), 3, dtype=torch.uint8)
        for tensor, purpose in ((small, "warm up"), (large, "large")):
            if channel.rank == 0:
                channel.send(tensor, 1, purpose=purpose)
            else:
                got = torch.empty_like(tensor)
                channel.receive(got, 0, purpose=purpose).wait()
                assert torch.equal(got, tensor)
        if channel.rank == 0:
            assert received.wait(PATIENCE_SECONDS)
        else:
            received.set()

    on_threads(2, body, remote=remote)


def test_staging_of_collectives_is_bounded_and_that_of_sends_is_given_back() -> None:
    def body(channel: ProcessChannel) -> None:
        pool = channel.board.pool
        output = torch.empty(2 * LARGE, dtype=torch.uint8)
        for _ in range(2):
            channel.all_gather(output, output[:LARGE].clone(), purpose="bulk").wait()
            channel.reduce_scatter(output[:LARGE].clone(), output, purpose="bulk").wait()
        assert pool.num_slots <= BASE_SLOTS + RETAINED_SLOTS
        if channel.rank == 0:
            work = channel.send(output, 1, purpose="bulk")
            assert pool.num_slots >= 2 * LARGE // SLOT_BYTES
            work.wait()
        else:
            channel.receive(output, 0, purpose="bulk").wait()
        channel.exchange(b"", purpose="done")
        channel.exchange(b"", purpose="noticed")
        assert pool.num_slots <= BASE_SLOTS + RETAINED_SLOTS

    on_threads(2, body)


@kinds
def test_no_descriptor_of_memory_or_thread_is_kept_by_a_closed_channel(remote: tuple[int, ...]) -> None:
    def body(channel: ProcessChannel) -> None:
        output = torch.empty(LARGE, dtype=torch.uint8)
        channel.all_gather(output, output[: LARGE // 2].clone(), purpose="bulk").wait()

    on_threads(2, body, remote=remote)
    until_no_thread_has("shardwise flusher", "shardwise gloo pair")


@kinds
def test_a_source_is_the_callers_again_only_when_the_last_reader_has_it(remote: tuple[int, ...]) -> None:
    counts = [LARGE // 2, 1]

    def body(channel: ProcessChannel) -> None:
        source = torch.ones(counts[channel.rank], dtype=torch.uint8)
        output = torch.zeros(sum(counts), dtype=torch.uint8)
        work = channel.all_gather(output, source, counts=counts, purpose="bulk")
        if channel.rank == 1:
            time.sleep(0.1)  # rank 0 has all that it needs, and this rank has read nothing yet
        work.wait()
        source.zero_()
        assert output.all()

    on_threads(2, body, remote=remote)


def test_a_rank_that_closes_waits_until_other_hosts_have_all_that_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that sends to a connection that is closed there gets a reset, and nothing more of what is on its way."""
    monkeypatch.setattr("shardwise.comm.process.board.LAST_WORDS_SECONDS", 0.0)
    ours, theirs = tcp_pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 200_000)  # which any system grants
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    near, far = (
        ProcessChannel(Switchboard(rank, {1 - rank: link}, timeout_seconds=60.0), (0, 1), owns_board=True)
        for rank, link in enumerate((PeerLink(ours, rank=1, local=False), PeerLink(theirs, rank=0, local=False)))
    )
    sent = torch.arange(15_000)
    for purpose in ("warm up", "parting"):
        near.send(sent, 1, purpose=purpose)
    leaving = threading.Thread(target=near.close, daemon=True)
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    far.send(torch.zeros(1), 0, purpose="what nobody reads")
    got = torch.empty_like(sent)
    for purpose in ("warm up", "parting"):
        far.receive(got, 0, purpose=purpose).wait()
        assert torch.equal(got, sent)
    with pytest.raises(PeerError, match="rank 0 has closed its channel"):
        far.receive(got, 0, purpose="more").wait()
    leaving.join(60)
    far.close()


@pytest.mark.parametrize("num_bytes", [8, 4 * INLINE_BYTES_BETWEEN_HOSTS], ids=["frame", "gloo"])
def test_what_a_rank_does_not_want_that_has_closed_disturbs_no_other(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.comm.process.gloo_pairs.GRACE_SECONDS", 0.0)
    group = boards(3, remote=(0, 1, 2))
    leaver, sender, other = (ProcessChannel(board, (0, 1, 2), owns_board=True) for board in group)
    sent, got = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)

    def receive_and_leave() -> None:
        leaver.receive(got, 1, purpose="wanted").wait()
        leaver.close()

    leaving = threading.Thread(target=receive_and_leave, daemon=True)
    leaving.start()
    sender.send(sent, 0, purpose="wanted").wait()
    while leaving.is_alive() or not group[1].has_closed([0]):
        sender.has_failed()
    pairs = group[1].pairs
    assert pairs is not None
    sender.send(sent, 0, purpose="wanted")
    while num_bytes > INLINE_BYTES_BETWEEN_HOSTS and not pairs.is_lost(0):
        sender.has_failed()
    sender.send(sent[:1], 2, purpose="for the other")
    other.receive(got[:1], 1, purpose="for the other").wait()
    sender.close()
    other.close()


def waits_of_a_gather(channel: ProcessChannel) -> dict[int, float]:
    output = torch.empty(3)
    channel.exchange(b"", purpose="start")
    channel.board.tally.open()
    if channel.rank == 1:
        time.sleep(1.0)
    channel.all_gather(output, output[:1].clone(), purpose="weights").wait()
    return channel.board.tally.take().waited


def test_a_wait_for_a_transfer_counts_for_the_rank_that_came_last() -> None:
    first, _, last = on_threads(3, waits_of_a_gather)
    for waited in (first, last):
        assert max(waited, key=waited.__getitem__) == 1
        assert waited[1] > 0.5


def test_closing_twice_is_harmless_and_calls_after_it_are_refused() -> None:
    def body(channel: ProcessChannel) -> None:
        channel.exchange(b"", purpose="before")

    on_threads(2, body)  # closes every channel, after which nobody waits
    one, other = (ProcessChannel(board, (0, 1), owns_board=True) for board in boards(2))
    one.over([0]).close()  # a part holds nothing
    one.send(torch.zeros(1), 1, purpose="still open")
    for channel in (one, one, other):
        channel.close()
    with pytest.raises(PeerError, match="rank 0 has closed this channel"):
        one.send(torch.zeros(1), 1, purpose="too late")
