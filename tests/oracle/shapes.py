"""Parameters of odd shapes, strides and names, with a sparse gradient or none; and sparse and nested batches."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.engine.formed import formed, linear, of_parts
from tests.oracle.batches import points
from tests.oracle.program import seeded


def filled(*shape: int) -> Callable[[], nn.Parameter]:
    """A parameter with random values."""
    return lambda: nn.Parameter(torch.randn(*shape))


@of_parts(
    scalar=lambda: nn.Parameter(torch.tensor(0.5)),
    single=filled(1),
    nothing=filled(0, 4),
    five_dims=filled(2, 1, 3, 2, 4),
    transposed=lambda: nn.Parameter(torch.randn(4, 6).t()),
    every_other=lambda: nn.Parameter(torch.randn(4, 10)[:, ::2]),
    convolution=partial(nn.Conv2d, 3, 5, 2),
    nothing_else=lambda: nn.ParameterList([nn.Parameter(torch.randn(3, 0, 2))]),
)
def odd_shapes(net: Any, x: torch.Tensor) -> Any:
    """Scalars, single elements, nothing at all, five dims, and memory that is not row-major."""
    dtype = net.scalar.dtype
    values = (x.to(dtype) @ net.transposed.t() @ net.transposed @ net.every_other).sum(1, keepdim=True)
    images = net.five_dims.reshape(2, 6, 4)[:, :, None, :].reshape(2, 3, 2, 4)
    seen = net.convolution(images).square().mean()
    y = values * net.scalar + net.single + net.nothing.sum() * seen + seen
    return y.float() if dtype != torch.float64 else y


def channels_last() -> nn.Module:
    """Its images have their channels innermost."""
    model: Any = seeded(odd_shapes)()
    weight = model.convolution.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model  # type: ignore[no-any-return]


def row_major() -> nn.Module:
    """The same values in row-major memory, which is what a master is."""
    model = seeded(odd_shapes)()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return model


ODD_NAMES = (
    *("a b", "\u03b1\u03b2", "w", "w_rank0", "w_rank0_rank1", "it's", 'say "w"', "back\\slash", "new\nline"),
    *("head[0]", "*", "optimizer", "/", "\U0001f600"),
)


@of_parts(
    lambda net: net.add_module('module "of"\n \u00e9', nn.Linear(3, 1)),
    table=lambda: nn.ParameterDict({name: nn.Parameter(torch.randn(4, 3)) for name in ODD_NAMES}),
)
def odd_names(net: Any, x: torch.Tensor) -> Any:
    """Parameters under names that were not made for text files."""
    last = net.get_submodule('module "of"\n \u00e9')
    return last(sum(torch.tanh(x @ w) for w in net.table.values()))


@of_parts(always=linear(4, 1), sometimes=linear(4, 1), never=linear(4, 1))
def branches(net: Any, x: torch.Tensor) -> Any:
    """Which parameters get a gradient depends on the batch."""
    y = net.always(x)
    return y + net.sometimes(x) if x[0, 0] > 0 else y


def branching(seed: int, *taken: bool) -> dict[str, torch.Tensor]:
    """Four rows per entry; `sometimes` is used in those rows where it is true."""
    batch = points(seed, 4 * len(taken))
    signs = torch.tensor([1.0 if each else -1.0 for each in taken]).repeat_interleave(4)
    batch["x"][:, 0] = batch["x"][:, 0].abs() * signs
    return batch


TURNS = [
    branching(0, True, True, True, True),
    branching(1, False, False, False, False),  # on no rank: no decay, no momentum, no step
    branching(2, False, False, True, False),  # on one rank, in one microbatch
    branching(3, False, False, False, False),
    branching(4, True, False, False, True),
]


def lookup(*, sparse: bool) -> type[nn.Module]:
    """An embedding whose gradient names the rows that it is not zero in, or is dense."""

    def mean_of_words(net: Any, x: torch.Tensor) -> Any:
        return net.out(net.embedding((x.abs() * 10).long() % 9).mean(1))

    return formed(mean_of_words, embedding=partial(nn.Embedding, 9, 4, sparse=sparse), out=linear(4, 1))


EYE = torch.eye(4) * torch.arange(1.0, 5.0)
PARTS = [torch.full((n, 4), 1.0 + n) for n in (1, 2, 3, 2)]
ODD_BATCHES: dict[str, Callable[[], torch.Tensor]] = {
    "coo": EYE.to_sparse,
    "uncoalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 0, 3], [0, 0, 2]]), torch.ones(3), (4, 4)),
    "csr": EYE.to_sparse_csr,
    "csc": EYE.to_sparse_csc,
    "bsr": lambda: EYE.to_sparse_bsr((2, 2)),
    "jagged": lambda: torch.nested.nested_tensor(PARTS, layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor(PARTS),
}
"""Tensors of other layouts than dense ones, for all rows of a batch."""


@of_parts(map=linear(4, 8))
def mix(net: Any, h: torch.Tensor, odd: torch.Tensor) -> Any:
    """Adds what it makes of the other tensor: to each row its own where it has as many, else to all rows the sum."""
    made = torch.stack([net.map(each).sum(0) for each in odd.unbind()]) if odd.is_nested else net.map(odd.to_dense())
    return h + (made if len(made) == len(h) else made.sum(0))


@of_parts(map=linear(4, 8), mix=mix, head=linear(8, 1))
def mixed(net: Any, x: torch.Tensor, odd: torch.Tensor) -> Any:
    """Takes a tensor of another layout beside plain rows."""
    return net.head(net.mix(net.map(x), odd))


def beside(kind: str) -> list[dict[str, torch.Tensor]]:
    """Points with a tensor of this layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them new
        return [{**points(seed, 12), "odd": ODD_BATCHES[kind]()} for seed in range(2)]
