"""Nets whose values and parameters go other ways than through the outputs of modules."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.engine.formed import formed, linear, of_parts, several
from tests.oracle.batches import NUM_WORDS, Batch, word_loss
from tests.oracle.program import LossOfBatch

WIDTH = 4
EMBEDDING, SAME, HEAD = partial(nn.Embedding, NUM_WORDS, WIDTH), linear(WIDTH, WIDTH), linear(WIDTH, NUM_WORDS)


def multiplied(net: Any, x: torch.Tensor) -> Any:
    """Multiplies its output by a parameter that nothing else reads."""
    return x * net.scale


def in_modules(net: Any, x: torch.Tensor) -> Any:
    """Hands its output to modules that nothing else calls."""
    return net.norm(net.gate(x)) * net.scale


def of_parameters(net: Any, x: torch.Tensor) -> Any:
    """Looks at parameters only."""
    return net.gate.weight.square() * net.scale.exp()


def with_aside(measure: Callable[[Any, torch.Tensor], Any]) -> type[nn.Module]:
    """Blocks whose losses go past all outputs of blocks: each keeps its own on itself."""

    def aside(net: Any, x: torch.Tensor) -> Any:
        x = x + torch.tanh(net.linear(x))
        net.aside = measure(net, x).square().mean()
        return x

    parts: Mapping[str, Any] = {
        **{"linear": SAME, "gate": SAME, "norm": partial(nn.LayerNorm, WIDTH)},
        "scale": lambda: nn.Parameter(torch.full((WIDTH,), 1.5)),
    }

    def asides(net: Any, words: torch.Tensor) -> Any:
        x = net.embedding(words)
        for block in net.blocks:
            x = block(x)
        return net.head(x), torch.stack([block.aside for block in net.blocks]).sum()

    return formed(asides, embedding=EMBEDDING, blocks=several(formed(aside, **parts), 3), head=HEAD)


ASIDES = {
    "multiplied": with_aside(multiplied),
    "module of a module": with_aside(in_modules),
    "parameters only": with_aside(of_parameters),
}


def loss_with_aside(output: Any, batch: Batch) -> torch.Tensor:
    logits, aside = output
    total: torch.Tensor = word_loss(logits, batch) + aside
    return total


@of_parts(embedding=EMBEDDING, blocks=several(SAME, 3))
def reader(net: Any, words: torch.Tensor) -> Any:
    """Its own forward reads a parameter of one of its children."""
    x = net.embedding(words)
    for block in net.blocks:
        x = x + torch.tanh(block(x))
    return F.linear(x, net.embedding.weight)


def share_first(net: Any) -> None:
    """Blocks with one layer between them."""
    for block in net.blocks:
        block[0] = net.blocks[0][0]


@of_parts(
    share_first, embedding=EMBEDDING, blocks=several(lambda: nn.Sequential(SAME(), nn.Tanh(), SAME()), 3), head=HEAD
)
def sharing(net: Any, words: torch.Tensor) -> Any:
    x = net.embedding(words)
    for block in net.blocks:
        x = x + block(x)
    return net.head(x)


@of_parts(embedding=EMBEDDING, router=linear(WIDTH, 3), experts=several(SAME, 3), head=HEAD)
def experts(net: Any, words: torch.Tensor) -> Any:
    """A router sends each word to some of its experts, which run where they have words."""
    x = net.embedding(words)
    share, chosen = net.router(x).softmax(-1).topk(2)
    mixed = torch.zeros_like(x)
    for at, expert in enumerate(net.experts):
        weight = (share * (chosen == at)).sum(-1, keepdim=True)
        if bool((weight > 0).any()):
            mixed = mixed + weight * expert(x)
    return net.head(x + mixed)


@of_parts(embedding=EMBEDDING, experts=several(HEAD, 2))
def one_expert(net: Any, words: torch.Tensor) -> Any:
    """Runs the expert that its first word asks for."""
    return net.experts[int(words[0, 0]) % 2](net.embedding(words))


@of_parts(embedding=EMBEDDING, layers=several(SAME, 2), head=HEAD)
def swapping(net: Any, words: torch.Tensor) -> Any:
    """Runs two alike layers, one before the other by the first word."""
    x = net.embedding(words)
    for layer in net.layers if words[0, 0] % 2 else reversed(net.layers):
        x = layer(x)
    return net.head(x)


@of_parts(embedding=EMBEDDING, layer=SAME, head=HEAD)
def twice(net: Any, words: torch.Tensor) -> Any:
    """Calls a layer twice, and computes its activations again by a backward of their own."""
    x = net.embedding(words)
    for _ in range(2):
        x = checkpoint(net.layer, x, use_reentrant=True)
    return net.head(x)


@of_parts(key=SAME, value=SAME, mix=SAME)
def crossing(net: Any, x: torch.Tensor, memory: torch.Tensor, *others: torch.Tensor) -> Any:
    """Uses one value several times in each of several blocks, as cross attention does."""
    x = x + torch.tanh(net.key(memory)) * net.value(memory) * memory
    return x + net.mix(sum(others) * memory)


def translated(net: Any, words: torch.Tensor, run: Callable[..., torch.Tensor]) -> Any:
    """Blocks that all get the encoded words, and all that came before them."""
    memory = torch.tanh(net.encoder(net.embedding(words)))
    x = net.embedding(words.flip(1))
    passed = [x]
    for block in net.blocks:
        x = run(block, x, memory, *passed)
        passed = [*passed, x * memory]
    return net.head(x + sum(passed))


TRANSLATION: Mapping[str, Any] = {
    **{"embedding": EMBEDDING, "encoder": SAME, "blocks": several(crossing, 3), "head": HEAD}
}


@of_parts(**TRANSLATION)
def translation(net: Any, words: torch.Tensor) -> Any:
    return translated(net, words, lambda block, *given: block(*given))


@of_parts(**TRANSLATION)
def translation_again(net: Any, words: torch.Tensor) -> Any:
    """Blocks in activation checkpoints."""
    return translated(net, words, partial(checkpoint, use_reentrant=False))


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


def score(net: Any, x: torch.Tensor) -> Any:
    """What a penalty takes the slope of."""
    return net.last(F.softplus(net.second(torch.tanh(net.first(x)))))


SCORE: Mapping[str, Any] = {"first": linear(WIDTH, 8), "second": linear(8, 8), "last": linear(8, 1)}
critic = formed(score, **SCORE)


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


@of_parts(**SCORE)
def force(net: Any, x: torch.Tensor) -> Any:
    """Gives the slope of an energy, taken in its forward."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        energy = score(net, x).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=net.training)
    return slope.sum(1, keepdim=True)


@of_parts(net=linear(WIDTH, 1))
def maml(net: Any, x: torch.Tensor) -> Any:
    """An inner step by torch.func in the forward."""
    now = dict(net.net.named_parameters())
    slopes = grad(lambda given: functional_call(net.net, given, (x,)).square().mean())(now)
    return functional_call(net.net, {name: now[name] - 0.1 * slopes[name] for name in now}, (x,))


def small(*shape: int) -> Callable[[], nn.Parameter]:
    """A parameter full of 0.1."""
    return lambda: nn.Parameter(torch.full(shape, 0.1))


@of_parts(a=small(WIDTH, 1), b=small(1, WIDTH))
def added(net: Any, weight: torch.Tensor) -> Any:
    """What an adapter adds to a weight."""
    return weight + net.a @ net.b


class Adapted(nn.Linear):
    """Has a parametrisation for the time of its forward, as peft gives one to fused experts."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.added = added()

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
        return input + F.linear(input, self.weight.data * self.scale, self.bias)


def in_a_row(make: Callable[[], nn.Module], prepare: Callable[[Any], object] = lambda _: None) -> nn.Module:
    """Blocks of this kind after one another, each prepared, and a last layer."""

    def prepared() -> nn.Module:
        made = make()
        prepare(made)
        return made

    return formed(row, blocks=several(prepared, 2), last=linear(WIDTH, 1))()


def row(net: Any, x: torch.Tensor) -> Any:
    for block in net.blocks:
        x = torch.tanh(block(x))
    return net.last(x)
