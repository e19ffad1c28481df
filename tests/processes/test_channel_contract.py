"""The contract of `Channel` over real processes, through shared memory, through TCP, and through both at once."""

import pytest

from shardwise.comm import Channel
from tests.contracts.channel_cases import CASES
from tests.contracts.channel_oracles import Case
from tests.processes.pool import SHARED_MEMORY, TCP, Pool, Transport

MIXED = Transport(without_shared_memory=(0,))


def run_case(channel: Channel, name: str) -> None:
    next(case for case in CASES if case.name == name)(channel)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("size", "transport"),
    [(2, SHARED_MEMORY), (3, SHARED_MEMORY), (4, SHARED_MEMORY), (2, TCP), (3, TCP), (4, TCP), (3, MIXED)],
    ids=["2-shared", "3-shared", "4-shared", "2-tcp", "3-tcp", "4-tcp", "3-mixed"],
)
def test_processes_fulfil_the_contract(pool: Pool, case: Case, size: int, transport: Transport) -> None:
    pool.run(size, run_case, case.name, transport=transport, poisons=case.poisons)


def shares(channel: Channel) -> bool:
    return channel.share(100) is not None


@pytest.mark.parametrize(
    ("transport", "expected"), [(SHARED_MEMORY, True), (TCP, False), (MIXED, False)], ids=["shared", "tcp", "mixed"]
)
def test_memory_is_shared_where_all_ranks_have_it(pool: Pool, transport: Transport, expected: bool) -> None:
    assert pool.run(3, shares, transport=transport) == [expected] * 3
