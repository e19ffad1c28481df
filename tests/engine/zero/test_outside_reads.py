"""Stage 3: parameters that a forward reads outside of their module are gathered for that, and change no bit."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, linear
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ModelError
from tests.oracle.batches import word_loss
from tests.oracle.comparison import assert_same, assert_trains_like_one_process
from tests.oracle.places import train
from tests.oracle.program import Program, plan_of
from tests.oracle.programs import count_targets, masked_batch, on_words
from tests.oracle.units import BATCHES
from tests.refusals import Refusals

WIDTH = 6


class Scale(torch.autograd.Function):
    """Keeps a parameter for its backward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).flatten(0, -2).sum(0)


def no_gradient(net: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        x = x * (1 + net.norm.weight.square().mean())
    return x + net.head.weight.detach()[:WIDTH].mean(0)


def view_without_gradient(net: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        row = net.positions.weight[:1]
    return x + row


def iterated(net: Any, x: torch.Tensor) -> Any:
    positions = net.positions.weight
    return x + sum(row.tanh() for row in positions) + torch.stack(positions.unbind()[:1])


def listed(net: Any, x: torch.Tensor) -> Any:
    read = [net.norm.weight, net.positions.weight[0], net.head.bias[:WIDTH]]
    return x + torch.cat(read).view(3, -1).sum(0)


READS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "slice": lambda net, x: x + net.positions.weight[1 : 1 + x.shape[1]],
    "before its call": lambda net, x: x * net.norm.weight + net.head.bias.sum(),
    "no gradient": no_gradient,
    "view without gradient": view_without_gradient,
    "iterated": iterated,
    "function": lambda net, x: Scale.apply(x, net.norm.weight),  # type: ignore[no-untyped-call]
    "listed": listed,
    "mapped": lambda net, x: x + torch.vmap(lambda row: row @ net.positions.weight[:WIDTH])(x),
}
"""What is read of the net at its beginning."""


class Block(nn.Module):
    """May read what its neighbour has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, neighbour: Any = None) -> torch.Tensor:
        x = x + torch.tanh(self.up(self.norm(x)))
        if neighbour is not None:
            x = layer_norm(linear(x, neighbour.up.weight.T), (WIDTH,), neighbour.norm.weight, self.norm.bias)
        return x


class Net(nn.Module):
    """Blocks between an embedding and a head that only functions use; `kind` says what is read besides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.positions = nn.Embedding(11, WIDTH), nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)
        self.embedding.requires_grad_(kind != "frozen")
        if kind == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> Any:
        x = self.embedding(words)
        x = READS[self.kind](self, x) if self.kind in READS else x
        for block, other in zip(self.blocks, reversed(self.blocks), strict=True):
            x = self.through(block, other, x)
        x = self.norm(x)
        if self.kind == "autoencoder":
            x = linear(x, self.head.weight) @ self.head.weight
        if self.kind == "tied":
            return self.head(x) + x @ self.head.weight.T
        return linear(x, self.embedding.weight, self.head.bias)

    def through(self, block: Any, other: Any, x: torch.Tensor) -> Any:
        def reads(x: torch.Tensor) -> Any:
            return block(x) + linear(block(x) @ self.positions.weight[:WIDTH], block.up.weight.T)

        if self.kind.startswith("checkpointed"):
            return checkpoint(reads, x, use_reentrant=self.kind != "checkpointed")
        return block(x, other if self.kind == "neighbour" else None)


def decayed(model: nn.Module) -> Callable[[Mapping[str, Any]], torch.Tensor]:
    """A loss that reads all parameters."""
    return lambda batch: (
        word_loss(model(batch["words"]), batch) + 1e-2 * sum(each.square().sum() for each in model.parameters())
    )


def compiled() -> nn.Module:
    """Its block is gathered around the whole compiled call."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 11))
    model[1].compile(backend="eager")
    return model


KINDS = ("", "tied", "frozen", *READS, "neighbour", "autoencoder", "checkpointed", "checkpointed reentrant")
OF_ONE_STAGE = ("function", "checkpointed", "checkpointed reentrant")
"""Refused between stages, whatever they read."""
MADE: dict[str, Program] = {
    **{kind: on_words(lambda kind=kind: Net(kind)) for kind in KINDS},  # type: ignore[misc]
    "compiled": on_words(compiled, batches=[{"input": each["words"], "targets": each["targets"]} for each in BATCHES]),
    "the loss": on_words(lambda: Net(""), loss=None, loss_with=decayed),
    "microbatches that only some ranks compute": on_words(
        lambda: Net("slice"), batches=[masked_batch(0), masked_batch(1)], loss_weight=count_targets
    ),
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"keep_gathered": True},
    {"partition": "whole"},
    {"units": ("blocks.*",)},
    {"units": (".", "blocks.*", "blocks.*.up")},
)
CASES = [(kind, settings, k) for kind in MADE for settings in range(len(SETTINGS)) for k in (1, 3)]
CASES = [each for each in CASES if each[0] != "checkpointed reentrant" or each[2] == 1]
"""A reentrant checkpoint gives gradients several times in one backward."""


def is_tried(kind: str, settings: int, k: int) -> bool:
    """Two of each kind, by turns."""
    at = list(MADE).index(kind)
    return settings == (at + k // 2 * 2) % len(SETTINGS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("kind", "settings", "k"),
    [each if is_tried(*each) else pytest.param(*each, marks=pytest.mark.stress) for each in CASES],
)
def test_reads_outside_of_a_module_change_no_bit(kind: str, settings: int, k: int) -> None:
    made = MADE[kind]
    assert_trains_like_one_process(made, plan_of(made, "dp_shard=2", stage=3, k=k, clip=0.3, **SETTINGS[settings]))


OF_STAGES = [each for each in KINDS if each not in OF_ONE_STAGE]


@pytest.mark.parametrize(
    "kind",
    [each if at % 3 == 1 else pytest.param(each, marks=pytest.mark.stress) for at, each in enumerate(OF_STAGES)],
)
def test_reads_between_stages_change_no_bit_in_steps_and_evaluations(kind: str) -> None:
    two, three = (train(MADE[kind], plan_of(MADE[kind], "pp=2,dp_shard=2", stage=stage, k=2)) for stage in (2, 3))
    assert_same(three, two)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "through its data": lambda weight: weight.data.mul_(0.5),
    "by a new storage": lambda weight: setattr(weight, "data", weight.detach() * 2),
    "through numpy": lambda weight: weight.requires_grad_(False).numpy(),
}


def writing(write: Callable[[nn.Parameter], object]) -> None:
    class Writes(Net):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                write(self.norm.weight)
            found: torch.Tensor = super().forward(words)
            return found

    made = on_words(lambda: Writes("slice"))
    train(made, plan_of(made, "dp_shard=2", stage=3))


REFUSED = Refusals(
    "engine.outside_reads",
    {name: lambda write=write: writing(write) for name, write in WRITES.items()},
    kind=ModelError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_writes_and_what_reaches_memory_unseen_are_refused(case: str) -> None:
    REFUSED.check(case)
