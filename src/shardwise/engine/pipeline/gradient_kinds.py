"""Which gradients are each rank's own along `tp`, where the graph of a microbatch is cut into stages.

A stage sees its part of the graph only. What comes back for a value that left is complete or own as it was where the
value arrived, so the messages of gradients say it (see `post.py`):

    stage 1   loss: complete --> total --> own --> arrival --[own]--+
    stage 0                                       departure <-------+  own --> norm of own heads

A parameter of several stages is compared between them at the end of the step.
"""

from collections.abc import Iterable, Sequence

from shardwise.comm import Channel
from shardwise.engine.pipeline.crossings import Crossing, StageGraph
from shardwise.engine.tensor.summed_gradients import Gradient, SummedGradients, Traced, resolve
from shardwise.errors import ModelError

_CODES: tuple[Gradient | None, ...] = (None, "complete", "own", "both", "hidden")


def code_of(gradient: Gradient | None) -> int:
    """How a message writes down what a gradient is."""
    return _CODES.index(gradient)


def gradient_of(code: int) -> Gradient | None:
    """What a message says of its gradient."""
    return _CODES[code]


class BackwardTrace:
    """The gradients of one backward on the stages of one rank."""

    def __init__(self, graphs: Sequence[StageGraph]) -> None:
        roots: list[tuple[object, str | int]] = []
        for graph in graphs:
            roots += [(root.grad_fn, root.grad_fn.crossing.number) for root in graph.roots]  # type: ignore[union-attr]
            if graph.loss is not None and graph.loss.grad_fn is not None:
                roots.append((graph.loss.grad_fn, "complete"))
        self.traced = Traced(roots)
        self.came: dict[int, Gradient | None] = {}
        """What came back so far, by the number of the crossing."""

    def going_back(self, crossing: Crossing) -> Gradient | None:
        """What goes back for a value that arrived: all that reaches it has come before."""
        sources = frozenset() if crossing.anchor is None else self.traced.leaves.get(crossing.anchor, frozenset())
        return resolve(sources, self.came)


class GradientKinds:
    """Finds out which gradients are summed along `tp`, over the backwards of all stages."""

    def __init__(self, summed: SummedGradients, tied: Iterable[str], pipeline: Channel) -> None:
        """tied: whole parameters of several stages; alike on all ranks of the pipeline."""
        self._summed = summed
        self._tied = tuple(tied)
        self._pipeline = pipeline
        self._is_settled = False

    def trace(self, graphs: Sequence[StageGraph]) -> BackwardTrace | None:
        """Look at the graphs before their backward; None where all ranks know what there is to know."""
        return None if self._is_settled else BackwardTrace(graphs)

    def learn(self, trace: BackwardTrace) -> None:
        """Learn from a backward that has ended. Raises ModelError for parameters that no sum makes right."""
        self._summed.learn(trace.traced, trace.came)

    def end(self) -> None:
        """Agree at the end of a step: on tied parameters, and on whether anything is left to be found out.

        Raises ModelError, the same on all ranks of the pipeline, for parameters that are used in two ways.
        """
        if self._is_settled:
            return
        mine = [self._summed.is_settled, *(code_of(self._summed.seen.get(name)) for name in self._tied)]
        settled, *of_tied = zip(*self._pipeline.exchange(bytes(mine), purpose="kinds of gradients"), strict=True)
        self._is_settled = all(settled)
        for name, codes in zip(self._tied, of_tied, strict=True):
            known = {gradient_of(code) for code in codes} - {None}
            if len(known) > 1:
                raise ModelError(
                    f"tensor.rules: {name!r} is whole along tp and used on several stages, on some by all ranks alike "
                    "and on some by each rank for its own part (heads, columns); no sum of its gradients is right: use "
                    "a parameter for each"
                )
            for gradient in known:
                assert gradient is not None
                self._summed.settle(name, gradient)
