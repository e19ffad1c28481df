"""Tells those who hand batches out, such as `sw.Data`, on which of them the engine has made a step.

loop      draws b1, b2 ahead          engine.step(b0)
engine                                knows it made a step on b0: no count of what was drawn says that
"""

from typing import Protocol
from weakref import WeakSet

from shardwise.engine.forward.batches import Batch, given_microbatches


class BatchSource(Protocol):
    """What hands batches out."""

    def on_step(self, batch: Batch) -> bool:
        """A step was made on this batch; whether it is one of this source."""

    def on_other_step(self) -> None:
        """A step was made on a batch that no source knows."""


class TrainedBatches:
    """The sources of one engine. A source that the program has dropped is forgotten."""

    def __init__(self) -> None:
        self._sources: WeakSet[BatchSource] = WeakSet()

    def add(self, source: BatchSource) -> None:
        """Tell it of every step from now on."""
        self._sources.add(source)

    def tell(self, batch: Batch) -> None:
        """A step was made on `batch`."""
        sources = list(self._sources)
        # Microbatches of a list may be batches of a source each. All sources are asked: one batch may be made of
        # tensors of several.
        given = given_microbatches(batch)
        answers = [source.on_step(each) for source in sources for each in ([batch] if given is None else given)]
        if not any(answers):
            for source in sources:
                source.on_other_step()
