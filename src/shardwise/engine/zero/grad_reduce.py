"""From backward to the owner's part of the mean gradient: per update (stages 0 and 1) or per microbatch (2 and 3)."""

from collections.abc import Collection
from typing import Protocol

import torch

from shardwise.engine.zero.grad_hooks import Collectors


class GradReduce(Protocol):
    """The gradients of one rank."""

    collectors: Collectors
    """The hooks through which autograd gives finished gradients."""

    @property
    def touched(self) -> frozenset[str]:
        """Parameters that got a gradient since `begin`."""

    def begin(self, num_microbatches: int) -> None:
        """Forget the gradients of the last update and make room for those of `num_microbatches`."""

    def expect_last(self) -> None:
        """The next backward is the last of this update."""

    def expect(self, touched: Collection[str]) -> None:
        """Learn from an update. `touched`: what any rank had a gradient for, the same on all ranks."""

    def view(self, name: str) -> torch.Tensor:
        """The sum so far for a parameter of several stages, in its own shape."""

    def place(self, name: str, gradient: torch.Tensor) -> None:
        """Take a sum made elsewhere for that of a parameter of several stages: after the last backward."""

    def reduce(self) -> None:
        """Sum the gradients over all data ranks and leave the owned parts in what `reduced_of` gives."""

    def reduced_of(self, name: str) -> torch.Tensor:
        """The owned part of the bucket of a parameter, valid after `reduce`."""
