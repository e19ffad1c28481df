"""Backwards on devices, which autograd runs in a thread for each, change no bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ModelError
from tests.engine.loops import on_ranks, plan_of
from tests.oracle.batches import points, square_loss
from tests.oracle.one_process import Trained

SHARED = nn.Dropout(0.25)
"""A layer that all models have, and so all simulated ranks: as activations that a library makes once."""


class Draws(nn.Module):
    """Draws by a layer of its own, by one that is shared, and by a function."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.dropout, self.shared = nn.Dropout(0.5), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shared(self.down(self.dropout(torch.tanh(self.up(x)))))
        return nn.functional.dropout(x, 0.1, self.training)


def once(module: Any, x: torch.Tensor, is_reentrant: bool = False) -> torch.Tensor:
    found: torch.Tensor = checkpoint(module, x, use_reentrant=is_reentrant)
    return found


def cast(module: Any, x: torch.Tensor, again: bool = True) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        out: torch.Tensor = (once(module, x) if again else module(x)).float()
        return out


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "plain": lambda module, x: module(x),
    "checkpointed": once,
    "reentrant": partial(once, is_reentrant=True),
    "nested": lambda module, x: once(lambda x: once(module, x) + 0, x),
    "cast": partial(cast, again=False),
    "autocast": cast,
}


class Block(nn.Module):
    """What is in it is computed again, in a way."""

    def __init__(self, way: str, shared: nn.Module) -> None:
        super().__init__()
        self.draws, self.way = Draws(shared), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WAYS[self.way](self.draws, x)


class Net(nn.Module):
    """Blocks, and hooks of the user's where `is_hooked`."""

    def __init__(self, way: str, shared: nn.Module = SHARED, *, is_hooked: bool = False) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(way, shared) for _ in range(4)), nn.Linear(4, 1)
        if is_hooked:  # hooks of the user's see gradients, and change them
            self.head.weight.register_hook(lambda gradient: gradient * 2)
            self.get_submodule("layers.1.draws.up").register_full_backward_hook(halved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def halved(module: nn.Module, gradients: Any, _: Any) -> Any:
    return tuple(each * 0.5 for each in gradients)


def penalised(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Runs a backward of its own inside of the loss."""
    (slope,) = torch.autograd.grad(output.square().sum(), batch["x"], create_graph=True)
    loss: torch.Tensor = square_loss(output, batch) + 0.1 * slope.square().mean()
    return loss


def trained(device: str, way: str, *args: Any, make: Any = Net, loss: Any = square_loss, **more: Any) -> Trained:
    plan = plan_of(*args, rules={"layers.*.up": "colwise_gather_output"}, **more)
    batches = [points(step, 8) for step in range(3)]
    settings: Any = {"loss": loss, "seed": 3, "device": device}
    return on_ranks(lambda: make(way), plan, batches, **settings)


def assert_same(got: Trained, expected: Trained, *, norms: bool = True) -> None:
    assert got.losses == expected.losses
    assert not norms or got.grad_norms == expected.grad_norms
    assert all(torch.equal(value, expected.parameters[name]) for name, value in got.parameters.items())


@pytest.mark.parametrize(
    ("way", "mesh", "stage", "k", "schedule"),
    [
        *(("plain", "dp_shard=2", 0, 1, "1f1b"), ("checkpointed", "dp_shard=2", 1, 1, "1f1b")),
        *(("reentrant", "dp_shard=2", 2, 1, "1f1b"), ("nested", "dp_shard=2", 3, 1, "1f1b")),
        *(("nested", "single", 1, 3, "1f1b"), ("checkpointed", "single", 3, 3, "1f1b")),
        *(("checkpointed", "pp=2", 1, 3, "1f1b"), ("reentrant", "pp=2", 1, 3, "interleaved")),
        *(("nested", "pp=3", 1, 3, "fthenb"), ("plain", "pp=2", 1, 3, "1f1b")),
    ],
)
def test_a_recomputation_elsewhere_draws_the_masks_of_the_forward(
    fake: str, way: str, mesh: str, stage: int, k: int, schedule: str
) -> None:
    """Two data ranks with a microbatch each add like one process with two microbatches."""
    expected = trained(fake, "plain", k=max(k, 2))
    assert_same(trained(fake, way, mesh, stage, k, schedule=schedule), expected, norms="dp" not in mesh)


HOOKED = partial(Net, is_hooked=True)


@pytest.mark.parametrize(
    ("mesh", "stage", "schedule", "way", "make", "loss"),
    [
        ("tp=2", 1, "1f1b", "checkpointed", Net, square_loss),
        ("dp_shard=2,tp=2", 3, "1f1b", "nested", Net, square_loss),
        ("dp_shard=2", 3, "1f1b", "checkpointed", HOOKED, square_loss),
        ("pp=2", 1, "1f1b", "reentrant", HOOKED, square_loss),
        ("dp_shard=2", 3, "1f1b", "autocast", Net, square_loss),
        ("pp=2", 1, "1f1b", "autocast", Net, square_loss),
        ("pp=2", 1, "interleaved", "autocast", Net, square_loss),
        ("single", 1, "1f1b", "checkpointed", partial(Net, shared=nn.Dropout(0.25)), penalised),
    ],
)
def test_a_recomputation_elsewhere_has_the_hooks_and_the_region_of_the_forward(
    fake: str, mesh: str, stage: int, schedule: str, way: str, make: Any, loss: Any
) -> None:
    ways = ("cast" if way == "autocast" else "plain", way)
    expected, got = (trained(fake, each, mesh, stage, 2, schedule=schedule, make=make, loss=loss) for each in ways)
    assert_same(got, expected)


def test_a_backward_in_the_loss_through_a_layer_that_engines_share_is_refused(fake: str) -> None:
    with pytest.raises(ModelError, match="a Dropout that several engines of this process share is recomputed"):
        trained(fake, "checkpointed", "dp_shard=2", 2, 2, loss=penalised)
