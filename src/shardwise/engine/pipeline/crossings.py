"""Where the graph of a forward is cut: a value leaves for another stage, or arrives from one.

    forward                                        backward, in reverse order of the program
    [1] Departure: the value is posted             [4] Departure: waits for the gradient, hands it on
    [2] Arrival: the value is taken                [3] Arrival: posts the gradient

A departure is a root of its stage's backward. Autograd runs what was made last first; so arrivals and departures of one
stage take turns as in the forward, backwards, and a stage that is entered twice in one forward works too.

A stage sees its own part of the graph only. Under tensor parallelism it has to know whether a gradient that comes back
is complete or a rank's own along `tp`, so the messages of gradients say it (`note` in `mailbox.py`):

    stage 1   loss: complete --> total --> own --> arrival --[own]--+
    stage 0                                       departure <-------+  own --> norm of own heads
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from shardwise.comm import Channel
from shardwise.comm.agreement import understood
from shardwise.engine.forward.gradient_kinds import Gradient, Sources, resolve
from shardwise.engine.forward.trained_parameters import ALL, TrainedSet
from shardwise.errors import ModelError


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
    """The roots and ends of the backward of one microbatch on one stage."""

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
    """What carries gradients between stages (a `MicrobatchFlow`)."""

    def return_gradient(self, crossing: Crossing, gradient: torch.Tensor | None) -> None:
        """Send the gradient of a value that arrived here."""

    def return_nothing(self, *, since: int) -> None:
        """Tell that values that arrived since that crossing have no gradient."""

    def take_gradient(self, crossing: Crossing) -> torch.Tensor | None:
        """Wait for the gradient of a value that left from here."""


class Departure(torch.autograd.Function):
    """The end of the graph where a value leaves."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, flow: Messenger, crossing: Crossing) -> torch.Tensor:
        """Give the root that stands for the value in the backward of its stage."""
        # The root is a number without a meaning: backward ignores the gradient of one that autograd starts with. The
        # node behind `value` is what counts: its backward can take the gradient from elsewhere.
        ctx.flow, ctx.crossing = flow, crossing
        return value.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Hand on the gradient that comes back, or none."""
        crossing = ctx.crossing
        # The other rank waits for an answer to each value that it sent, in the order of its own backward. An answer
        # that this rank would give only after waiting here could be what that rank is waiting for: then both would
        # wait forever.
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
        # Otherwise autograd would hand zeros to backward where no gradient came, and "no gradient" would travel as
        # zeros: a parameter that one process leaves without a gradient would get one, and an optimizer would decay
        # its weights.
        ctx.set_materialize_grads(False)
        return arrived.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Send the gradient to where the value came from."""
        ctx.flow.return_gradient(ctx.crossing, gradients[0])
        return None, None, None, None


_CODES: tuple[Gradient | None, ...] = (None, "complete", "own", "both", "hidden")


def code_of(gradient: Gradient | None) -> int:
    """The number that stands in a message for a kind of gradient."""
    return _CODES.index(gradient)


def gradient_of(code: int) -> Gradient | None:
    """The kind of gradient that a number in a message stands for."""
    return _CODES[code]


def _codes_in(num_codes: int, answer: bytes) -> bytes:
    if len(answer) != num_codes or max(answer[1:], default=0) >= len(_CODES):
        raise ValueError("no kinds of gradients")
    return answer


class TracedGraph(Protocol):
    """What the gradients of the leaves of a graph are made of."""

    @property
    def leaves(self) -> Mapping[torch.Tensor, Sources]:
        """Parameters, and anchors of crossings."""


class SummedTerms(Protocol):
    """Knows which gradients of whole parameters are terms of a sum over the ranks along `tp`."""

    seen: dict[str, Gradient]
    """What graphs have shown so far, by parameter."""

    @property
    def is_settled(self) -> bool:
        """Whether graphs have reached all parameters."""

    def trace(self, roots: Iterable[tuple[Any, str | int]]) -> TracedGraph:
        """Walk a graph. roots: nodes where backward begins; with each "complete", or the number of its crossing."""

    def learn(self, traced: Any, came: Mapping[int, Gradient | None]) -> None:
        """Learn from a graph that `trace` gave; `came`: what came back for its crossings."""

    def settle(self, name: str, gradient: Gradient) -> None:
        """Note what the gradient of a parameter is on each rank."""


class BackwardTrace:
    """The gradients of one backward on the stages of one rank."""

    def __init__(self, graphs: Sequence[StageGraph], summed: SummedTerms) -> None:
        # A root stands for a departure: its kind is not known before the gradient comes, and is named by the
        # crossing's number. The gradient of the loss itself is complete: all ranks along `tp` compute the same loss.
        roots: list[tuple[object, str | int]] = []
        for graph in graphs:
            roots += [(root.grad_fn, root.grad_fn.crossing.number) for root in graph.roots]  # type: ignore[union-attr]
            if graph.loss is not None and graph.loss.grad_fn is not None:
                roots.append((graph.loss.grad_fn, "complete"))
        self.traced = summed.trace(roots)
        self.came: dict[int, Gradient | None] = {}
        """The kinds of the gradients that came back so far, by the number of the crossing."""

    def going_back(self, crossing: Crossing) -> Gradient | None:
        """The kind of the gradient of a value that arrived: the gradients that reach it have come before."""
        sources = frozenset() if crossing.anchor is None else self.traced.leaves.get(crossing.anchor, frozenset())
        return resolve(sources, self.came)


class GradientKinds:
    """Finds out which gradients are summed along `tp`, over the backwards of all stages."""

    def __init__(self, summed: SummedTerms, tied: Iterable[str], pipeline: Channel) -> None:
        """tied: whole parameters of several stages; alike on all ranks of the pipeline."""
        self._summed = summed
        self._tied = tuple(tied)
        self._pipeline = pipeline
        self._is_settled = False
        self._trained = ALL
        self._settled: set[TrainedSet] = set()

    def turn_to(self, trained: TrainedSet) -> None:
        """The next steps train these parameters, as `SummedGradients` has it."""
        self._trained, self._is_settled = trained, trained in self._settled

    def trace(self, graphs: Sequence[StageGraph]) -> BackwardTrace | None:
        """Look at the graphs before their backward; None once all kinds are known on all ranks."""
        return None if self._is_settled else BackwardTrace(graphs, self._summed)

    def learn(self, trace: BackwardTrace) -> None:
        """Learn from a backward that has ended. Raises ModelError for parameters that no sum makes right."""
        self._summed.learn(trace.traced, trace.came)

    def end(self) -> None:
        """Agree at the end of a step: on tied parameters, and on whether anything is left to be found out.

        Raises ModelError, the same on all ranks of the pipeline, for parameters that are used in two ways.
        """
        # A step of settled kinds needs no exchange. All ranks leave here together, because `settled` below is of
        # all.
        if self._is_settled:
            return
        # One byte each: whether this rank is done, and what it saw of every tied parameter (0: no gradient yet).
        mine = [self._summed.is_settled, *(code_of(self._summed.seen.get(name)) for name in self._tied)]
        purpose = "kinds of gradients"
        answers = self._pipeline.exchange(bytes(mine), purpose=purpose)
        settled, *of_tied = zip(*understood(answers, partial(_codes_in, len(mine)), purpose=purpose), strict=True)
        self._is_settled = all(settled)
        if self._is_settled:
            self._settled.add(self._trained)
        for name, codes in zip(self._tied, of_tied, strict=True):
            known = {gradient_of(code) for code in codes} - {None}
            if len(known) > 1:
                raise ModelError(
                    f"tensor.rules: {name!r} is whole along tp and used on several stages. On some all ranks use it "
                    "alike, on some each rank for its own part (heads, columns). No sum of its gradients is right: "
                    "use one parameter for each use"
                )
            for gradient in known:
                assert gradient is not None
                self._summed.settle(name, gradient)
