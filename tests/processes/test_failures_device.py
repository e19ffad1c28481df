"""What survivors see whose device waits for a rank that dies, gives up or stops moving: an error, and never a hang."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import Channel, Work
from shardwise.errors import CallMismatchError, PeerError
from shardwise.testing.library import compiler
from tests.processes.pool import STRICT_DEVICE, Pool, Transport

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: nothing runs on the fake device")

IMPATIENT = Transport(device="strict", timeout_seconds=2.0)

Told = tuple[str, int | None, str, str, float]


def sum_of(channel: Channel, purpose: str) -> None:
    total, own = (torch.ones(size, device=channel.device) for size in (8, 8 * channel.size))
    channel.reduce_scatter(total, own, purpose=purpose).wait()


def told(channel: Channel, begin: float) -> Told:
    """What the next call says, once the host has come back from its read."""
    torch.accelerator.synchronize()
    taken = time.monotonic() - begin
    with pytest.raises(PeerError) as caught:
        channel.exchange(b"", purpose="after the read")
    error = caught.value
    return str(error), error.rank, error.operation, error.purpose, taken


def lose_the_last(channel: Channel, way: str) -> Told | None:
    """All but the last rank block in a read of a sum that needs it."""
    sum_of(channel, "gradients")  # from now on nobody waits for the others' calls
    torch.accelerator.synchronize()
    store = dist.distributed_c10d._get_default_store()
    if channel.rank == channel.size - 1:
        store.wait([f"{way}: rank {rank} reads" for rank in range(channel.rank)])
        if way == "aborts":
            channel.abort("ValueError: the loss is not a number")
            return None
        os.kill(os.getpid(), signal.SIGKILL if way == "dies" else signal.SIGSTOP)
    begin = time.monotonic()
    sum_of(channel, "gradients")
    store.set(f"{way}: rank {channel.rank} reads", "")
    return told(channel, begin)


@pytest.mark.parametrize(
    ("way", "transport", "expected"),
    [
        ("dies", STRICT_DEVICE, "rank 2 is gone (its process died)"),
        ("aborts", STRICT_DEVICE, "rank 2 stopped: ValueError: the loss is not a number"),
        ("stops", IMPATIENT, "rank 2 made no progress for 2 s (last seen in reduce_scatter for 'gradients'"),
    ],
    ids=["dies", "aborts", "stops"],
)
def test_a_host_that_reads_from_its_device_learns_of_a_lost_rank(
    pool: Pool, way: str, transport: Transport, expected: str
) -> None:
    lost = [] if way == "aborts" else [2]
    results = pool.run(3, lose_the_last, way, transport=transport, lost=lost, poisons=True)
    for rank in (0, 1):
        text, culprit, operation, purpose, taken = results[rank]
        assert text.startswith(expected)
        assert text.endswith(f"while rank {rank} was in reduce_scatter for 'gradients'")
        assert (culprit, operation, purpose) == (2, "reduce_scatter", "gradients")
        assert taken < 8


def close_without_the_last_call(channel: Channel) -> Told | None:
    """The last rank leaves out a call that all have agreed on before. The others read, and make no call any more."""
    sum_of(channel, "gradients")
    torch.accelerator.synchronize()
    if channel.rank == channel.size - 1:
        return None
    begin = time.monotonic()
    sum_of(channel, "gradients")
    torch.accelerator.synchronize()
    with pytest.raises(PeerError) as caught:
        channel.close()
    error = caught.value
    channel.close()  # once is enough
    return str(error), error.rank, error.operation, error.purpose, time.monotonic() - begin


def test_a_read_from_a_device_that_waits_for_a_rank_that_has_closed_its_channel_ends_in_words(pool: Pool) -> None:
    """Soon, and though nothing but `close` can say them."""
    transport = Transport(device="strict", timeout_seconds=40.0)
    results = pool.run(3, close_without_the_last_call, transport=transport, poisons=True)
    for rank in (0, 1):
        text, culprit, operation, purpose, taken = results[rank]
        assert text == f"rank 2 has closed its channel, while rank {rank} was in reduce_scatter for 'gradients'"
        assert (culprit, operation, purpose) == (2, "reduce_scatter", "gradients")
        assert taken < 20


def close_before_the_wait(channel: Channel, operation: str, was_used: bool) -> Told | None:
    """Rank 0 lets go of a message, whose other side rank 1 never calls."""
    if was_used:
        message(channel, operation).wait()
        torch.accelerator.synchronize()
    channel.exchange(b"", purpose="start")
    begin = time.monotonic()
    if channel.rank == 1:
        return None  # it closes its channel at the end of the program
    message(channel, operation)
    with pytest.raises(PeerError) as caught:
        channel.close()
    error = caught.value
    return str(error), error.rank, error.operation, error.purpose, time.monotonic() - begin


def message(channel: Channel, operation: str) -> Work:
    """The one of rank 0 or, on rank 1, its other side."""
    is_sent = (operation == "send") == (channel.rank == 0)
    return (channel.send if is_sent else channel.receive)(
        torch.ones(8, device=channel.device), 1 - channel.rank, purpose="let go"
    )


@pytest.mark.parametrize(
    ("operation", "was_used"), [("send", True), ("receive", False)], ids=["connected", "not connected"]
)
def test_a_channel_closes_in_words_over_a_message_that_nobody_waits_for(
    pool: Pool, operation: str, was_used: bool
) -> None:
    transport = Transport(device="strict", timeout_seconds=40.0)
    results = pool.run(2, close_before_the_wait, operation, was_used, transport=transport, poisons=True)
    text, culprit, told_operation, purpose, taken = results[0]
    assert text == f"rank 1 has closed its channel, while rank 0 was in {operation} for 'let go'"
    assert (culprit, told_operation, purpose) == (1, operation, "let go")
    assert taken < 20


def receive_when_the_sender_closes(channel: Channel, num_messages: int) -> list[float]:
    store = dist.distributed_c10d._get_default_store()
    received = [torch.zeros(8, device=channel.device) for _ in range(num_messages)]
    if channel.rank == 0:
        for number in range(num_messages):
            channel.send(torch.full((8,), number + 1.0, device=channel.device), 1, purpose="let go")
        store.set(f"{num_messages} are sent", "")
    else:
        store.wait([f"{num_messages} are sent"])
        for each in received:
            channel.receive(each, 0, purpose="let go").wait()
        torch.accelerator.synchronize()
    channel.close()
    return [float(each.sum()) for each in received]


@pytest.mark.parametrize("num_messages", [1, 100])
def test_a_message_that_nobody_waits_for_arrives_before_the_channel_closes(pool: Pool, num_messages: int) -> None:
    results = pool.run(2, receive_when_the_sender_closes, num_messages, transport=STRICT_DEVICE, poisons=True)
    assert results[1] == [8.0 * (number + 1) for number in range(num_messages)]


def send_to_the_dead(channel: Channel) -> Told | None:
    channel.exchange(b"", purpose="start")
    if channel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(PeerError) as caught:
        channel.send(torch.ones(8, device=channel.device), 1, purpose="activation").wait()
    error = caught.value
    return str(error), error.rank, error.operation, error.purpose, time.monotonic() - begin


def test_a_message_to_a_rank_that_never_connects_ends_in_an_error(pool: Pool) -> None:
    text, culprit, operation, purpose, taken = pool.run(2, send_to_the_dead, transport=STRICT_DEVICE, lost=[1])[0]
    assert text == "rank 1 is gone (its process died), while rank 0 was in send for 'activation'"
    assert (culprit, operation, purpose) == (1, "send", "activation")
    assert taken < 8


def gather_in_another_order(channel: Channel) -> str:
    """The last rank gathers other things first. All have agreed on both before, and send no message about them.

    NCCL, and its strict double, see equal calls."""
    whole = torch.empty(8 * channel.size, device=channel.device)
    purposes = ["weights", "biases"]

    def gather(purposes: list[str]) -> None:
        for purpose in purposes:
            channel.all_gather(whole, whole[:8].clone(), purpose=purpose).wait()
        torch.accelerator.synchronize()

    gather(purposes)
    channel.exchange(b"", purpose="start")
    gather(purposes if channel.rank == channel.size - 1 else purposes[::-1])
    with pytest.raises(CallMismatchError) as caught:
        channel.exchange(b"", purpose="after the read")
    return str(caught.value)


def test_hosts_that_read_from_devices_in_different_calls_learn_which(pool: Pool) -> None:
    for text in pool.run(3, gather_in_another_order, transport=STRICT_DEVICE, poisons=True):
        assert "  - rank 2: all_gather for 'weights' of float32" in text
        assert text.count("all_gather for 'biases' of float32") == 1


def wait_for_each_other(channel: Channel) -> str:
    """Both ranks receive first, which no channel can carry out."""
    with pytest.raises(PeerError) as caught:
        channel.receive(
            torch.empty(8, device=channel.device), 1 - channel.rank, purpose=f"parcel {channel.rank}"
        ).wait()
    return str(caught.value)


def test_ranks_that_wait_for_each_other_are_named(pool: Pool) -> None:
    for text in pool.run(2, wait_for_each_other, transport=IMPATIENT, poisons=True):
        assert "made no progress for 2 s" in text
