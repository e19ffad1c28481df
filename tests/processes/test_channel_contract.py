"""The contract of `Channel` over real processes, through shared memory, through TCP, and through both at once."""

import pytest

from shardwise.comm import Channel
from shardwise.testing.channels import Case, run_all
from shardwise.testing.library import compiler
from tests.contracts.channel_cases import CASES, run_case
from tests.processes.pool import SHARED_MEMORY, STRICT_AT_ONCE, STRICT_DEVICE, TCP, Pool, Transport

MIXED = Transport(without_shared_memory=(0,))
on_devices = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: nothing runs on the fake device")
each_refusal = pytest.mark.parametrize("case", [each for each in CASES if each.poisons], ids=lambda case: case.name)


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        (2, SHARED_MEMORY),
        pytest.param(3, SHARED_MEMORY, marks=pytest.mark.quick),
        (4, SHARED_MEMORY),
        (2, TCP),
        (4, TCP),
        (3, MIXED),
    ],
    ids=["2-shared", "3-shared", "4-shared", "2-tcp", "4-tcp", "3-mixed"],
)
def test_processes_fulfil_the_contract(pool: Pool, size: int, transport: Transport) -> None:
    pool.run(size, run_all, transport=transport)


@each_refusal
@pytest.mark.parametrize(("size", "transport"), [(3, SHARED_MEMORY), (2, TCP)], ids=["3-shared", "2-tcp"])
def test_processes_refuse_by_the_contract(pool: Pool, case: Case, size: int, transport: Transport) -> None:
    pool.run(size, run_case, case.name, transport=transport, poisons=True)


@on_devices
@pytest.mark.parametrize(
    ("size", "transport"),
    [
        pytest.param(2, STRICT_DEVICE, marks=pytest.mark.quick),
        (4, STRICT_DEVICE),
        (3, STRICT_AT_ONCE),
        (4, Transport(device="strict", late=5)),
    ],
    ids=["2-last", "4-last", "3-at once", "4-by chance"],
)
def test_devices_fulfil_the_contract(pool: Pool, size: int, transport: Transport) -> None:
    pool.run(size, run_all, transport=transport)


@on_devices
@each_refusal
def test_devices_refuse_by_the_contract(pool: Pool, case: Case) -> None:
    # Some see a difference in a wait: the host has to wait there.
    pool.run(2, run_case, case.name, transport=STRICT_AT_ONCE, poisons=True)


def shares(channel: Channel) -> bool:
    return channel.share(100) is not None


@pytest.mark.parametrize(
    ("transport", "expected"), [(SHARED_MEMORY, True), (TCP, False), (MIXED, False)], ids=["shared", "tcp", "mixed"]
)
def test_memory_is_shared_where_all_ranks_have_it(pool: Pool, transport: Transport, expected: bool) -> None:
    assert pool.run(3, shares, transport=transport) == [expected] * 3
