"""Objects are told apart by what they are, also where one is gone and another has its address."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw

Way = Callable[[torch.Tensor], torch.Tensor]


class Applying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        return way(self.linear(x))


class Scaled:
    """A callable object that cannot be hashed, and gives bound methods."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaled)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.parts)


class Slotted(Scaled):
    __slots__ = ()


def repeated(x: torch.Tensor, parts: int) -> torch.Tensor:
    return torch.cat([x] * parts)


KINDS: dict[str, Callable[[int], Way]] = {
    "lambda": lambda parts: lambda x: torch.cat([x] * parts),
    "partial": lambda parts: functools.partial(repeated, parts=parts),
    "object": Scaled,
    "object with slots": Slotted,
    "bound method": lambda parts: Scaled(parts).__call__,
}


class Passing(nn.Module):
    """Hands a new callable to each of its modules, and lets go of it."""

    def __init__(self, make: Callable[[int], Way]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Applying() for _ in range(4))
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parts, block in enumerate(self.blocks, start=1):
            x = block(x, self.make(parts))[: len(x)]  # what they are given has one shape
        return x


class Writing(nn.Module):
    """Writes values of stages to tensors that it lets go of, and goes on with new ones."""

    def __init__(self, _: object = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            for _ in range(8):
                room = torch.zeros(x.shape)
                room[:, 0] = x[:, 0].detach()
                del room
                x = x + torch.zeros(x.shape)
        return x


def losses(make: Callable[[], nn.Module], channel: sw.Channel) -> Iterator[float]:
    torch.manual_seed(0)
    engine = sw.parallelize(
        make(),
        sw.Plan(mesh=sw.Mesh(pp=channel.size), merge=sw.Merge(microbatches=2)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
        channel=channel,
    )
    for _ in range(3):
        yield engine.step({"x": torch.ones(4, 4)}).loss


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("kind", [*KINDS, "memory"])
def test_what_was_let_go_of_is_not_taken_for_what_came_after(kind: str, pp: int) -> None:
    made: Any = (lambda: Writing()) if kind == "memory" else (lambda: Passing(KINDS[kind]))
    (expected,) = sw.simulate(1, lambda channel: list(losses(made, channel)))
    for found in sw.simulate(pp, lambda channel: list(losses(made, channel))):
        assert found == expected
