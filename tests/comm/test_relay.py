"""What all ranks hear through a few neighbours, and links that are made for the first message between two ranks."""

import gc
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

from shardwise.comm.process.board import Switchboard
from shardwise.comm.process.channel import ProcessChannel
from shardwise.comm.process.connections import Connected
from shardwise.comm.process.frames import ChannelVerdict, FrameKind, frame
from shardwise.comm.process.link import PeerLink
from shardwise.comm.process.relay import Relay
from shardwise.errors import PeerError
from tests.comm.boards import PATIENCE_SECONDS, Sent, count_chunks, on_threads, relayed_boards, tcp_pair, until

RANKS_OF_A_HOST = 4


def sockets_of(board: Switchboard) -> tuple[int, int]:
    """To the neighbours of the relay, and for messages."""
    assert board.links.relay is not None
    return len(board.links.relay.links), sum(link.is_connected for link in board.links.values())


def channel_of(board: Switchboard) -> ProcessChannel:
    return ProcessChannel(board, tuple(range(len(board.kernels))), owns_board=True)


def step(channel: ProcessChannel) -> tuple[int, int, Sent]:
    """Exchanges of all, then a data-parallel group of one rank on each host.

    The sockets before the group and after it, and the messages of one exchange.
    """
    assert len(channel.exchange(b"20 bytes or about it", purpose="figures")) == channel.size
    sent = count_chunks(channel)
    assert len(channel.exchange(b"20 bytes or about it", purpose="figures")) == channel.size
    num_sent = sent.copy()
    before = sum(sockets_of(channel.board))
    group = channel.over(range(channel.rank % 8, channel.size, 8))
    output = torch.empty(group.size)
    group.all_gather(output, torch.tensor([float(channel.rank)]), purpose="weights").wait()
    assert output.tolist() == [float(rank) for rank in range(channel.rank % 8, channel.size, 8)]
    return before, sum(sockets_of(channel.board)), num_sent


def test_a_rank_has_sockets_to_few_ranks_and_says_nothing_while_all_is_well() -> None:
    boards = relayed_boards(32, ranks_of_a_host=8)
    for board, (before, after, sent) in zip(boards, on_threads(32, step, among=boards), strict=True):
        assert before <= 7 + 5
        assert after - before <= 4 - 1
        assert len(sent) == sent.total() <= 5
        assert board.links.relay is not None
        # A rank that waits for a second says so: on a machine that is busy with other things, they do.
        assert {kind for kind, _ in board.links.relay.news} <= {FrameKind.STATUS, FrameKind.BYE}


def ended(boards: Sequence[Switchboard]) -> list[str]:
    """What each of the ranks hears that make no call, once all have heard something."""
    until(lambda: all(board.has_failed() for board in boards))
    return [board.verdict.fact if board.verdict is not None else "" for board in boards]


def drop_all(boards: Sequence[Switchboard]) -> None:
    for board in boards:
        board.drop()


@pytest.mark.parametrize("lost", [[0], [5], [4, 5, 6, 7]], ids=["root", "leaf", "host"])
def test_lost_ranks_are_named_to_all_others_though_nobody_makes_a_call(lost: list[int]) -> None:
    boards = relayed_boards(16, ranks_of_a_host=RANKS_OF_A_HOST)
    left = [board for board in boards if board.rank not in lost]
    drop_all([boards[rank] for rank in lost])
    for fact in ended(left):
        assert fact in [f"rank {rank} is gone (its process died)" for rank in lost]
    drop_all(left)


@pytest.mark.parametrize("stopped", [[0, 1, 2, 3], [8, 9, 10, 11]], ids=["first host", "host"])
def test_words_go_round_ranks_that_are_stopped(stopped: list[int]) -> None:
    """A rank that is stopped keeps its connections, and its thread passes nothing on."""
    boards = relayed_boards(16, ranks_of_a_host=RANKS_OF_A_HOST)
    relays = [board.links.relay for board in boards if board.links.relay is not None]
    for rank in stopped:
        relays[rank].lock.acquire()
    left = [board for board in boards if board.rank not in stopped]
    speaker = left[-1]
    speaker.fail(ChannelVerdict(fact="rank 15 stopped: enough", culprit=speaker.rank))
    assert set(ended(left[:-1])) == {"rank 15 stopped: enough"}
    for rank in stopped:
        relays[rank].lock.release()
    assert set(ended(boards[:-1])) == {"rank 15 stopped: enough"}
    drop_all(boards)


def test_the_end_of_a_chain_of_waiting_ranks_is_known_where_there_is_no_link_to_it() -> None:
    """0 waits for 5, and 5 for 10, which makes no call."""
    boards = relayed_boards(12, ranks_of_a_host=RANKS_OF_A_HOST, timeout_seconds=2.0)

    def wait(rank: int, source: int) -> None:
        with pytest.raises(PeerError) as caught:
            channel_of(boards[rank]).receive(torch.empty(1), source, purpose="activation").wait()
        told[rank] = str(caught.value)

    told: dict[int, str] = {}
    threads = [threading.Thread(target=wait, args=each, daemon=True) for each in ((0, 5), (5, 10))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert all(text.startswith("rank 10 made no progress for 2 s (it has made no call yet") for text in told.values())
    facts = ended([board for board in boards if board.rank not in told])
    assert {fact.partition(" (")[0] for fact in facts} == {"rank 10 made no progress for 2 s"}
    drop_all(boards)


def everyone_to_everyone(channel: ProcessChannel) -> list[float]:
    """Each rank sends to all before it receives: both of two ranks want a link at the same time."""
    others = [rank for rank in range(channel.size) if rank != channel.rank]
    for other in others:
        channel.send(torch.tensor([float(channel.rank)]), other, purpose="greeting")
    received = torch.empty(channel.size)
    for other in others:
        channel.receive(received[other : other + 1], other, purpose="greeting").wait()
    return [float(received[other]) for other in others]


def test_two_ranks_that_call_each_other_have_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.comm.process.relay.GRACE_SECONDS", 0.0)
    boards = relayed_boards(8, ranks_of_a_host=RANKS_OF_A_HOST)
    for rank, got in enumerate(on_threads(8, everyone_to_everyone, among=boards)):
        assert got == [float(other) for other in range(8) if other != rank]
    for board in boards:
        assert len(board.links.values()) == 7
        assert board.verdict is not None
        assert board.verdict.fact == f"rank {board.rank} has closed this channel"


def test_a_message_reaches_a_rank_that_computes_while_its_sender_makes_no_call() -> None:
    boards = relayed_boards(4, ranks_of_a_host=2)
    sender, receiver = channel_of(boards[0]), channel_of(boards[3])
    sender.send(torch.ones(1 << 20), receiver.rank, purpose="activation")  # and no call after it
    until(lambda: all(sockets_of(board)[1] for board in (boards[0], boards[3])) or receiver.has_failed())
    got = torch.zeros(1 << 20)
    receiver.receive(got, sender.rank, purpose="activation").wait()
    assert got.all()
    for board in boards:
        board.close()


@pytest.mark.parametrize("source", [0, 3])
def test_a_rank_that_closes_after_a_send_has_sent_it_before_its_goodbye(source: int) -> None:
    for _ in range(2):
        boards = relayed_boards(4, ranks_of_a_host=2)
        sender, receiver = channel_of(boards[source]), channel_of(boards[3 - source])
        leaving = threading.Thread(
            target=lambda sender=sender, receiver=receiver: [
                sender.send(torch.ones(8), receiver.rank, purpose="parting").wait(),
                sender.close(),
            ]
        )
        leaving.start()
        got = torch.zeros(8)
        receiver.receive(got, sender.rank, purpose="parting").wait()
        leaving.join(PATIENCE_SECONDS)
        with pytest.raises(PeerError, match=f"rank {source} has closed its channel"):
            receiver.receive(got, sender.rank, purpose="more").wait()
        for board in boards:
            board.close()


def test_a_rank_that_closed_before_there_was_a_link_is_named() -> None:
    boards = relayed_boards(6, ranks_of_a_host=1)
    boards[3].close()
    for rank in (0, 5):
        with pytest.raises(PeerError, match="rank 3 has closed its channel") as caught:
            channel_of(boards[rank]).receive(torch.empty(1), 3, purpose="anything").wait()
        assert caught.value.rank == 3
    drop_all(boards)


def test_a_board_that_nobody_holds_ends_its_connections() -> None:
    boards = relayed_boards(4, ranks_of_a_host=2)
    channel_of(boards[0]).send(torch.ones(1), 3, purpose="a link")
    boards[0] = None  # type: ignore[call-overload]
    gc.collect()
    assert set(ended(boards[1:])) == {"rank 0 is gone (its process died)"}
    drop_all(boards[1:])


STATUS = frame(FrameKind.STATUS, lane=1, number=1, payload=b'["exchange", "x", [0]]')


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: anybody\r\nAccept: everything\r\n\r\n",
        frame(FrameKind.CHUNK, lane=1, number=2, total=1, payload=b"a"),
        frame(FrameKind.LOST, lane=1, number=2, payload=b'["rank 9 is gone", 9, false]'),
    ],
    ids=lambda garbage: garbage[:20].hex(),
)
def test_words_that_mean_nothing_are_passed_on_to_nobody(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    further, listening = socket.socketpair()
    relay = relay_of(ours, further)
    theirs.sendall(STATUS + STATUS + garbage)
    listening.settimeout(PATIENCE_SECONDS)
    heard = listening.recv(1 << 16)
    while b"sent a frame of kind" not in heard:
        heard += listening.recv(1 << 16)
    assert heard.startswith(STATUS)
    assert heard.count(b"exchange") == 1  # once, though it came twice
    until(lambda: len(news := relay.news) == 2 and any(kind == FrameKind.LOST for kind, _ in news))
    relay.drop()
    for each in (theirs, listening):
        each.close()


BYE = frame(FrameKind.BYE, lane=1, number=1)


def test_a_rank_that_closes_calls_no_other_one_lost_that_closes_meanwhile() -> None:
    """What a rank reads once it has said goodbye it drops, with the goodbye of others."""
    ours, theirs = tcp_pair()
    further, listening = socket.socketpair()
    relay = relay_of(ours, further, remote={1})
    relay.end(frame(FrameKind.BYE))
    relay.spread(FrameKind.BYE)
    with relay.lock:  # before its thread reads what comes now
        theirs.sendall(BYE)
        theirs.shutdown(socket.SHUT_WR)
        relay.linger(time.monotonic() + PATIENCE_SECONDS)
    until(lambda: len(relay.by_descriptor) == 1)
    relay.drop()
    listening.settimeout(PATIENCE_SECONDS)
    assert listening.recv(1 << 10) == frame(FrameKind.BYE, number=1)
    assert listening.recv(1 << 10) == b""
    for each in (theirs, listening):
        each.close()


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_rank_that_has_said_goodbye_is_lost_to_nobody(says_goodbye: bool) -> None:
    """Rank 2 has not heard the goodbye."""
    ours, theirs = socket.socketpair()
    further, speaking = socket.socketpair()
    relay = relay_of(ours, further)
    board = Switchboard(0, {}, timeout_seconds=PATIENCE_SECONDS, kernels=(0, 0, 0), relay=relay)
    if says_goodbye:
        theirs.sendall(BYE)
        until(lambda: not board.has_failed() and board.known[1].said_bye)
    lost = ChannelVerdict(fact="rank 1 is gone", culprit=1).packed()
    status = frame(FrameKind.STATUS, lane=2, number=2, payload=b'["exchange", "x", [0]]')
    speaking.sendall(frame(FrameKind.LOST, lane=2, number=1, payload=lost) + status)
    until(lambda: board.has_failed() or board.known[2].status is not None)
    assert board.has_failed() is not says_goodbye
    board.drop()
    for each in (theirs, speaking):
        each.close()


def relay_of(*connections: socket.socket, remote: Collection[int] = ()) -> Relay:
    """Of rank 0, with ranks 1 and more for neighbours, and without listeners."""

    def call(rank: int, deadline: float) -> Any:
        raise ConnectionError("nobody is there")

    links = {rank: PeerLink(each, rank=rank, local=rank not in remote) for rank, each in enumerate(connections, 1)}
    size = len(connections) + 1
    connected = Connected(
        links=links, hosts=("node",) * size, kernels=(0,) * size, key=bytes(32), listeners=(), call=call
    )
    return Relay(0, connected, timeout_seconds=1.0)


def test_a_rank_that_cannot_be_reached_is_named_with_the_reason() -> None:
    ours, theirs = socket.socketpair()
    relay = relay_of(ours)
    board = Switchboard(0, {}, timeout_seconds=1.0, kernels=(0, 0), relay=relay)
    with pytest.raises(
        PeerError, match=r"rank 1 made no progress .*no connection to it: ConnectionError: nobody is there"
    ):
        channel_of(board).send(torch.ones(1), 1, purpose="anything").wait()
    board.drop()
    theirs.close()
