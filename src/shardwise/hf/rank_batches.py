"""The batches of one data rank: those that a single process with as many gradient accumulation steps would have.

    sampler, batches of 2       01 23 45 67 8          an epoch of one process
    data rank 0 of 2            01    45    8
    data rank 1 of 2               23    67  {}        {}: no batch in this round, and the rank trains with the others

No row is given twice, and none is left out. With drop_last only full rounds count. A loop that knows nothing of {} gets
the round's last batch in its place, and `gather_for_metrics` cuts its rows off, as with accelerate.
"""

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

_ABSENT = object()
"""In a stream, the one element of a batch that this rank does not have."""


class BatchesOfRank(BatchSamplerShard):
    """Every n-th batch of a sampler, and an empty one where this rank has none in the last round."""

    takes_uneven_rounds = False
    """Whether the loop over it knows an empty batch."""
    shares_rows = False
    """Whether all ranks get as many rows of the last round; see `shared_rows`."""

    def __len__(self) -> int:
        total, ranks = len(self.batch_sampler), self.num_processes
        return int(total // ranks if self._drops else -(-total // ranks))

    @property
    def _drops(self) -> bool:
        return bool(self.drop_last) and self.num_processes > 1

    def __iter__(self) -> Iterator[list[int]]:
        # Read anew: the Trainer sets num_processes to 1 for a sampler that knows its rank.
        ranks = self.num_processes
        group: list[list[int]] = []
        first: list[int] = []
        for batch in self.batch_sampler:
            first = first or batch
            group.append(batch)
            if len(group) == ranks:
                yield self._own_of(group, first)
                group = []
        if group and not self._drops:
            yield self._own_of(group, first)

    def _own_of(self, group: list[list[int]], first: list[int]) -> list[int]:
        ranks, own = self.num_processes, self.process_index
        if self.shares_rows and [len(each) for each in group] != [len(group[0])] * ranks:
            return shared_rows([row for batch in group for row in batch], first, ranks, own)
        return group[own] if own < len(group) else [] if self.takes_uneven_rounds else group[-1]


class RankStream(IterableDatasetShard):
    """The elements of this rank's batches in a stream, which every rank reads as a whole."""

    takes_uneven_rounds = False
    """Whether the loop over it knows an empty batch."""
    shares_rows = False
    """Whether all ranks get as many rows of the last round; see `shared_rows`."""

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        own = slice(self.process_index * self.batch_size, (self.process_index + 1) * self.batch_size)
        group: list[Any] = []
        first: list[Any] = []
        for element in self.dataset:
            group.append(element)
            if len(first) < self.batch_size:
                first.append(element)
            if len(group) == self.batch_size * self.num_processes:
                yield from group[own]
                group = []
        if group and not self.drop_last:
            if self.shares_rows:
                yield from shared_rows(group, first, self.num_processes, self.process_index)
                return
            yield from group[own] or ([_ABSENT] if self.takes_uneven_rounds else group[-self.batch_size :])


class RankCollate:
    """A collator that gives {} for the batch that a rank does not have."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        """What the collator makes of the rows."""
        return self._collate(rows) if rows and rows[0] is not _ABSENT else {}

    def __getattr__(self, name: str) -> Any:
        # Of the collator: the Trainer looks for its tokenizer.
        if name == "_collate":
            raise AttributeError(name)
        return getattr(self._collate, name)


def shared_rows(rows: list[Any], first: list[Any], ranks: int, own: int) -> list[Any]:
    """This rank's share of the rows of a last round, as many as the others'.

    Where they cannot be shared evenly, the first rows come again until the round is full, as accelerate does.
    """
    if len(rows) % ranks:
        rows = [*rows, *islice(cycle(first), len(first) * ranks - len(rows))]
    share = len(rows) // ranks
    return rows[own * share : (own + 1) * share]


def take_uneven_rounds(loader: Any, *, shares_rows: bool = False) -> None:
    """Have a prepared loader give {} in a round for which this rank has no batch.

    shares_rows: have it give all ranks as many rows in each round instead.
    """
    for each in (*_nested(loader, "batch_sampler"), getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if isinstance(each, BatchesOfRank | RankStream):
            each.takes_uneven_rounds = True
            each.shares_rows = shares_rows


def _nested(value: Any, name: str) -> Iterator[Any]:
    while (value := getattr(value, name, None)) is not None:
        yield value
