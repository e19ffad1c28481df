"""Nets that keep something from call to call: statistics, observers, codes, and generators of random numbers."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Normed(nn.Module):
    """A batch norm between two layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 6), norm, nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


class Codebook(nn.Module):
    """Moves a buffer through `.data`."""

    means: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("means", torch.zeros(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.map(x)
        if self.training:
            with torch.no_grad():
                self.means.data.mul_(0.9).add_(h.mean(0), alpha=0.1)
        out: torch.Tensor = self.last(h - self.means.sum(0))
        return out


class Observed(nn.Module):
    """An observer whose buffer is empty until the first forward."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.map(x)
        with torch.no_grad():
            if not self.largest.numel():
                self.largest.resize_(8).zero_()
            self.largest.copy_(torch.maximum(self.largest, h.abs().amax(0)))
        out: torch.Tensor = self.last(h / (1 + self.largest))
        return out


class Fed(nn.Sequential):
    """A row of modules that calls its input x."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self:
            x = each(x)
        return x


def quantised() -> nn.Module:
    """As quantisation-aware training prepares it, with observers per channel."""
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model: Any = Fed(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and in use
        model.qconfig = get_default_qat_qconfig("fbgemm")
        prepared: nn.Module = prepare_qat(model.train())
    return prepared


class OwnGenerator(nn.Module):
    """Draws from a generator that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Twice, and of no fixed number: a run more or less shows in every later call.
        mask = torch.rand(WIDTH, generator=self.generator) < 0.5 + 0.1 * torch.rand((), generator=self.generator)
        out: torch.Tensor = self.last(x + self.down(torch.tanh(self.up(x * mask))))
        return out


class DropBlock(nn.Module):
    """Draws inside, in a module and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(7, 9), nn.Linear(9, 7), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.outer(torch.tanh(self.inner(self.drop(x)))), 0.2, self.training)


class DropChain(nn.Module):
    """Draws in blocks, in modules that lie nowhere, and between modules, also what decides on the way to go."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(DropBlock() for _ in range(4))
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.first(x))
        for at, block in enumerate(self.blocks):
            if self.training and torch.rand(()) < 0.3:
                continue
            h = h + checkpoint(block, h, use_reentrant=False) if at == 2 else h + block(h)
            h = F.dropout(h, 0.1, self.training)
        if self.training:
            h = h + 0.1 * torch.randn_like(h) + 0.1 * torch.randn(7)
        h = h * torch.empty_like(h).bernoulli_(0.9)
        out: torch.Tensor = self.last(self.drop(h))
        return out


class DropRecurrent(nn.Module):
    """torch's own layers with dropout inside, called twice."""

    def __init__(self, num_words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, 6)
        self.memory = nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.2, batch_first=True)
        self.out = nn.Linear(6, num_words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.embed(words)
        for _ in range(2):
            h = self.layer(self.memory(h)[0])
        out: torch.Tensor = self.out(h)
        return out
