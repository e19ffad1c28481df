"""Random programs of transfers between simulated ranks, and between boards over shared memory and sockets."""

import pytest

from shardwise.comm import simulate
from tests.comm.boards import on_threads
from tests.contracts.channel_programs import NUM_RANKS, Program


@pytest.mark.parametrize("remote", [(), (0, 1, 2), (1,)], ids=["shared", "bytes", "mixed"])
@pytest.mark.parametrize("seed", range(5))
def test_any_program_completes_with_the_plain_results(seed: int, remote: tuple[int, ...]) -> None:
    on_threads(NUM_RANKS, Program(seed).run, remote=remote)


@pytest.mark.parametrize("seed", range(8))
def test_simulated_ranks_complete_any_program(seed: int) -> None:
    simulate(NUM_RANKS, Program(seed).run)
