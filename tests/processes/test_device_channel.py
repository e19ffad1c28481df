"""The channel between devices, over the strict double of NCCL: the program's own groups, its end, and how it adds."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comm import Channel
from shardwise.comm.device_channel import DeviceChannel
from shardwise.comm.processes import ProcessChannel
from shardwise.testing import strict
from shardwise.testing.library import compiler
from tests.contracts.channel_cases import CASES
from tests.contracts.channel_fault_cases import refuse_message
from tests.contracts.channel_oracles import assert_same_bits, gather_and_check, given, part_of, values
from tests.processes.pool import SHARED_MEMORY, STRICT_DEVICE, Pool

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: nothing runs on the fake device")


def use_own_groups(channel: Channel) -> tuple[int, int, int]:
    """Ranks with other histories of groups, in a process group that is bound to a device, make channels and parts."""
    assert isinstance(channel, DeviceChannel)
    world = dist.group.WORLD
    assert world is not None
    if channel.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    before, others = len(dist.distributed_c10d._world.pg_names), sockets()
    world.bound_device_id = channel.device
    try:
        made = sw.processes(timeout_seconds=20, device=channel.device)
        for part in (made, made.over([0, 1] if channel.rank < 2 else [2])):
            gather_and_check(part, [3] * part.size, torch.float32, "own groups")
            if part.size > 1:
                next(case for case in CASES if case.name == "a_ring_passes_on")(part)
        made.close()
    finally:
        world.bound_device_id = None
    deadline = time.monotonic() + 10
    while sockets() > others and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, len(dist.distributed_c10d._world.pg_names), sockets() - others


def sockets() -> int:
    """How many this process has: those of communicators, and of the channels of their hosts."""
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(each) and "socket" in os.readlink(each) for each in links)


def test_a_channel_leaves_the_programs_groups_alone_and_frees_its_own(pool: Pool) -> None:
    for before, after, left in pool.run(3, use_own_groups, transport=STRICT_DEVICE, poisons=True):
        assert before == after
        assert left == 0


def close_while_another_thread_looks(channel: Channel) -> None:
    """A message was refused, so that its operation waits on the device; then a thread looks for news at the close."""
    made = sw.processes(timeout_seconds=20, device=channel.device)
    assert isinstance(made, DeviceChannel)
    assert isinstance(made.control, ProcessChannel)
    refuse_message(made, given(made, 3, torch.float32), given(made, 5, torch.float32), ["apples", "apples"])
    board, looks = made.control.board, threading.Event()
    deadline = time.monotonic() + 10
    while not made._communicators._made and time.monotonic() < deadline:
        time.sleep(0.01)  # both ranks connect, whatever was refused

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


class Wide(nn.Module):
    """Parameters of several dtypes. One has a single element, so that most ranks own nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.wide = nn.Parameter(torch.linspace(0.5, 1.5, 7, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.double() * self.wide * self.scale


def sums_of_gradients(channel: Channel, plan: sw.Plan, k: int) -> tuple[dict[str, torch.Tensor], tuple[int, int, int]]:
    """Values after two steps; bytes of gradients that a step has given to the library, those recorded and planned."""
    torch.manual_seed(0)
    recorded = sw.Recorded(channel)
    engine = sw.parallelize(
        Wide(),
        plan,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-2),
        loss=lambda output, _: output.square().mean(),
        channel=recorded,
    )
    batches = [torch.randn(2 * k, 7, generator=torch.Generator().manual_seed(10 * n + channel.rank)) for n in range(2)]
    given_before = 0
    for batch in batches:
        wait_for(channel)
        given_before = bytes_of_sums(channel)
        recorded.clear()
        engine.step({"x": batch}, microbatches=k)
    wait_for(channel)
    # Sums over replicas are gathered too, which is no part of what is added.
    planned = engine.traffic(microbatches=k).reduce_bytes - sum(
        call.bytes_sent
        for call in recorded.calls
        if call.operation == "all_gather" and call.purpose.startswith("gradients")
    )
    sent = (bytes_of_sums(channel) - given_before, recorded.bytes_sent("reduce_scatter"), planned)
    return dict(sw.full(engine)), sent


def wait_for(channel: Channel) -> None:
    if isinstance(channel, DeviceChannel):
        torch.accelerator.synchronize()


def bytes_of_sums(channel: Channel) -> int:
    sent = strict.sent_bytes() if isinstance(channel, DeviceChannel) else {}
    return sent.get("ALLTOALL", 0) + sent.get("REDUCE_SCATTER", 0)


@pytest.mark.parametrize(
    ("size", "stage", "k", "compute", "mesh"),
    [
        (2, 1, 1, "bfloat16", "dp_shard=2"),
        (3, 1, 4, "float32", "dp_shard=3"),
        (4, 0, 1, "float16", "dp_shard=4"),
        (4, 1, 4, "bfloat16", "dp_replicate=2,dp_shard=2"),
        (3, 2, 4, "bfloat16", "dp_shard=3"),
        (2, 3, 1, "float16", "dp_shard=2"),
    ],
)
def test_gradients_travel_as_they_are_and_are_summed_as_on_the_cpu(
    pool: Pool, size: int, stage: int, k: int, compute: str, mesh: str
) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=200, owners="dp_shard"),
        precision=sw.Precision(compute=compute, keep=("scale",)),
    )
    results = pool.run(size, sums_of_gradients, plan, k, transport=STRICT_DEVICE)
    expected = pool.run(size, sums_of_gradients, plan, k, transport=SHARED_MEMORY)
    for (trained_values, (sent, recorded, planned)), (cpu_values, _) in zip(results, expected, strict=True):
        assert sent == recorded == planned > 0
        assert all(torch.equal(trained_values[name], cpu_values[name]) for name in cpu_values)


def sums_of_backend(channel: Channel) -> list[tuple[torch.Tensor, int]]:
    """Sums by the library, each with the bytes given to it."""
    assert isinstance(channel, DeviceChannel)
    asked = channel.summing("backend")
    assert asked.over(range(channel.size)) is asked
    found = []
    for own, total in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.complex64,) * 2):
        for counts in ([5] * channel.size, [3 * rank for rank in range(channel.size)]):
            output = torch.empty(counts[channel.rank], dtype=total, device=channel.device)
            before = bytes_of_sums(channel)
            asked.reduce_scatter(output, given(asked, sum(counts), own), purpose="by the library", counts=counts).wait()
            found.append((output.cpu(), bytes_of_sums(channel) - before))
    return found


def test_sums_that_are_left_to_the_library_are_in_the_dtype_that_travels(pool: Pool) -> None:
    size = 3
    for rank, found in enumerate(pool.run(size, sums_of_backend, transport=STRICT_DEVICE)):
        for own, total in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.complex64,) * 2):
            for counts in ([5] * size, [3 * each for each in range(size)]):
                terms = [part_of(values(each, sum(counts), own), counts, rank) for each in range(size)]
                output, sent = found.pop(0)
                assert_same_bits(output, (terms[0] + terms[1] + terms[2]).to(total))
                assert sent == (sum(counts) - counts[rank]) * own.itemsize
