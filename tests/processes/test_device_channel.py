"""The device channel on an emulated device: the contract, the program's own groups, and what runs on it."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comm import Channel
from shardwise.comm.device_channel import DeviceChannel
from shardwise.comm.processes import ProcessChannel
from tests.contracts.channel_cases import CASES
from tests.contracts.channel_fault_cases import refuse_message
from tests.contracts.channel_oracles import Case, assert_same_bits, gather_and_check, given, part_of, values
from tests.processes.emulated_device import EmulatedCommunicator, emulated
from tests.processes.pool import EMULATED_DEVICE, SHARED_MEMORY, Pool
from tests.processes.test_channel_contract import run_case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_device_fulfils_the_contract(pool: Pool, case: Case, size: int) -> None:
    pool.run(size, run_case, case.name, transport=EMULATED_DEVICE, poisons=case.poisons)


def use_own_groups(channel: Channel) -> tuple[int, int, int]:
    """Ranks with other histories of groups, in a process group that is bound to a device, make channels and parts."""
    assert isinstance(channel, DeviceChannel)
    world = dist.group.WORLD
    assert world is not None
    if channel.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    before, others = len(dist.distributed_c10d._world.pg_names), streams()
    world.bound_device_id = torch.device("cuda", 0)
    try:
        made = emulated(sw.comm.processes(), timeout_seconds=20, waits_on_host=True)
        for part in (made, made.over([0, 1] if channel.rank < 2 else [2])):
            gather_and_check(part, [3] * part.size, torch.float32, "own groups")
            if part.size > 1:
                next(case for case in CASES if case.name == "a_ring_passes_on")(part)
        made.close()
    finally:
        world.bound_device_id = None
    deadline = time.monotonic() + 10
    while streams() - others and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, len(dist.distributed_c10d._world.pg_names), len(streams() - others)


def streams() -> set[threading.Thread]:
    """Those of communicators that have not been given back."""
    return {each for each in threading.enumerate() if each.name == "emulated stream"}


def test_a_channel_leaves_the_programs_groups_alone_and_frees_its_own(pool: Pool) -> None:
    for before, after, left in pool.run(3, use_own_groups, transport=EMULATED_DEVICE, poisons=True):
        assert before == after
        assert left == 0


def close_while_another_thread_looks(channel: Channel) -> None:
    """A message was refused, so that its operation waits on the device; then a thread looks for news at the close."""
    made = emulated(sw.comm.processes(), timeout_seconds=20, waits_on_host=True)
    assert isinstance(made, DeviceChannel)
    assert isinstance(made.control, ProcessChannel)
    refuse_message(made, given(made, 3, torch.float32), given(made, 5, torch.float32), ["apples", "apples"])
    board, looks = made.control._board, threading.Event()
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
    pool.run(2, close_while_another_thread_looks, transport=EMULATED_DEVICE, poisons=True)


class Tied(nn.Module):
    """An embedding that is the head too, and an activation that several later stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = hidden = self.embedding(x)
        for number, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden)) + (first if number % 3 == 2 else 0)
        return self.head(hidden)  # type: ignore[no-any-return]


def loss_of(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


def trained(channel: Channel, plan: sw.Plan, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps, and what is then gathered, saved as whole tensors, and loaded under another layout."""
    torch.manual_seed(0)
    engine = sw.parallelize(
        Tied(), plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), loss=loss_of, channel=channel
    )
    tokens = torch.arange(16)
    losses = [engine.step({"x": tokens, "y": tokens.roll(number)}).loss for number in range(2)]
    values = dict(sw.full(engine))
    sw.save(folder, engine, layout="whole")
    other = sw.parallelize(
        Tied(),
        sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), sharding=sw.Sharding(stage=3)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        loss=loss_of,
        channel=channel,
    )
    sw.load(folder, other)
    losses.append(other.step({"x": tokens, "y": tokens}).loss)
    return losses, values


def pipelined(schedule: str, size: int) -> sw.Plan:
    pipeline = sw.Pipeline(schedule=schedule, chunks=2 if schedule == "interleaved" else None)
    return sw.Plan(mesh=sw.Mesh(pp=size), pipeline=pipeline, merge=sw.Merge(microbatches=4))


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (2, pipelined("interleaved", 2)),
        (3, pipelined("1f1b", 3)),
    ],
    ids=["2-interleaved", "3-1f1b"],
)
def test_training_and_moving_state_are_those_of_the_cpu(pool: Pool, size: int, plan: sw.Plan, tmp_path: Path) -> None:
    results = pool.run(size, trained, plan, tmp_path / "device", transport=EMULATED_DEVICE)
    expected = pool.run(size, trained, plan, tmp_path / "cpu", transport=SHARED_MEMORY)
    for (losses, found), (cpu_losses, cpu_found) in zip(results, expected, strict=True):
        assert losses == cpu_losses
        assert found.keys() == cpu_found.keys()
        assert all(torch.equal(found[name], cpu_found[name]) for name in found)


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
        given_before = bytes_of_sums(channel)
        recorded.clear()
        engine.step({"x": batch}, microbatches=k)
    # Sums over replicas are gathered too, which is no part of what is added.
    planned = engine.traffic(microbatches=k).reduce_bytes - sum(
        call.bytes_sent
        for call in recorded.calls
        if call.operation == "all_gather" and call.purpose.startswith("gradients")
    )
    sent = (bytes_of_sums(channel) - given_before, recorded.bytes_sent("reduce_scatter"), planned)
    return dict(sw.full(engine)), sent


def bytes_of_sums(channel: Channel) -> int:
    if not isinstance(channel, DeviceChannel):
        return 0
    made = channel._communicators._made.values()
    return sum(each.bytes_sent for each in made if isinstance(each, EmulatedCommunicator))


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
    results = pool.run(size, sums_of_gradients, plan, k, transport=EMULATED_DEVICE)
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
            output = torch.empty(counts[channel.rank], dtype=total)
            before = bytes_of_sums(channel)
            asked.reduce_scatter(output, given(asked, sum(counts), own), purpose="by the library", counts=counts).wait()
            found.append((output, bytes_of_sums(channel) - before))
    return found


def test_sums_that_are_left_to_the_library_are_in_the_dtype_that_travels(pool: Pool) -> None:
    size = 3
    for rank, found in enumerate(pool.run(size, sums_of_backend, transport=EMULATED_DEVICE)):
        for own, total in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.complex64,) * 2):
            for counts in ([5] * size, [3 * each for each in range(size)]):
                terms = [part_of(values(each, sum(counts), own), counts, rank) for each in range(size)]
                output, sent = found.pop(0)
                assert_same_bits(output, (terms[0] + terms[1] + terms[2]).to(total))
                assert sent == (sum(counts) - counts[rank]) * own.itemsize
