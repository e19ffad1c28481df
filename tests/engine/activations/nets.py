"""Programs whose blocks do what a second run must not do twice, and the comparison with a plan without activations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import shardwise as sw
from tests.engine.formed import formed, linear, several
from tests.oracle.batches import Batch
from tests.oracle.comparison import assert_same
from tests.oracle.decoder import DECODER, decoder
from tests.oracle.places import train
from tests.oracle.program import Program, seeded

WIDTH = 8
BLOCKS = sw.Activations(checkpoint="blocks")


def count_and_scale(net: Any, x: torch.Tensor) -> Any:
    """Running statistics that torch writes, one that a forward writes in place, and one that it replaces."""
    net.count += 1
    y = net.norm(torch.tanh(net.linear(x))) * net.scale / net.count.clone()
    if net.training:
        net.scale = net.scale * 0.9 + 0.1 * y.detach().mean(0)
    return x + y


def put_statistics(net: Any) -> None:
    net.register_buffer("count", torch.zeros(()))
    net.register_buffer("scale", torch.ones(WIDTH))


class Memory:
    """An object of a class that nobody knows, like a cache of keys and values."""

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []

    def add(self, item: torch.Tensor) -> None:
        """Write to it."""
        self.items = [*self.items, item]


def remember(net: Any, x: torch.Tensor, *, seen: list[torch.Tensor], memory: Memory, scale: dict[str, float]) -> Any:
    """Writes to a list and to an object that it is given, by keyword, and gives a dict of several things."""
    h = net.dropout(net.linear(x))
    seen.append(h)
    memory.add(h)
    total = torch.tanh(torch.stack(memory.items).sum(0))
    return {"x": x + torch.tanh(torch.stack(seen).sum(0)) * scale["of"] + total, "more": (h.mean(), None, 3)}


def remembering(net: Any, input: torch.Tensor) -> Any:
    """Blocks that share what they write to."""
    x, more = input, input.new_zeros(())
    seen: list[torch.Tensor] = []
    memory = Memory()
    for block in net.blocks:
        out = block(x, seen=seen, memory=memory, scale={"of": 0.5})
        x, more = out["x"], more + out["more"][0]
    assert len(seen) == len(net.blocks)
    return x + more


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def scaled(net: Any, input: torch.Tensor) -> Any:
    """Computes with a parameter of its own between modules of two stages, and by a custom function."""
    return net.second(Doubled.apply(torch.tanh(net.first(input * net.scale)))) * net.scale  # type: ignore[no-untyped-call]


SQUARE = linear(WIDTH, WIDTH)
STATISTICS = formed(count_and_scale, put_statistics, linear=SQUARE, norm=partial(nn.BatchNorm1d, WIDTH))
REMEMBERING = formed(remembering, blocks=several(formed(remember, linear=SQUARE, dropout=partial(nn.Dropout, 0.3)), 3))
SCALED = formed(scaled, first=SQUARE, second=SQUARE, scale=lambda: nn.Parameter(torch.ones(WIDTH)))


def statistics() -> nn.Module:
    """Three blocks with buffers."""
    return nn.Sequential(*(STATISTICS() for _ in range(3)))


def rows(seed: int, count: int = 8, *shape: int) -> dict[str, torch.Tensor]:
    """A batch for models that take `input`."""
    return {"input": torch.randn(count, *shape, WIDTH, generator=torch.Generator().manual_seed(seed))}


def square(output: torch.Tensor, _: Batch) -> torch.Tensor:
    """A loss."""
    return output.float().square().mean()


def program(make: Callable[[], nn.Module], batches: Sequence[Batch] = (), **settings: Any) -> Program:
    """A balanced one that draws, as the dropout of blocks does."""
    given = {"loss": square, "draws": True, "batches": batches or [rows(seed) for seed in range(3)]}
    return Program(make=seeded(make), **{**given, **settings})


DROPPING = replace(DECODER, make=partial(decoder, 0.1), draws=True, name="")


def transformer_block(net: Any, x: torch.Tensor) -> Any:
    """What saves more than its input."""
    return x + net.down(functional.gelu(net.up(net.norm(x))))


def blocks(count: int, width: int = 64) -> Callable[[], nn.Module]:
    """Blocks of a transformer without attention."""
    parts = {"norm": partial(nn.LayerNorm, width), "up": linear(width, 4 * width), "down": linear(4 * width, width)}
    return lambda: nn.Sequential(*(formed(transformer_block, **parts)() for _ in range(count)))


# Of one such block autograd keeps its input, the norm's output and figures, and twice the four times wider activation.
ROWS = 256
ACTIVATION = ROWS * 64 * 4
SAVED = (1 + 1 + 4 + 4) * ACTIVATION + 2 * ROWS * 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Watched(Program):
    """Keeps its engines."""

    engines: list[sw.Engine] = field(default_factory=list)

    def engine(self, plan: sw.Plan, channel: sw.Channel, **settings: Any) -> sw.Engine:
        """One more."""
        made = super().engine(plan, channel, **settings)
        self.engines.append(made)
        return made


def assert_changes_nothing(case: Program, plan: sw.Plan, activations: sw.Activations = BLOCKS) -> list[sw.Engine]:
    """The plan with activations has the bits of the plan without; its engines."""
    watched = Watched(**vars(case))
    assert_same(train(watched, replace(plan, activations=activations)), train(case, plan))
    return watched.engines
