"""Nets that plans of tensor parallelism cut: two linear maps, in a model of tokens or in several blocks."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.engine.formed import formed, linear, one_after_another, several


def block(net: Any, x: torch.Tensor) -> Any:
    """Two linear maps of odd sizes with an activation between, and a residual."""
    return x + net.down(functional.gelu(net.up(net.norm(x))))


def linear_block(up: Any = None, down: Any = None) -> nn.Module:
    norm = partial(nn.LayerNorm, 6)
    return formed(block, norm=norm, up=up or linear(6, 33), down=down or linear(33, 6))()


class Tokens(nn.Module):
    """Embedding, one block, head; the head may be tied."""

    def __init__(self, block: nn.Module, *, is_tied: bool = False, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=padding_idx)
        self.block = block
        self.head = nn.Linear(6, 11, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.embedding(words)))
        return out


def in_blocks(net: Any, words: torch.Tensor) -> Any:
    """What goes between blocks may be cut along the positions, as in sequence parallelism of Megatron-LM."""
    return net.head(net.norm(one_after_another(net.blocks, net.embedding(words))))


SequenceModel = formed(
    in_blocks,
    embedding=partial(nn.Embedding, 11, 6),
    blocks=several(linear_block, 2),
    norm=partial(nn.LayerNorm, 6),
    head=linear(6, 11),
)


def run(model: nn.Module, length: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(11, (2, length), generator=generator)
    out: torch.Tensor = model(words)
    return out * torch.randn(2, length, 11, generator=generator, dtype=torch.float64)


def run_six(model: nn.Module) -> torch.Tensor:
    words = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(1))
    out: torch.Tensor = model(words).square()
    return out


def transposed(num_outputs: int, num_inputs: int) -> nn.Module:
    """A linear map whose weight is (inputs, outputs)."""
    from transformers.pytorch_utils import Conv1D  # seconds, which to collect tests does not take

    made: nn.Module = Conv1D(num_outputs, num_inputs)  # type: ignore[no-untyped-call]
    return made


class Projection(nn.Linear):
    """A linear map whose author wrote the forward himself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return (input.unsqueeze(-2) * self.weight).sum(-1) + self.bias
