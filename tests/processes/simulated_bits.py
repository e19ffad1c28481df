"""Real processes held to the bits of simulated ranks."""

from collections.abc import Callable
from typing import Any

import torch

import shardwise as sw
from shardwise.comm import Channel
from tests.processes.pool import Pool, Transport

Train = Callable[[Channel, str], tuple[Any, Any, dict[str, torch.Tensor]]]
"""From a plan's text to two things that are compared by ==, and tensors by name."""


def assert_bits_of_simulated_ranks(pool: Pool, train: Train, plan: sw.Plan, transport: Transport) -> None:
    """Train on as many processes as the plan has ranks, and on simulated ones."""
    text, size = plan.text(), plan.mesh.size
    real = pool.run(size, train, text, transport=transport)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have
    simulated = sw.simulate(size, lambda channel: train(channel, text))
    torch.set_num_threads(num_threads)
    for ours, theirs in zip(real, simulated, strict=True):
        assert ours[:2] == theirs[:2]
        for parameter, value in theirs[2].items():
            assert torch.equal(ours[2][parameter], value), parameter
