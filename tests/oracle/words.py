"""A model of words with what engines stumble over, and two smaller ones."""

import torch
from torch import nn

from tests.oracle.batches import NUM_WORDS, Batch
from tests.oracle.program import seeded


class Words(nn.Module):
    """A tiny language model with what engines stumble over.

    The head is tied to the embedding, sizes are odd, one parameter is a scalar, one a single element, and one module is
    never used. 813 elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, 8)
        self.wide = nn.Linear(8, 37)
        self.norm = nn.LayerNorm(37)
        self.narrow = nn.Linear(37, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gate = nn.Parameter(torch.tensor([0.5]))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, NUM_WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.wide(self.embedding(words))))
        out: torch.Tensor = self.head(self.scale * self.narrow(hidden) + self.gate)
        return out


class WordsWithKeptNorm(Words):
    """`Words` whose norm computes in float32 whatever the others compute in, written out by hand."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        compute = self.wide.weight.dtype
        wide = torch.promote_types(compute, torch.float32)
        hidden = self.norm(torch.tanh(self.wide(self.embedding(words))).to(wide)).to(compute)
        out: torch.Tensor = self.head(self.scale * self.narrow(hidden) + self.gate)
        return out


class Curve(nn.Module):
    """A two-layer regression: the smallest thing that trains. 41 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return out


class Residual(nn.Module):
    """[rows, 4] points to [rows, 1] values, by four layers that add to what is there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def added(self, at: int, x: torch.Tensor) -> torch.Tensor:
        """What layer `at` makes of x."""
        return x + torch.tanh(self.layers[at](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for at in range(len(self.layers)):
            x = self.added(at, x)
        out: torch.Tensor = self.head(x)
        return out


def words() -> Words:
    """The same `Words` for every caller."""
    return seeded(Words)()


def words_with_kept_norm() -> WordsWithKeptNorm:
    """The parameters of `words()`."""
    return seeded(WordsWithKeptNorm)()


def curve() -> Curve:
    """The same `Curve` for every caller."""
    return seeded(Curve)()


def curve_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(output.to(batch["y"].dtype), batch["y"])


def curve_batch(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """[rows, 3] points and [rows, 1] values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}
