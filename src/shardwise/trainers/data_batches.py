"""A rank's batches of an `sw.Data`, as the loaders of Trainers are: with a length, and a position to resume from.

    epoch of the Trainer      | 0 1 2 3 | 4 5 6 7 | ...     so many updates as hold the samples once
    epoch of the data         |  0   |  1   |  2   |        an update may have samples of two

What is read follows from the position alone: a run that resumes reads nothing twice, skips nothing, and ends the epoch.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from shardwise.data import Data
from shardwise.engine import Engine
from shardwise.engine.forward.batches import count_rows, rows_of


class DataBatches:
    """What a Trainer loops over: the rest of its epoch. Without a known number of samples a loop has no end."""

    def __init__(
        self, data: Data, engine: Callable[[], Engine[nn.Module]], *, parts: Callable[[], int] = lambda: 1
    ) -> None:
        """engine, parts: asked for when a loop begins. parts: into which a batch of a rank is cut for an update."""
        self.dataset = data
        self._engine = engine
        self._parts = parts

    def __len__(self) -> int:
        """Parts of an epoch. Raises TypeError where the data have no known end."""
        return self._num_updates * self._parts()

    @property
    def _num_updates(self) -> int:
        return -(-len(self.dataset) // self.dataset.global_batch)

    def __iter__(self) -> Iterator[Any]:
        data, engine, parts = self.dataset, self._engine(), self._parts()
        left = None if data.num_samples is None else self._left()
        while True:
            for batch in data.on(engine):
                yield from _cut(batch, parts)
                left = None if left is None else left - 1
                if left == 0:
                    return

    def _left(self) -> int:
        """Updates to the end of the epoch."""
        at = self.dataset.cursor()
        begun = (at["epoch"] * len(self.dataset) + at["position"]) // self.dataset.global_batch
        return self._num_updates - int(begun) % self._num_updates

    def state_dict(self) -> dict[str, Any]:
        """How far the run is."""
        return self.dataset.cursor()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.dataset.resume(state)


def _cut(batch: Any, parts: int) -> Iterator[Any]:
    rows = count_rows(batch)
    for part in range(parts):
        yield rows_of(batch, range(rows * part // parts, rows * (part + 1) // parts)) if parts > 1 else batch
