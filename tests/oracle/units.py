"""Nets of several units, for stages 2 and 3, with batches for them."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.oracle.batches import word_batch

BATCHES = [word_batch(seed, 24) for seed in range(2)]
WIDTH = 6


class Block(nn.Module):
    """Attention of torch's own, a wide layer, a convolution with a kernel of three dims, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 17)
        self.down = nn.Linear(17, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        x = x + self.down(torch.tanh(self.up(x)))
        out: torch.Tensor = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return out


class Net(nn.Module):
    """Blocks between an embedding and a head, with what `kind` adds."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)
        self.scales = nn.ParameterList([torch.tensor(1.5), torch.ones(WIDTH)])
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(3, 2)
        if kind == "positions":
            self.positions = Positions()
        if kind == "tied":
            self.head.weight = self.embedding.weight
        if kind == "frozen":
            for module in (self.embedding, self.blocks[1], self.blocks[0]):
                module.requires_grad_(False)
        if kind == "frozen middle":
            self.blocks[1].requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) * self.scales[0] + self.scales[1]
        if self.kind == "positions":
            x = x + self.positions(words.shape[1])
        if self.kind == "checkpoint of several":
            x = checkpoint(lambda each: self.blocks[1](self.blocks[0](each)), x, use_reentrant=False)
        for _ in range(3 if self.kind == "recurrent" else 1):
            for number, block in enumerate(self.blocks):
                x = self.run_block(block, x, is_special=number == 1)
        out: torch.Tensor = self.head(x)
        return out

    def run_block(self, block: nn.Module, x: torch.Tensor, *, is_special: bool) -> torch.Tensor:
        out: torch.Tensor
        match self.kind:
            case "checkpointed" | "checkpointed reentrant":
                out = checkpoint(block, x, use_reentrant=self.kind != "checkpointed")
            case "twice" if is_special:
                out = block(block(x))
            case "unused output" if is_special:
                block(x)
                out = x
            case "no gradient" if is_special:
                with torch.no_grad():
                    out = x + block(x)
            case "in place":
                block(x)
                out = block(x + 0).add_(1)
            case _:
                out = block(x)
        return out


class Positions(nn.Module):
    """Gives a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, WIDTH))

    def forward(self, length: int) -> torch.Tensor:
        return self.weight[:length]


def net(kind: str = "") -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Net(kind)

    return make
