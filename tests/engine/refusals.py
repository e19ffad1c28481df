"""What every refusal must show: one error on all ranks, after which they can talk."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.oracle.batches import square_loss
from tests.oracle.program import adamw, seeded

PLAN = sw.Plan(mesh=sw.Mesh(dp_shard=3))


def two_layers(width: int = 5) -> nn.Sequential:
    """A small model, the same for every caller."""
    return seeded(lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1)))()


def same_error_everywhere(world_size: int, fn: Callable[[sw.Channel], object]) -> ShardwiseError:
    """The error that `fn` raises on every rank; the ranks can talk afterwards."""
    errors: list[ShardwiseError] = []

    def run(channel: sw.Channel) -> None:
        with pytest.raises(ShardwiseError) as caught:
            fn(channel)
        errors.append(caught.value)
        channel.exchange(b"", purpose="still there")

    sw.simulate(world_size, run)
    assert len(errors) == world_size
    told = [(getattr(error, "problems", ()), getattr(error, "__notes__", [])) for error in errors]
    assert len({(type(error), str(error)) for error in errors}) == 1
    assert all(each == told[0] for each in told)
    return errors[0]


def refusal(
    *,
    models: Mapping[int, Callable[[], nn.Module]] = {},
    plans: Mapping[int, sw.Plan] = {},
    optimizers: Mapping[int, Any] = {},
    plan: sw.Plan = PLAN,
) -> ShardwiseError:
    """The error of `parallelize` on three ranks, some of which are given something else."""

    def run(channel: sw.Channel) -> None:
        sw.parallelize(
            models.get(channel.rank, two_layers)(),
            plans.get(channel.rank, plan),
            optimizer=optimizers.get(channel.rank, adamw),
            loss=square_loss,
            channel=channel,
        )

    return same_error_everywhere(3, run)


def raise_of_all(world_size: int, fn: Callable[[sw.Channel], object]) -> None:
    """For tables of refusals: raise what all ranks raise."""
    raise same_error_everywhere(world_size, fn)
