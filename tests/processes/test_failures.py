"""What survivors see when a rank dies, stops moving or gives up: an error that names it, and never a hang.

Each fault is tried over each way in which ranks are connected. Between devices survivors block in a read of theirs.
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from shardwise.comm import Channel, Work
from shardwise.comm.processes import processes
from shardwise.errors import PeerError
from shardwise.testing.library import compiler
from tests.processes.pool import SHARED_MEMORY, STRICT_DEVICE, TCP, Pool, Transport

LIMIT = {"timeout_seconds": 2.0}
TRANSPORTS = {
    **{"shared": SHARED_MEMORY, "tcp": TCP, "devices": STRICT_DEVICE},
    "shared, impatient": Transport(**LIMIT),  # type: ignore[arg-type]
    "tcp, impatient": Transport(without_shared_memory=None, **LIMIT),  # type: ignore[arg-type]
    "devices, impatient": Transport(device="strict", **LIMIT),  # type: ignore[arg-type]
}
either = pytest.mark.parametrize("transport", [SHARED_MEMORY, TCP], ids=["shared", "tcp"])

LARGE = 12 << 20
"""Elements (50 MB, for 2 or 3 ranks): what a rank publishes at once is only a part of its share."""

Told = tuple[str, int | None, str, str]


def begin_sum(channel: Channel, num_elements: int = 48) -> Work:
    total, own = (torch.ones(size, device=channel.device) for size in (num_elements // channel.size, num_elements))
    return channel.reduce_scatter(total, own, purpose="gradients")


def read(channel: Channel, work: Work) -> None:
    """Until the elements of a sum are there."""
    work.wait()
    if channel.device.type != "cpu":
        torch.accelerator.synchronize()


def told(channel: Channel, call: Callable[[], object]) -> Told:
    """What a survivor is told, in this call and in each one after it."""

    def read_and_call() -> None:
        call()
        channel.exchange(b"", purpose="after the read")  # which a device that waits for nobody any more leads to

    with pytest.raises(PeerError) as caught:
        read_and_call()
    with pytest.raises(PeerError) as again:
        channel.exchange(b"", purpose="afterwards")
    first = caught.value
    assert str(again.value) == str(first)
    return str(first), first.rank, first.operation, first.purpose


def lose_the_last(channel: Channel, way: str) -> Told | None:
    """All but the last rank have begun a sum, and wait for it."""
    read(channel, begin_sum(channel))  # from now on nobody waits for the others' calls
    last = channel.size - 1
    if channel.rank < last:
        work = begin_sum(channel, LARGE if "middle" in way else 48)
        channel.send(torch.zeros(1), last, purpose="begun").wait()
        return told(channel, lambda: read(channel, work))
    for rank in range(last):
        channel.receive(torch.zeros(1), rank, purpose="begun").wait()
    if "middle" in way:
        begin_sum(channel, LARGE)  # after the waits, each of which would publish more of it
    if way == "aborts":
        channel.abort("ValueError: the loss is not a number")
        return None
    os.kill(os.getpid(), signal.SIGSTOP if way == "stops" else signal.SIGKILL)
    return None


FAULTS = {
    "dies": "rank 2 is gone (its process died)",
    "dies in the middle": "rank 2 is gone (its process died)",
    "aborts": "rank 2 stopped: ValueError: the loss is not a number",
    "stops": "rank 2 made no progress for 2 s (last seen in re",
}


@pytest.mark.parametrize(
    ("way", "transport"),
    [
        *(("dies in the middle", each) for each in ("shared", "tcp")),
        *(("aborts", each) for each in ("shared", "tcp", "devices")),
        *(("stops", f"{each}, impatient") for each in ("shared", "tcp", "devices")),
        ("dies", "devices"),
    ],
)
def test_a_lost_rank_is_named_to_every_survivor(pool: Pool, way: str, transport: str) -> None:
    if "devices" in transport and compiler() is None:
        pytest.skip("no C++ compiler: nothing runs on the fake device")
    lost = [] if way == "aborts" else [2]
    results = pool.run(3, lose_the_last, way, transport=TRANSPORTS[transport], lost=lost, poisons=True)
    for rank in (0, 1):
        text, *rest = results[rank]
        assert text.startswith(FAULTS[way])
        assert text.endswith(f"while rank {rank} was in reduce_scatter for 'gradients'")
        assert rest == [2, "reduce_scatter", "gradients"]


def wait_for_each_other(channel: Channel) -> str:
    """Both ranks receive first, which no channel can carry out."""
    got = torch.empty(8, device=channel.device)
    with pytest.raises(PeerError) as caught:
        channel.receive(got, 1 - channel.rank, purpose=f"parcel {channel.rank}").wait()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["tcp, impatient", "devices, impatient"])
def test_ranks_that_wait_for_each_other_learn_what_the_other_waits_for(pool: Pool, transport: str) -> None:
    if "devices" in transport and compiler() is None:
        pytest.skip("no C++ compiler: nothing runs on the fake device")
    for text in pool.run(2, wait_for_each_other, transport=TRANSPORTS[transport], poisons=True):
        blamed = 1 if text.startswith("rank 1 made no progress for 2 s") else 0  # whoever was told first
        assert f"rank {blamed} made no progress for 2 s" in text
        assert f"it waits for rank {1 - blamed} in receive for 'parcel {blamed}'" in text or "devices" in transport


def stay() -> None:
    signal.alarm(200)
    signal.pause()


def die_with_a_child(channel: Channel) -> Told:
    """Rank 1 leaves a forked worker behind, as a data loader would."""
    if channel.rank == 1:
        worker = multiprocessing.get_context("fork").Process(target=stay)
        worker.start()
        channel.exchange(str(worker.pid).encode(), purpose="child")
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(channel.exchange(b"", purpose="child")[1])
    found = told(channel, lambda: begin_sum(channel).wait())
    os.kill(child, signal.SIGKILL)
    return found


@either
def test_a_forked_child_does_not_hide_the_death_of_its_parent(pool: Pool, transport: Transport) -> None:
    assert pool.run(2, die_with_a_child, transport=transport, lost=[1])[0][0].startswith("rank 1 is gone")


def make_another(channel: Channel) -> bool:
    """Whether hooks of the process are as they were once there is another channel."""
    before = sys.excepthook
    with mock.patch("os.register_at_fork") as registered:
        another = processes(device=torch.device("cpu"))
    is_same = sys.excepthook is before and not registered.called
    another.close()
    return is_same


def test_to_make_a_channel_changes_no_hook_of_the_process(pool: Pool) -> None:
    assert pool.run(2, make_another) == [True, True]


def call_in_a_child(channel: Channel) -> str:
    """What a forked child hears that calls the channel of its parent, which goes on."""
    heard, tell = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            channel.exchange(b"", purpose="in a worker")
        except PeerError as error:
            os.write(tell, str(error).encode())
        os._exit(0)
    os.close(tell)
    said = os.read(heard, 1000).decode()
    os.close(heard)
    os.waitpid(child, 0)
    channel.exchange(b"", purpose="goes on")
    return said


def test_a_forked_child_that_calls_its_parents_channel_hears_whose_it_is(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(2, call_in_a_child)):
        assert said.startswith(f"this process was forked from rank {rank}, which alone can use its channel")


def lose_one_of_the_tree(channel: Channel, victim: int, deed: int) -> Told:
    """A rank that most others have no link to ends, or stops, between two exchanges along the tree."""
    channel.exchange(b"", purpose="start")
    if channel.rank == victim:
        os.kill(os.getpid(), deed)
    return told(channel, lambda: channel.exchange(b"", purpose="figures"))


@pytest.mark.parametrize(
    ("victim", "deed", "transport", "words"),
    [
        (0, signal.SIGKILL, "tcp", "is gone (its process died), while rank "),
        (1, signal.SIGSTOP, "shared, impatient", "made no progress for 2 s (last seen in exchange for 'start'"),
    ],
    ids=["root killed", "inner one stopped"],
)
def test_a_lost_rank_of_the_tree_is_named_to_all_the_others(
    pool: Pool, victim: int, deed: int, transport: str, words: str
) -> None:
    results = pool.run(7, lose_one_of_the_tree, victim, deed, transport=TRANSPORTS[transport], lost=[victim])
    for rank in set(range(7)) - {victim}:
        text, culprit, *_ = results[rank]
        assert text.startswith(f"rank {victim} {words}"), text
        assert text.endswith(f", while rank {rank} was in exchange for 'figures'")
        assert culprit == victim


def finish_without_the_aborted(channel: Channel) -> float:
    """What rank 1 aborts after is complete on all ranks: those that wait for it get it."""
    output = torch.empty(LARGE)
    channel.all_gather(output, torch.full((LARGE // 2,), float(channel.rank)), purpose="done by all").wait()
    if channel.rank == 1:
        channel.abort("enough")
    return float(output.sum())


@either
def test_an_abort_does_not_take_back_what_was_given(pool: Pool, transport: Transport) -> None:
    assert pool.run(2, finish_without_the_aborted, transport=transport, poisons=True) == [LARGE / 2] * 2


def fall_back(channel: Channel) -> tuple[bool, float]:
    """Rank 1 cannot open its local connections, although it believed so."""
    connect = socket.socket.connect

    def without_local(self: socket.socket, address: object) -> None:
        if self.family == socket.AF_UNIX:
            raise ConnectionRefusedError("no local connections today")
        connect(self, address)  # type: ignore[arg-type]

    with mock.patch.object(socket.socket, "connect", without_local if channel.rank else connect):
        fresh = processes(timeout_seconds=20)
        output = torch.empty(4 * channel.size)
        fresh.all_gather(output, torch.full((4,), float(channel.rank)), purpose="over TCP").wait()
        local = [link.local for link in fresh.board.links.values()]  # type: ignore[attr-defined]
        fresh.close()
    return any(local), float(output.sum())


def test_all_ranks_fall_back_to_tcp_together_when_one_local_connection_fails(pool: Pool) -> None:
    assert pool.run(2, fall_back) == [(False, 4.0)] * 2
