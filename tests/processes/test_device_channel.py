"""The channel between devices, over the strict double of NCCL: the program's own groups, how it adds, and how it ends.

What it carries is the contract of channels; what is told of lost ranks is in test_failures.py.
"""

import contextlib
import os
import signal
import threading
import time
from typing import Literal

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import errors
from shardwise.comm import Channel, Work
from shardwise.comm.device.channel import DeviceChannel
from shardwise.comm.process.channel import ProcessChannel
from shardwise.errors import CallMismatchError, PeerError
from shardwise.testing import strict
from shardwise.testing.channels.faults import refuse_message
from shardwise.testing.channels.oracles import assert_same_bits, gather_and_check, given, part_of, values
from shardwise.testing.library import compiler
from tests.contracts.channel_cases import run_case
from tests.processes.pool import STRICT_DEVICE, Pool, Transport

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: nothing runs on the fake device")

PATIENCE_SECONDS = 60.0
LONG = Transport(device="strict", timeout_seconds=2 * PATIENCE_SECONDS)
"""A fault that was noticed only by the lack of progress would be told in other words."""


def use_own_groups(channel: Channel) -> tuple[int, int]:
    """Ranks with other histories of groups, in a process group that is bound to a device, make channels and parts."""
    world = dist.group.WORLD
    assert world is not None
    if channel.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    before = sockets()
    world.bound_device_id = channel.device
    try:
        made = sw.processes(timeout_seconds=20, device=channel.device)
        for part in (made, made.over([0, 1] if channel.rank < 2 else [2])):
            gather_and_check(part, [3] * part.size, torch.float32, "own groups")
            if part.size > 1:
                run_case(part, "a_ring_passes_on")
        made.close()
    finally:
        world.bound_device_id = None
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sockets() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, sockets()


def sockets() -> int:
    """How many this process has: those of communicators, and of the channels of their hosts."""
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # other threads close theirs meanwhile
            found += "socket" in os.readlink(f"/proc/self/fd/{each}")
    return found


def test_a_channel_works_beside_the_programs_groups_and_frees_its_own(pool: Pool) -> None:
    for before, after in pool.run(3, use_own_groups, transport=STRICT_DEVICE, poisons=True):
        assert after <= before


def message(channel: Channel, operation: str) -> Work:
    """The one of rank 0 or, on rank 1, its other side."""
    is_sent = (operation == "send") == (channel.rank == 0)
    return (channel.send if is_sent else channel.receive)(
        torch.ones(8, device=channel.device), 1 - channel.rank, purpose="let go"
    )


def close_while_another_thread_looks(channel: Channel) -> None:
    """A message was refused, so that its operation waits on the device; then a thread looks for news at the close."""
    made = sw.processes(timeout_seconds=20, device=channel.device)
    assert isinstance(made, DeviceChannel)
    assert isinstance(made.control, ProcessChannel)
    message(made, "send").wait()  # connects both, so that the next operation begins in its call
    torch.accelerator.synchronize()
    refuse_message(made, errors, given(made, 3, torch.float32), given(made, 5, torch.float32), ["apples", "apples"])
    board, looks = made.control.board, threading.Event()

    def look() -> None:
        with board.lock:
            looks.set()
            time.sleep(0.3)

    thread = threading.Thread(target=look)
    thread.start()
    looks.wait()
    made.close()
    thread.join()


def test_a_channel_that_has_failed_ends_its_operations_whatever_another_thread_does(pool: Pool) -> None:
    pool.run(2, close_while_another_thread_looks, transport=STRICT_DEVICE, poisons=True)


# How it adds.


def bytes_of_sums() -> int:
    sent = strict.sent_bytes()
    return sent.get("ALLTOALL", 0) + sent.get("REDUCE_SCATTER", 0)


SUMS = [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.complex64, torch.complex64)]


def sums_with_bytes(channel: Channel, by: Literal["exact", "backend"]) -> list[tuple[torch.Tensor, int]]:
    """Each with the bytes given to the library."""
    assert isinstance(channel, DeviceChannel)
    asked = channel.summing(by)
    assert asked.over(range(channel.size)) is asked
    found = []
    for own, total in SUMS:
        for counts in ([5] * channel.size, [3 * rank for rank in range(channel.size)]):
            output = torch.empty(counts[channel.rank], dtype=total, device=channel.device)
            before = bytes_of_sums()
            asked.reduce_scatter(output, given(asked, sum(counts), own), purpose="sums", counts=counts).wait()
            found.append((output.cpu(), bytes_of_sums() - before))
    return found


@pytest.mark.parametrize("by", ["exact", "backend"])
def test_all_sums_travel_in_their_own_dtype_and_those_of_the_library_are_added_in_it(pool: Pool, by: str) -> None:
    size = 3
    for rank, found in enumerate(pool.run(size, sums_with_bytes, by, transport=STRICT_DEVICE)):
        for own, total in SUMS:
            for counts in ([5] * size, [3 * each for each in range(size)]):
                terms = [part_of(values(each, sum(counts), own), counts, rank) for each in range(size)]
                output, sent = found.pop(0)
                added = [each.to(total if by == "exact" else own) for each in terms]
                assert_same_bits(output, (added[0] + added[1] + added[2]).to(total))
                assert sent == (sum(counts) - counts[rank]) * own.itemsize


# How it ends.


def begin_sum(channel: Channel) -> None:
    total, own = (torch.ones(size, device=channel.device) for size in (8, 8 * channel.size))
    channel.reduce_scatter(total, own, purpose="gradients").wait()


def close_without_the_last_call(channel: Channel) -> tuple[str, int | None] | None:
    """The last rank leaves out a call that all have agreed on before. The others read, and make no call any more."""
    begin_sum(channel)
    torch.accelerator.synchronize()
    if channel.rank == channel.size - 1:
        return None
    begin_sum(channel)
    torch.accelerator.synchronize()
    with pytest.raises(PeerError) as caught:
        channel.close()
    channel.close()  # once is enough
    return str(caught.value), caught.value.rank


def test_a_read_from_a_device_that_waits_for_a_rank_that_has_closed_its_channel_ends_in_words(pool: Pool) -> None:
    """Though nothing but `close` can say them."""
    for rank, said in enumerate(pool.run(3, close_without_the_last_call, transport=LONG, poisons=True)[:2]):
        assert said == (f"rank 2 has closed its channel, while rank {rank} was in reduce_scatter for 'gradients'", 2)


def close_before_the_wait(channel: Channel, operation: str, was_used: bool) -> tuple[str, int | None] | None:
    """Rank 0 lets go of a message, whose other side rank 1 never calls."""
    if was_used:
        message(channel, operation).wait()
        torch.accelerator.synchronize()
    channel.exchange(b"", purpose="start")
    if channel.rank == 1:
        return None  # it closes its channel at the end of the program
    message(channel, operation)
    with pytest.raises(PeerError) as caught:
        channel.close()
    return str(caught.value), caught.value.rank


@pytest.mark.parametrize(
    ("operation", "was_used"), [("send", True), ("receive", False)], ids=["connected", "not connected"]
)
def test_a_channel_closes_in_words_over_a_message_that_nobody_waits_for(
    pool: Pool, operation: str, was_used: bool
) -> None:
    said, _ = pool.run(2, close_before_the_wait, operation, was_used, transport=LONG, poisons=True)
    assert said == (f"rank 1 has closed its channel, while rank 0 was in {operation} for 'let go'", 1)


def receive_when_the_sender_closes(channel: Channel, num_messages: int) -> list[float]:
    received = [torch.zeros(8, device=channel.device) for _ in range(num_messages)]
    if channel.rank == 0:
        for number in range(num_messages):
            channel.send(torch.full((8,), number + 1.0, device=channel.device), 1, purpose="let go")
        channel.send(torch.zeros(1), 1, purpose="all are sent").wait()  # between the hosts
    else:
        channel.receive(torch.zeros(1), 0, purpose="all are sent").wait()
        for each in received:
            channel.receive(each, 0, purpose="let go").wait()
        torch.accelerator.synchronize()
    channel.close()
    return [float(each.sum()) for each in received]


@pytest.mark.parametrize("num_messages", [1, 100])
def test_a_message_that_nobody_waits_for_arrives_before_the_channel_closes(pool: Pool, num_messages: int) -> None:
    results = pool.run(2, receive_when_the_sender_closes, num_messages, transport=STRICT_DEVICE, poisons=True)
    assert results[1] == [8.0 * (number + 1) for number in range(num_messages)]


def send_to_the_dead(channel: Channel) -> tuple[str, int | None]:
    channel.exchange(b"", purpose="start")
    if channel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError) as caught:
        channel.send(torch.ones(8, device=channel.device), 1, purpose="activation").wait()
    return str(caught.value), caught.value.rank


def test_a_message_to_a_rank_that_never_connects_ends_in_an_error(pool: Pool) -> None:
    said, _ = pool.run(2, send_to_the_dead, transport=STRICT_DEVICE, lost=[1])
    assert said == ("rank 1 is gone (its process died), while rank 0 was in send for 'activation'", 1)


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
