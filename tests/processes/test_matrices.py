"""Updates of whole matrices between processes: in memory that they share, and by messages."""

import torch

import shardwise as sw
from tests.engine.matrix_optimizers import deep
from tests.processes.pool import SHARED_MEMORY, Pool


def test_processes_that_share_memory_update_matrices_to_the_bits_of_messages(pool: Pool) -> None:
    """Simulated ranks share none. More rounds than shared memory has room for, by turns."""
    real = pool.run(2, deep, transport=SHARED_MEMORY)
    for mine, other in zip(real, sw.simulate(2, deep), strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(each, other[name]) for name, each in mine.items())
