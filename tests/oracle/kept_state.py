"""Nets that keep something from call to call: statistics, observers, codes, and generators of random numbers."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.engine.formed import formed, linear, of_parts, several
from tests.oracle.batches import NUM_WORDS

WIDTH = 4


def normed(norm: type[nn.Module]) -> type[nn.Module]:
    """A batch norm between two layers."""

    def between(net: Any, x: torch.Tensor) -> Any:
        return net.last(torch.tanh(net.norm(net.first(x))))

    return formed(between, first=linear(WIDTH, 6), norm=partial(norm, 6), last=linear(6, 1))


@of_parts(
    lambda net: net.register_buffer("means", torch.zeros(2, WIDTH)),
    map=linear(WIDTH, WIDTH),
    last=linear(WIDTH, 1),
)
def codebook(net: Any, x: torch.Tensor) -> Any:
    """Moves a buffer through `.data`."""
    h = net.map(x)
    if net.training:
        with torch.no_grad():
            net.means.data.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return net.last(h - net.means.sum(0))


@of_parts(lambda net: net.register_buffer("largest", torch.tensor([])), map=linear(WIDTH, 8), last=linear(8, 1))
def observed(net: Any, x: torch.Tensor) -> Any:
    """An observer whose buffer is empty until the first forward."""
    h = net.map(x)
    with torch.no_grad():
        if not net.largest.numel():
            net.largest.resize_(8).zero_()
        net.largest.copy_(torch.maximum(net.largest, h.abs().amax(0)))
    return net.last(h / (1 + net.largest))


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


@of_parts(
    up=linear(WIDTH, 8),
    down=linear(8, WIDTH),
    last=linear(WIDTH, 1),
    generator=lambda: torch.Generator().manual_seed(7),
)
def own_generator(net: Any, x: torch.Tensor) -> Any:
    """Draws from a generator that it keeps."""
    # Twice, and of no fixed number: a run more or less shows in every later call.
    mask = torch.rand(WIDTH, generator=net.generator) < 0.5 + 0.1 * torch.rand((), generator=net.generator)
    return net.last(x + net.down(torch.tanh(net.up(x * mask))))


@of_parts(inner=linear(7, 9), outer=linear(9, 7), drop=partial(nn.Dropout, 0.3))
def drop_block(net: Any, x: torch.Tensor) -> Any:
    """Draws inside, in a module and by a function."""
    return F.dropout(net.outer(torch.tanh(net.inner(net.drop(x)))), 0.2, net.training)


@of_parts(first=linear(5, 7), blocks=several(drop_block, 4), drop=partial(nn.Dropout, 0.25), last=linear(7, 3))
def drop_chain(net: Any, x: torch.Tensor) -> Any:
    """Draws in blocks, in modules that lie nowhere, and between modules, also what decides on the way to go."""
    h = net.drop(net.first(x))
    for at, block in enumerate(net.blocks):
        if net.training and torch.rand(()) < 0.3:
            continue
        h = h + checkpoint(block, h, use_reentrant=False) if at == 2 else h + block(h)
        h = F.dropout(h, 0.1, net.training)
    if net.training:
        h = h + 0.1 * torch.randn_like(h) + 0.1 * torch.randn(7)
    h = h * torch.empty_like(h).bernoulli_(0.9)
    return net.last(net.drop(h))


@of_parts(
    embed=partial(nn.Embedding, NUM_WORDS, 6),
    memory=partial(nn.LSTM, 6, 6, num_layers=2, dropout=0.3, batch_first=True),
    layer=partial(nn.TransformerEncoderLayer, 6, 2, 9, dropout=0.2, batch_first=True),
    out=linear(6, NUM_WORDS),
)
def drop_recurrent(net: Any, words: torch.Tensor) -> Any:
    """torch's own layers with dropout inside, called twice."""
    h = net.embed(words)
    for _ in range(2):
        h = net.layer(net.memory(h)[0])
    return net.out(h)
