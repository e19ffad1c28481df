"""The strict double of NCCL: what is right passes with the numbers of one process, and what NCCL cannot do is refused.

A function here runs on every rank with a group of the backend "strict", on devices that run as late as they can.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm import Channel
from shardwise.testing import strict
from shardwise.testing.accelerator import VISIBLE, visible
from shardwise.testing.library import compiler
from tests.processes.pool import STRICT_AT_ONCE, STRICT_DEVICE, Pool, Transport

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: nothing runs on the fake device"),
]

Group = dist.ProcessGroup
Use = Callable[[int, Group], Any]
SHORT = timedelta(seconds=2)


def filled(value: float, size: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((size,), value, dtype=dtype, device="fake")


def with_group(channel: Channel, name: str, *, seconds: float = 60.0) -> Any:
    """Call the use of this name with a group of its own."""
    group = dist.new_group(list(range(channel.size)), timeout=timedelta(seconds=seconds), backend="strict")
    found = USES[name](channel.rank, group)
    torch.accelerator.synchronize()
    dist.destroy_process_group(group)
    return found


def refused(channel: Channel, name: str, seconds: float) -> str:
    """What says no: the call, or the device when it has come so far."""
    try:
        with_group(channel, name, seconds=seconds)
    except (RuntimeError, ValueError, TypeError) as error:
        return " / ".join([str(error), *strict.faults()])
    return " / ".join(strict.faults())


def all_collectives(rank: int, group: Group) -> list[list[float]]:
    """One of each; the lists of numbers that a rank has then."""
    found: list[torch.Tensor] = []
    for kind, dtype in (
        (dist.ReduceOp.SUM, torch.float32),
        (dist.ReduceOp.MAX, torch.int64),
        (dist.ReduceOp.AVG, torch.float64),
    ):
        found.append(x := filled(rank + 1, dtype=dtype))
        dist.all_reduce(x, kind, group=group)
    found.append(x := filled(rank + 1))
    dist.broadcast(x, group_src=1, group=group)
    found.append(x := filled(rank + 1))
    dist.reduce(x, group_dst=0, group=group)
    found.append(whole := filled(0, 6))
    dist.all_gather_into_tensor(whole, filled(rank, 2), group=group)
    uneven = [filled(0, 1), filled(0, 2), filled(0, 3)]
    dist.all_gather(uneven, filled(rank + 1, rank + 1), group=group)
    found += uneven
    found.append(part := filled(0, 2))
    dist.reduce_scatter_tensor(part, filled(rank + 1, 6), group=group)
    found.append(x := filled(0, 3))
    dist.all_to_all_single(x, filled(rank, 3), group=group)
    given = [filled(rank, each + 1) for each in range(3)]
    taken = [filled(9, rank + 1) for _ in range(3)]
    dist.all_to_all(taken, given, group=group)
    found += taken
    gathered = [filled(0, 1) for _ in range(3)] if rank == 2 else None
    dist.gather(filled(rank, 1), gathered, group_dst=2, group=group)
    found += gathered or []
    found.append(x := filled(0, 1))
    dist.scatter(x, [filled(10 + each, 1) for each in range(3)] if rank == 0 else None, group_src=0, group=group)
    dist.barrier(group=group)
    return [[float(number) for number in each] for each in found]


def collectives_of(rank: int) -> list[list[float]]:
    found: list[list[float]] = [
        [6.0] * 3,
        [3.0] * 3,
        [2.0] * 3,
        [2.0] * 3,
        [6.0] * 3 if rank == 0 else [rank + 1.0] * 3,
    ]
    found += [[0.0, 0, 1, 1, 2, 2], [1.0], [2.0] * 2, [3.0] * 3, [6.0] * 2, [0.0, 1, 2]]
    found += [[float(each)] * (rank + 1) for each in range(3)]
    return found + ([[0.0], [1.0], [2.0]] if rank == 2 else []) + [[10.0 + rank]]


def ring_of_groups(rank: int, group: Group) -> list[float]:
    """Each sends to the next and receives from the last, in one group: alone, all would send first."""
    size = group.size()
    own, other = filled(rank), filled(-1)
    for _ in range(2):
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, other, group=group, group_peer=(rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()
    return list(other.tolist())


def messages_in_turn(rank: int, group: Group) -> list[float]:
    """Of two ranks one sends first, and the other receives first."""
    x = filled(rank)
    in_turn(lambda: send(x, rank, group), lambda: receive(x, rank, group), turned=rank == 1)
    return list(x.tolist())


def sum_later(rank: int, group: Group) -> list[float]:
    """The host goes on before the sum is there, and the stream waits for it."""
    x = filled(rank + 1)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    assert not work.is_completed()
    work.wait()
    return list((x * 2).tolist())


def replicas(rank: int, group: Group) -> list[list[float]]:
    """torch's own data parallelism: the gradients of the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to("fake")
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    rows = torch.arange(16.0).view(4, 4)[2 * rank : 2 * rank + 2]
    for _ in range(2):
        wrapped(rows.to("fake")).square().mean().backward()
    return [each.grad.flatten().tolist() for each in model.parameters() if each.grad is not None]


RIGHT: dict[str, Use] = {
    each.__name__: each for each in (all_collectives, ring_of_groups, messages_in_turn, sum_later, replicas)
}


@pytest.mark.parametrize(
    "transport",
    [STRICT_DEVICE, STRICT_AT_ONCE, Transport(device="strict", late=3)],
    ids=["last", "at once", "by chance"],
)
def test_collectives_give_what_they_are_to_give(pool: Pool, transport: Transport) -> None:
    found = pool.run(3, with_group, "all_collectives", transport=transport)
    assert found == [collectives_of(rank) for rank in range(3)]


@pytest.mark.parametrize("transport", [STRICT_DEVICE, STRICT_AT_ONCE], ids=["last", "at once"])
def test_messages_in_groups_and_in_turn_arrive(pool: Pool, transport: Transport) -> None:
    assert pool.run(3, with_group, "ring_of_groups", transport=transport) == [[2.0] * 3, [0.0] * 3, [1.0] * 3]
    assert pool.run(2, with_group, "messages_in_turn", transport=transport) == [[0.0] * 3, [0.0] * 3]


def test_a_stream_waits_for_what_the_host_does_not(pool: Pool) -> None:
    assert pool.run(2, with_group, "sum_later", transport=STRICT_DEVICE) == [[6.0] * 3] * 2


def test_replicas_of_torch_have_the_gradients_of_one_process(pool: Pool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for _ in range(2):
        model(torch.arange(16.0).view(4, 4)).square().mean().backward()
    for found in pool.run(2, with_group, "replicas", transport=STRICT_DEVICE):
        for own, parameter in zip(found, model.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(torch.tensor(own), parameter.grad.flatten())


def in_turn(*calls: Callable[[], object], turned: bool) -> None:
    """One after the other, or the last one first."""
    for call in calls[::-1] if turned else calls:
        call()


def send(x: torch.Tensor, rank: int, group: Group) -> None:
    dist.send(x, group=group, group_dst=1 - rank)


def receive(x: torch.Tensor, rank: int, group: Group) -> None:
    dist.recv(x, group=group, group_src=1 - rank)


def calls_in_another_order(rank: int, group: Group) -> None:
    in_turn(
        lambda: dist.broadcast(filled(rank), group_src=0, group=group),
        lambda: dist.all_reduce(filled(rank), group=group),
        turned=rank == 1,
    )


def both_send_first(rank: int, group: Group) -> None:
    send(filled(rank), rank, group)
    receive(filled(rank), rank, group)


def a_group_that_does_not_pair(rank: int, group: Group) -> None:
    ops = [dist.P2POp(dist.isend, filled(rank), group=group, group_peer=1 - rank)]
    if rank == 0:
        ops.append(dist.P2POp(dist.irecv, filled(0), group=group, group_peer=1))
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def a_second_device(rank: int, group: Group) -> None:
    dist.all_reduce(filled(1), group=group)
    dist.all_reduce(torch.ones(3, device=f"fake:{7 - rank}"), group=group)


def one_that_never_comes(rank: int, group: Group) -> None:
    dist.all_reduce(filled(1), group=group)
    if rank == 0:
        dist.all_reduce(filled(1), group=group)


def one_that_never_connects(rank: int, group: Group) -> None:
    if rank == 0:
        dist.all_reduce(filled(1), group=group)


def use_after_abort(rank: int, group: Group) -> None:
    dist.all_reduce(filled(1), group=group)
    torch.accelerator.synchronize()
    group.abort()
    dist.all_reduce(filled(1), group=group)


def written_in_flight(rank: int, group: Group, *, write: Callable[[list[torch.Tensor]], object]) -> None:
    """`write` is given what is sent, and what comes."""
    x, whole = filled(rank), filled(0, 6)
    work = dist.all_gather_into_tensor(whole, x, group=group, async_op=True)
    both = [x, whole]
    del x, whole
    write(both)
    assert work is not None
    work.wait()


def let_go_and_written(both: list[torch.Tensor]) -> None:
    """Its memory goes to the next tensor."""
    del both[0]
    filled(5).add_(1)


def a_message_behind_a_sum(rank: int, group: Group) -> None:
    """On a group that was connected at once all share one communicator, in one order."""
    eager = dist.new_group([0, 1], backend="strict", timeout=SHORT, device_id=torch.device("fake", rank))
    x = filled(rank)
    in_turn(
        lambda: (send if rank else receive)(x, rank, eager),
        lambda: dist.all_reduce(x, group=eager),
        turned=rank == 0,
    )


def another_device_than_bound(rank: int, group: Group) -> None:
    eager = dist.new_group([0, 1], backend="strict", device_id=torch.device("fake", rank))
    dist.all_reduce(torch.ones(3, device=f"fake:{rank + 2}"), group=eager)


def summed(make: Callable[[int], torch.Tensor], op: Any = dist.ReduceOp.SUM) -> Use:
    """A sum of what each rank makes."""
    return lambda rank, group: dist.all_reduce(make(rank), op, group=group)


WRONG: dict[str, tuple[Use, str]] = {
    "calls in another order": (
        calls_in_another_order,
        "rank 0 is in BROADCAST #0 (3 x Float, root 0), sends 3 x Float to rank 1",
    ),
    "another size": (summed(lambda rank: filled(1, 3 + rank)), "rank 0 is in ALLREDUCE #0 (3 x Float, SUM)"),
    "another dtype": (
        summed(lambda rank: filled(1, dtype=torch.int32 if rank else torch.float32)),
        "rank 1 is in ALLREDUCE #0 (3 x Int, SUM)",
    ),
    "another root": (
        lambda rank, group: dist.broadcast(filled(1), group_src=rank, group=group),
        "while rank 1 is in BROADCAST #0 (3 x Float, root 1)",
    ),
    "another operator": (
        lambda rank, group: summed(lambda _: filled(1), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)(rank, group),
        "ALLREDUCE #0 (3 x Float, MAX)",
    ),
    "other parts": (
        lambda rank, group: dist.all_to_all([filled(0, 1), filled(0, 2)], [filled(0, 1), filled(0, 1)], group=group),
        "while rank 1 is in ALLTOALL #0, sends 1 x Float and receives 1 x Float",
    ),
    "both send first": (
        both_send_first,
        "sends 3 x Float to rank 1 and receives nothing from it, while rank 1 is in SEND/RECV #0",
    ),
    "a message of another size": (
        lambda rank, group: (receive if rank else send)(filled(0, 3 + rank), rank, group),
        "while rank 1 is in SEND/RECV #0, sends nothing and receives 4 x Float",
    ),
    "a group that does not pair": (
        a_group_that_does_not_pair,
        "sends 3 x Float to rank 1 and receives 3 x Float from it, while rank 1",
    ),
    "a tensor of the host": (
        summed(lambda rank: torch.ones(3)),
        "No backend type associated with device type cpu",
    ),
    "strides": (summed(lambda rank: torch.ones(3, 2, device="fake").t()), "Tensors must be contiguous"),
    "a dtype that NCCL has not": (
        summed(lambda rank: filled(1, dtype=torch.int16)),
        "Input tensor data type is not supported for NCCL process group: Short",
    ),
    "bits": (
        summed(lambda rank: filled(1, dtype=torch.int32), dist.ReduceOp.BAND),
        "Cannot use ReduceOp of this kind with NCCL",
    ),
    "a second device": (
        a_second_device,
        "while this process group's communicator is on fake:0: the other ranks would never come",
    ),
    "one device for two": (
        summed(lambda rank: torch.ones(3, device="fake:5")),
        "Duplicate GPU detected : rank 1 and rank 0 both on device FAKE-00000005",
    ),
    "one that never comes": (
        one_that_never_comes,
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE",
    ),
    "one that never connects": (
        one_that_never_connects,
        "setting up NCCL communicator 'all' of 2 ranks, but ranks 1 did not come in 2000 ms",
    ),
    "use after an abort": (use_after_abort, "NCCL communicator was aborted on rank 0."),
    "what is sent is written": (
        partial(written_in_flight, write=lambda both: both[0].add_(1)),
        "ALLGATHER #0 (3 x Float, 3 x Float, ) reads was written while it was in flight",
    ),
    "what comes is written": (
        partial(written_in_flight, write=lambda both: both[1].fill_(1)),
        "writes was written by others while it was in flight",
    ),
    "what is sent is freed": (
        partial(written_in_flight, write=let_go_and_written),
        "reads was written while it was in flight",
    ),
    "a message behind a sum": (a_message_behind_a_sum, "NCCL would hang or write over memory"),
    "another device than bound": (
        another_device_than_bound,
        "Tensor found on device fake:2 but backend constrained to fake:0",
    ),
}

USES: dict[str, Use] = RIGHT | {name: use for name, (use, _) in WRONG.items()}


@pytest.mark.parametrize("name", WRONG)
def test_what_nccl_refuses_or_would_hang_on_is_refused(pool: Pool, name: str) -> None:
    waits = "never" in name
    said = pool.run(2, refused, name, SHORT.total_seconds() if waits else 60.0, transport=STRICT_DEVICE)
    assert WRONG[name][1] in said[0]
    # Both know, except where one has nothing more to do.
    assert all(said) or waits


def without_a_wait(channel: Channel) -> tuple[list[float], list[float]]:
    """What a program reads that leaves a wait out, and what it had read behind it."""
    group = dist.new_group([0, 1], backend="strict")
    x, whole = filled(channel.rank + 1), filled(0, 6)
    work = dist.all_gather_into_tensor(whole, x, group=group, async_op=True)
    early = whole * 1
    read = list(early.tolist())
    assert work is not None
    work.wait()
    return read, list(whole.tolist())


def test_a_wait_that_is_left_out_shows(pool: Pool) -> None:
    for read, right in pool.run(2, without_a_wait, transport=STRICT_DEVICE):
        assert right == [1.0] * 3 + [2.0] * 3
        assert read != right


def fork_after_the_device(channel: Channel) -> tuple[str, bool]:
    """What a child hears that uses the device of its parent."""
    filled(1)
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            filled(1)
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    os.wait()
    return os.read(reading, 1000).decode(), torch.get_device_module("fake")._is_in_bad_fork()


def test_a_child_of_a_process_with_devices_has_none(pool: Pool) -> None:
    for said, own in pool.run(2, fork_after_the_device, transport=STRICT_DEVICE):
        assert said.startswith("Cannot re-initialize the fake device in forked subprocess.")
        assert not own


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("2,0", [2, 0]),
        ("1,nobody,3", [1]),
        ("0,0", []),
        ("FAKE-00000003,1", [3, 1]),
        ("FAKE-0", []),
        ("MIG-7f3a,MIG-8b2c", ["MIG-7f3a"]),
        ("1,9,2", [1]),
    ],
)
def test_the_environment_says_which_devices_are_seen(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seen: Sequence[int | str]
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VISIBLE, given)
    names = [each if isinstance(each, str) else f"FAKE-{each:08d}" for each in seen]
    assert list(inspect.unwrap(visible)()) == names


def traffic(channel: Channel) -> int:
    group = dist.new_group([0, 1], backend="strict")
    before = strict.sent_bytes().get("ALLGATHER", 0)
    dist.all_gather_into_tensor(filled(0, 6), filled(1, 3), group=group)
    torch.accelerator.synchronize()
    return strict.sent_bytes()["ALLGATHER"] - before


def test_bytes_are_counted_by_operation(pool: Pool) -> None:
    assert pool.run(2, traffic, transport=STRICT_DEVICE) == [12, 12]
