"""Parameters of odd shapes, strides and names, with a sparse gradient or none; and sparse and nested batches."""

import warnings
from collections.abc import Callable

import torch
from torch import nn

from tests.oracle.batches import points
from tests.oracle.program import seeded


class OddShapes(nn.Module):
    """Scalars, single elements, nothing at all, five dims, and memory that is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.randn(1))
        self.nothing = nn.Parameter(torch.randn(0, 4))
        self.five_dims = nn.Parameter(torch.randn(2, 1, 3, 2, 4))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.every_other = nn.Parameter(torch.randn(4, 10)[:, ::2])
        self.convolution = nn.Conv2d(3, 5, 2)
        self.nothing_else = nn.ParameterList([nn.Parameter(torch.randn(3, 0, 2))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.scalar.dtype
        values = (x.to(dtype) @ self.transposed.t() @ self.transposed @ self.every_other).sum(1, keepdim=True)
        images = self.five_dims.reshape(2, 6, 4)[:, :, None, :].reshape(2, 3, 2, 4)
        seen = self.convolution(images).square().mean()
        y: torch.Tensor = values * self.scalar + self.single + self.nothing.sum() * seen + seen
        return y.float() if dtype != torch.float64 else y


def channels_last() -> nn.Module:
    """Its images have their channels innermost."""
    model = seeded(OddShapes)()
    weight = model.convolution.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model


def row_major() -> nn.Module:
    """The same values in row-major memory, which is what a master is."""
    model = seeded(OddShapes)()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return model


ODD_NAMES = (
    *("a b", "\u03b1\u03b2", "w", "w_rank0", "w_rank0_rank1", "it's", 'say "w"', "back\\slash", "new\nline"),
    *("head[0]", "*", "optimizer", "/", "\U0001f600"),
)


class OddNames(nn.Module):
    """Parameters under names that were not made for text files."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterDict({name: nn.Parameter(torch.randn(4, 3)) for name in ODD_NAMES})
        self.add_module('module "of"\n \u00e9', nn.Linear(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = self.get_submodule('module "of"\n \u00e9')(
            sum(torch.tanh(x @ w) for w in self.table.values())
        )
        return last


class Branches(nn.Module):
    """Which parameters get a gradient depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 1)
        self.sometimes = nn.Linear(4, 1)
        self.never = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return y + self.sometimes(x) if x[0, 0] > 0 else y


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


class SparseLookup(nn.Module):
    """An embedding whose gradient names the rows that it is not zero in, or is dense."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, sparse=sparse)
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x.abs() * 10).long() % 9
        y: torch.Tensor = self.out(self.embedding(words).mean(1))
        return y


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


class Beside(nn.Module):
    """Takes a tensor of another layout beside plain rows."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.mix, self.head = nn.Linear(4, 8), Mix(), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mix(self.map(x), odd))
        return out


class Mix(nn.Module):
    """Adds what it makes of the other tensor: to each row its own where it has as many, else to all rows the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 8)

    def forward(self, h: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        if odd.is_nested:
            made = torch.stack([self.map(each).sum(0) for each in odd.unbind()])
        else:
            made = self.map(odd.to_dense())
        return h + (made if len(made) == len(h) else made.sum(0))


def beside(kind: str) -> list[dict[str, torch.Tensor]]:
    """Points with a tensor of this layout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them new
        return [{**points(seed, 12), "odd": ODD_BATCHES[kind]()} for seed in range(2)]
