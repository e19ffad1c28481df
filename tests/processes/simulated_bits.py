"""Real processes held to the bits of simulated ranks."""

import functools
from collections.abc import Callable
from typing import Any

import torch

import shardwise as sw
from shardwise.comm import Channel
from tests.processes.pool import Pool, Transport

Train = Callable[[Channel, str], tuple[Any, Any, dict[str, torch.Tensor]]]
"""From a plan's text to two things that are compared by ==, and tensors by name."""


@functools.cache
def _simulated(train: Train, text: str, size: int) -> list[Any]:
    """The same for every transport."""
    return list(sw.simulate(size, lambda channel: train(channel, text)))


def assert_bits_of_simulated_ranks(pool: Pool, train: Train, plan: sw.Plan, transport: Transport) -> None:
    """Train on as many processes as the plan has ranks, and on simulated ones."""
    text, size = plan.text(), plan.mesh.size
    real = pool.run(size, train, text, transport=transport)
    for ours, theirs in zip(real, _simulated(train, text, size), strict=True):
        assert ours[:2] == theirs[:2]
        for parameter, value in theirs[2].items():
            assert torch.equal(ours[2][parameter], value), parameter
