"""Nets whose values and parameters go other ways than through the outputs of modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.utils import parametrize

from tests.oracle.batches import NUM_WORDS, Batch, word_loss
from tests.oracle.program import LossOfBatch

WIDTH = 4


class Asides(nn.Module):
    """Blocks whose losses go past all outputs of blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Aside(kind) for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out, torch.stack([block.aside for block in self.blocks]).sum()  # type: ignore[misc]


class Aside(nn.Module):
    """Keeps a loss of its own on itself, computed after its output from parameters that nothing else reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.aside: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.linear(x))
        match self.kind:
            case "multiplied":
                aside = x * self.scale
            case "module of a module":
                aside = self.norm(self.gate(x)) * self.scale
            case _:
                aside = self.gate.weight.square() * self.scale.exp()
        self.aside = aside.square().mean()
        return x


def loss_with_aside(output: Any, batch: Batch) -> torch.Tensor:
    logits, aside = output
    total: torch.Tensor = word_loss(logits, batch) + aside
    return total


class Reader(nn.Module):
    """Its own forward reads a parameter of one of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.linear(x, self.embedding.weight)


class Sharing(nn.Module):
    """Blocks that have one layer between them."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(shared, nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


class Experts(nn.Module):
    """A router sends each word to some of its experts, which run where they have words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        share, chosen = self.router(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            weight = (share * (chosen == at)).sum(-1, keepdim=True)
            if bool((weight > 0).any()):
                mixed = mixed + weight * expert(x)
        out: torch.Tensor = self.head(x + mixed)
        return out


class OneExpert(nn.Module):
    """Runs the expert that its first word asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, NUM_WORDS) for _ in range(2))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts[int(words[0, 0]) % 2](self.embedding(words))
        return out


class Swapping(nn.Module):
    """Runs two alike layers, one before the other by the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers if words[0, 0] % 2 else reversed(self.layers):
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class Crossing(nn.Module):
    """Uses one value several times in each of several blocks, as cross attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.mix = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.key(memory)) * self.value(memory) * memory
        out: torch.Tensor = x + self.mix(sum(others) * memory)
        return out


class Translation(nn.Module):
    """Blocks that all get the encoded words, and all that came before them."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Crossing() for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        memory = torch.tanh(self.encoder(self.embedding(words)))
        x = self.embedding(words.flip(1))
        passed = [x]
        for block in self.blocks:
            x = self.run(block, x, memory, *passed)
            passed = [*passed, x * memory]
        out: torch.Tensor = self.head(x + sum(passed))
        return out


class Writer(nn.Module):
    """Writes to parameters in forward: what words ask for ("max_norm"), or the same on all ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH, max_norm=1.0 if kind == "max_norm" else None)
        self.head = nn.Linear(WIDTH, NUM_WORDS)
        self.slow = nn.Linear(WIDTH, NUM_WORDS).requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.kind == "clamped" and self.training:
                self.head.weight.clamp_(-0.3, 0.3)
            if self.kind == "momentum" and self.training:
                self.slow.weight.lerp_(self.head.weight, 0.1)
        x = self.embedding(words)
        out: torch.Tensor = self.head(x) + self.slow(x)
        return out


class Critic(nn.Module):
    """What a penalty takes the slope of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(nn.functional.softplus(self.second(torch.tanh(self.first(x)))))
        return out


def penalty(critic: nn.Module) -> LossOfBatch:
    """Of the gradient of the score, as WGAN-GP has it: the loss calls the model and differentiates twice."""

    def loss(batch: Batch) -> torch.Tensor:
        with torch.enable_grad():  # in evaluations too
            x = batch["x"].clone().requires_grad_()
            score = critic(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        total: torch.Tensor = (slope.norm(dim=1) - 1).square().mean() + score.mean()
        return total

    return loss


class Force(Critic):
    """Gives the slope of an energy, taken in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = super().forward(x).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return slope.sum(1, keepdim=True)


class Maml(nn.Module):
    """An inner step by torch.func in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = dict(self.net.named_parameters())
        slopes = grad(lambda given: functional_call(self.net, given, (x,)).square().mean())(now)
        out: torch.Tensor = functional_call(self.net, {name: now[name] - 0.1 * slopes[name] for name in now}, (x,))
        return out


class Added(nn.Module):
    """What an adapter adds to a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((WIDTH, 1), 0.1)), nn.Parameter(torch.full((1, WIDTH), 0.1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


class Adapted(nn.Linear):
    """Has a parametrisation for the time of its forward, as peft gives one to fused experts."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.added = Added()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self, "weight", self.added)
        output = super().forward(input)
        parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
        return output


class ReadsData(nn.Linear):
    """Reads the memory of its weight."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + nn.functional.linear(input, self.weight.data * self.scale, self.bias)


def in_a_row(make: Callable[[], nn.Module], prepare: Callable[[Any], object] = lambda _: None) -> nn.Module:
    """Blocks of this kind after one another, each prepared, and a last layer."""

    def prepared() -> nn.Module:
        made = make()
        prepare(made)
        return made

    return Row([prepared() for _ in range(2)])


class Row(nn.Module):
    """Blocks after one another, and a last layer."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: torch.Tensor = self.last(x)
        return out
