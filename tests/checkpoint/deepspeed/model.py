"""The model of the folders that DeepSpeed wrote, and the batches that it was trained with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NUM_WORDS = 11
WIDTH = 6
ROWS = 12
"""Rows of a batch: each number of ranks gets as many."""

STEPS = 3
"""Updates before the save."""
MORE_STEPS = 3
"""Updates after it, whose losses are in the reference."""


class Block(nn.Module):
    """A layer with a norm, whose sizes are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return out


class Words(nn.Module):
    """Words in, the next words out."""

    shift: torch.Tensor

    def __init__(self, *, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, WIDTH))
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        if frozen:
            self.frozen.requires_grad_(False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        hidden = hidden + self.shift.to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(torch.tanh(self.frozen(hidden)))
        return out


def words_model(*, tied: bool = False, frozen: bool = False, seed: int = 0) -> Words:
    """The same model for every caller."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Words(tied=tied, frozen=frozen)


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Two groups: matrices with decay, vectors without, and of another learning rate."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [
        {"params": [each for each in trained if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in trained if each.ndim == 1], "weight_decay": 0.0, "lr": 2e-2},
    ]


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The whole batch of an update."""
    generator = torch.Generator().manual_seed(100 + step)
    words = torch.randint(NUM_WORDS, (ROWS, 4), generator=generator)
    return {"input": words[:, :-1], "target": words[:, 1:]}


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over words, in float32."""
    return nn.functional.cross_entropy(output.float().flatten(0, 1), batch["target"].flatten())


class Mixed(nn.Module):
    """A layer of the pipeline that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(self.mix(hidden))
        return out


def pipe_layers(embedding: Callable[..., Any], tied: Callable[..., Any]) -> list[Any]:
    """The layers of a pipeline: `embedding` and `tied` make the first and the last, which share a weight."""
    return [embedding(NUM_WORDS, WIDTH), Block(), Mixed(), Block(), torch.tanh, tied(NUM_WORDS, WIDTH)]
