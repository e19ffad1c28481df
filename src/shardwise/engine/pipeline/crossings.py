"""Where the graph of a forward is cut: a value leaves for another stage, or arrives from one.

    forward                                        backward, in reverse order of the program
    [1] Departure: the value is posted             [4] Departure: waits for the gradient, hands it on
    [2] Arrival: the value is taken                [3] Arrival: posts the gradient

A departure is a root of its stage's backward. Autograd runs what was made last first; so arrivals and departures of one
stage take turns as in the forward, backwards, and a stage that is entered twice in one forward works too.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(kw_only=True, slots=True)
class Crossing:
    """One value that goes from one stage to another."""

    number: int
    """Counted over the microbatch's forward, alike on all ranks."""
    source: int
    target: int
    needs_gradient: bool
    has_returned: bool = False
    """Of an arrival: whether its gradient, or that there is none, was posted."""
    anchor: torch.Tensor | None = None
    """Of an arrival with a gradient: the leaf of the graph that stands for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientLink:
    """A parameter of several stages whose gradient goes down from `crossing.target` to `crossing.source`."""

    name: str
    crossing: Crossing


@dataclass(slots=True)
class StageGraph:
    """What the backward of one microbatch on one stage starts from and ends in."""

    roots: list[torch.Tensor] = field(default_factory=list)
    """One empty tensor for every departure."""
    arrivals: list[Crossing] = field(default_factory=list)
    links: list[GradientLink] = field(default_factory=list)
    """Gradients of parameters that are handed down once the backward is done."""
    loss: torch.Tensor | None = None

    def clear(self) -> None:
        """Let go of the graph, which refers to this by its departures."""
        self.roots.clear()
        self.arrivals.clear()
        self.links.clear()
        self.loss = None


class Messenger(Protocol):
    """Who carries gradients between stages (a `Flow`)."""

    def return_gradient(self, crossing: Crossing, gradient: torch.Tensor | None) -> None:
        """Post the gradient of a value that arrived here."""

    def return_nothing(self, *, since: int) -> None:
        """Post that values that arrived since that crossing have no gradient."""

    def take_gradient(self, crossing: Crossing) -> torch.Tensor | None:
        """Wait for the gradient of a value that left from here."""


class Departure(torch.autograd.Function):
    """The end of the graph where a value leaves."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, flow: Messenger, crossing: Crossing) -> torch.Tensor:
        """Give the root that stands for the value in the backward of its stage."""
        ctx.flow, ctx.crossing = flow, crossing
        return value.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Hand on the gradient that comes back, or none."""
        crossing = ctx.crossing
        # Arrivals of later in the program have had their turn: what has not come by now has no gradient. So has the
        # arrival of this very value, where the other stage is on this rank too (and used it under no_grad only).
        ctx.flow.return_nothing(since=crossing.number)
        return ctx.flow.take_gradient(crossing), None, None


class Arrival(torch.autograd.Function):
    """The beginning of the graph where a value arrives."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, arrived: list[torch.Tensor], flow: Messenger, crossing: Crossing
    ) -> torch.Tensor:
        """Give the value that arrived, in a list because autograd makes views of tensors that go in and out.

        `anchor` requires a gradient, so that this is part of the graph.
        """
        ctx.flow, ctx.crossing = flow, crossing
        ctx.set_materialize_grads(False)
        return arrived.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Post the gradient to where the value came from."""
        ctx.flow.return_gradient(ctx.crossing, gradients[0])
        return None, None, None, None
