"""Training on simulated ranks, and what every such run must show."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.oracle.batches import Batch, share_of
from tests.oracle.one_process import Trained, values_of
from tests.oracle.program import Loss


def train_on_ranks(
    make_model: Callable[[], nn.Module],
    plan: sw.Plan,
    batches: Sequence[Batch],
    *,
    optimizer: Any,
    loss: Loss | None,
    loss_weight: Any = None,
    num_microbatches: Sequence[int | None] | None = None,
    after: Callable[[sw.Engine, nn.Module, sw.Channel], None] = lambda *_: None,
    values: Callable[[nn.Module, sw.Engine, sw.Channel], dict[str, torch.Tensor]] = lambda model, *_: values_of(model),
) -> Trained:
    """One update per batch, each rank on its share; what rank 0 has, after a check that all ranks have the same.

    `after` is called after each update; `values` gives the parameters at the end.
    """

    def run(channel: sw.Channel) -> Trained:
        model = make_model()
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss, loss_weight=loss_weight, channel=channel)
        trained = Trained()
        for batch, k in zip(batches, num_microbatches or [None] * len(batches), strict=True):
            report = engine.step(share_of(batch, channel.rank, channel.size), microbatches=k)
            assert not report.skipped
            trained.losses.append(report.loss)
            trained.grad_norms.append(report.grad_norm)
            after(engine, model, channel)
        trained.parameters = values(model, engine, channel)
        return trained

    first, *others = sw.simulate(plan.mesh.size, run)
    for other in others:
        assert_same_bits(other, first)
        assert (other.losses, other.grad_norms) == (first.losses, first.grad_norms)
    return first


def assert_same_bits(got: Trained, expected: Trained) -> None:
    """Every parameter is equal in every bit."""
    assert got.parameters.keys() == expected.parameters.keys()
    for name, value in got.parameters.items():
        other = expected.parameters[name]
        assert value.dtype == other.dtype
        assert torch.equal(value.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), (
            f"{name} differs by up to {(value.double() - other.double()).abs().max()}"
        )


def largest_difference(one: Trained, other: Trained) -> float:
    """Of any element of any parameter."""
    return max(float((value - other.parameters[name]).abs().max()) for name, value in one.parameters.items())
