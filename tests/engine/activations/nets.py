"""Models whose blocks do what a second run must not do twice, and the comparison with a plan without activations."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.engine.expected import adamw
from tests.engine.oracle import Batch, Loss
from tests.engine.pipeline.stages import share_of

WIDTH = 8
BLOCKS = sw.Activations(checkpoint="blocks")


class Statistics(nn.Module):
    """Running statistics that torch writes, one that a forward writes in place, and one that it replaces."""

    count: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y: torch.Tensor = self.norm(torch.tanh(self.linear(x))) * self.scale / self.count.clone()
        if self.training:
            self.scale = self.scale * 0.9 + 0.1 * y.detach().mean(0)
        return x + y


class Memory:
    """An object of a class that nobody knows, like a cache of keys and values."""

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []

    def add(self, item: torch.Tensor) -> None:
        """Write to it."""
        self.items = [*self.items, item]


class Remembering(nn.Module):
    """Writes to a list and to an object that it is given, by keyword, and gives a dict of several things."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, seen: list[torch.Tensor], memory: Memory, scale: dict[str, float]) -> Any:
        h = self.dropout(self.linear(x))
        seen.append(h)
        memory.add(h)
        return {"x": x + sum(seen) * scale["of"] + sum(memory.items), "more": (h.mean(), None, 3)}


class Chain(nn.Module):
    """Blocks that share what they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, more = input, input.new_zeros(())
        seen: list[torch.Tensor] = []
        memory = Memory()
        for block in self.blocks:
            out = block(x, seen=seen, memory=memory, scale={"of": 0.5})
            x, more = out["x"], more + out["more"][0]
        assert len(seen) == len(self.blocks)
        return x + more


def statistics() -> nn.Module:
    """Three blocks with buffers."""
    return nn.Sequential(*(Statistics() for _ in range(3)))


def rows(seed: int, count: int = 8, *shape: int) -> dict[str, torch.Tensor]:
    """A batch for models that take `input`."""
    return {"input": torch.randn(count, *shape, WIDTH, generator=torch.Generator().manual_seed(seed))}


def square(output: torch.Tensor, _: Batch) -> torch.Tensor:
    """A loss."""
    return output.float().square().mean()


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank has after training, in the order of the steps."""

    numbers: list[float]
    """Losses, norms, and the loss of an evaluation at the end."""
    state: dict[sw.Piece, torch.Tensor]


def train(
    make: Callable[[], nn.Module],
    plan: sw.Plan,
    batches: Sequence[Batch],
    *,
    loss: Loss = square,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    look: Callable[[sw.Engine, nn.Module], None] = lambda *_: None,
) -> list[Seen]:
    """Every rank's view; `look` is called after each update."""

    def on_rank(channel: sw.Channel) -> Seen:
        torch.manual_seed(0)
        engine = sw.parallelize(model := make(), plan, optimizer=adamw, loss=loss, channel=channel)
        numbers = []
        for batch in batches:
            with around():
                report = engine.step(share_of(batch, plan.mesh, channel.rank))
            numbers += [report.loss, report.grad_norm]
            look(engine, model)
        numbers.append(engine.evaluate(share_of(batches[0], plan.mesh, channel.rank)).loss)
        return Seen(numbers=numbers, state={piece: each.cpu().clone() for piece, each in engine.state().items()})

    return sw.simulate(plan.mesh.size, on_rank)


def assert_same_bits(got: Sequence[Seen], wanted: Sequence[Seen]) -> None:
    """All ranks saw the same numbers and have the same state, buffers and moments included."""
    for one, other in zip(got, wanted, strict=True):
        assert one.numbers == other.numbers
        assert one.state.keys() == other.state.keys()
        for piece, tensor in one.state.items():
            assert torch.equal(tensor, other.state[piece]), piece.name


def assert_changes_nothing(
    make: Callable[[], nn.Module],
    plan: sw.Plan,
    batches: Sequence[Batch],
    activations: sw.Activations = BLOCKS,
    **how: Any,
) -> None:
    """The plan with activations has the bits of the plan without."""
    without = train(make, plan, batches, **how)
    assert_same_bits(train(make, replace(plan, activations=activations), batches, **how), without)
