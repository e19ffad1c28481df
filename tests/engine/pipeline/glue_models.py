"""Hand-written nets, each with one thing that code between modules, or around them, does."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.engine.pipeline.models import (
    CHAIN,
    NUM_WORDS,
    VECTORS,
    Block,
    Chain,
    case,
    on_words,
)
from tests.engine.pipeline.oracle import Case


class UsedOutside(nn.Module):
    """The embedding's weight is the head, and one block is used by its parts, a method and a bare weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 7)
        self.early = Block()
        self.parts = Block()
        self.late = Block()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.early(self.embed(words))
        h = h + F.linear(torch.relu(self.parts.inner(h)), self.parts.outer.weight)
        return F.linear(self.late(h), self.embed.weight)


class TiedHead(UsedOutside):
    """The head is a module of its own that shares the embedding's weight: a tie of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, NUM_WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.late(self.parts(self.early(self.embed(words)))))
        return out


class RootParameters(nn.Module):
    """Parameters and buffers that the root holds itself, one of them written to."""

    table: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 7)
        self.positions = nn.Parameter(torch.randn(4, 7))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(7, NUM_WORDS)
        self.register_buffer("table", torch.randn(4, 7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.embed(words) + self.positions[: words.shape[1]]
        h = self.blocks[0](h) + self.table
        h = self.gain * self.blocks[1](h) + self.positions.mean()
        out: torch.Tensor = self.out(h)
        return out


class InPlace(Chain):
    """Values are written to, whole and in part, before and after they went to the next stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h += 1
        h[:, 0] = 0
        kept = h
        a = self.blocks[0](h)
        a += kept
        a[:, 1:3] *= 2
        a.relu_()
        b = self.blocks[1](a)
        b[:, 2] = x[:, 2]
        b[:, 3] = a[:, 3]
        b.add_(kept, alpha=0.5)
        column = b[:, 4]
        column.mul_(3)
        c = self.blocks[2](b)
        c -= b.mean()
        out: torch.Tensor = self.last(self.blocks[3](c).clamp_(min=-1).masked_fill_(c > 2, 0.0))
        return out


class WritesToItsInput(nn.Module):
    """Changes what it is given, as a relu in place does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.relu_())
        return out


class InputWritten(Chain):
    """A module writes to what it got from another stage; with `reused`, that is used again afterwards."""

    def __init__(self, *, reused: bool) -> None:
        super().__init__()
        self.blocks[1] = WritesToItsInput()
        self.reused = reused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](self.first(x))
        a = self.blocks[1](h)
        out: torch.Tensor = self.last(self.blocks[3](self.blocks[2](a + h if self.reused else a)))
        return out


class Flags(Chain):
    """Batch entries of every kind; some decide what is computed."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, mode: str, power: int, rate: torch.Tensor, shift: float | None = None, deep: bool = True
    ) -> torch.Tensor:
        h = self.blocks[0](self.first(x) * rate)
        h = h**power if mode == "power" else h.relu()
        if shift is not None:
            h = h + shift
        if deep:
            h = self.blocks[2](self.blocks[1](h))
        out: torch.Tensor = self.last(self.blocks[3](h))
        return out


FLAGS = [
    {**VECTORS[0], "mode": "power", "power": 2, "rate": torch.tensor(0.5)},
    {**VECTORS[1], "mode": "relu", "power": 2, "rate": torch.tensor(1.5), "shift": 0.25},
    {**VECTORS[2], "mode": "power", "power": 3, "rate": torch.tensor(0.5), "shift": None, "deep": False},
]


class Hooked(Chain):
    """Outputs of modules, and of modules inside placed ones, are collected by hooks and go into the output."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(self._keep)
            block.get_submodule("inner").register_forward_hook(self._keep)
        self.last.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
        self.blocks[1].register_forward_hook(lambda module, args, output: output + 1)

    def _keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = []
        out = super().forward(x)
        assert len(self.seen) == 2 * len(self.blocks)
        return out + torch.stack([each.square().mean() for each in self.seen]).sum()


class Checkpointed(Chain):
    """Activations are computed again in backward: of a module, and of glue that follows one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for at, block in enumerate(self.blocks):
            if at % 2:
                h = checkpoint(block, h, use_reentrant=False)
            else:
                h = checkpoint(lambda v, block=block: torch.tanh(v + block(v)) * 2, h, use_reentrant=False)
        out: torch.Tensor = self.last(h)
        return out


class CheckpointedOverStages(Chain):
    """Regions that are computed again as a whole, over two blocks of one stage or of two, and glue on either side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def two(first: nn.Module, second: nn.Module, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = second(torch.tanh(first(v * 2) + v)) - v
            return out

        h = checkpoint(two, self.blocks[0], self.blocks[1], self.first(x), use_reentrant=False)
        h = checkpoint(two, self.blocks[2], self.blocks[3], h, use_reentrant=False)
        out: torch.Tensor = self.last(h)
        return out


def compiled(*, in_place: bool) -> Chain:
    """Compiled blocks: the modules themselves, or wrapped."""
    model = Chain()
    for at, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend="aot_eager")
        else:
            model.blocks[at] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    return model


CASES: dict[str, Case] = {
    "used outside": on_words(UsedOutside, {"embed": 0, "early": 1, "parts": 2, "late": 3}),
    "tied head": on_words(TiedHead, {"embed": 0, "early": 1, "parts": 2, "late": 3, "head": 3}),
    "root parameters": on_words(
        RootParameters, {"embed": 0, "positions": 0, "blocks.0": 1, "blocks.1": 2, "gain": 3, "out": 3}
    ),
    "in place": case(InPlace, CHAIN),
    "input written": case(lambda: InputWritten(reused=False), CHAIN),
    "input written, reused": case(lambda: InputWritten(reused=True), CHAIN),
    "flags": case(Flags, CHAIN, batches=FLAGS),
    "hooked": case(Hooked, CHAIN),
    "checkpointed": case(Checkpointed, CHAIN),
    "checkpointed over stages": case(CheckpointedOverStages, CHAIN),
    "compiled in place": case(lambda: compiled(in_place=True), CHAIN),
    "compiled": case(lambda: compiled(in_place=False), CHAIN),
}
