"""From a cursor on, the rows of one rank, batch after batch without end. torch's DataLoader reads and collates.

    8 rows in a global batch, 2 data ranks, 10 samples in an epoch

    global batch    0                 1                        2
    epoch 0         0 1 2 3 4 5 6 7   8 9 |
    epoch 1                               | 0 1 2 3 4 5        6 7 8 9 ..
    data rank 0     0 1 2 3           8 9   0 1                6 7 8 9
    data rank 1             4 5 6 7           2 3 4 5                  ..

Every batch is full, under every layout: one that reaches the end of an epoch goes on in the next.
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.util import Finalize
from os import PathLike
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from shardwise.data.cursors import Cursor, DataPlace
from shardwise.data.permutation import epoch_key, shuffled
from shardwise.errors import DataError

Collate: TypeAlias = Callable[[list[Any]], Any]
"""f(rows) -> a batch, as torch's DataLoader takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides which rows a rank reads, and how."""

    global_batch: int
    seed: int
    collate: Collate | None
    num_workers: int


class Rows(Protocol):
    """The rows of one rank from a cursor on."""

    @property
    def begin(self) -> Cursor:
        """Of the next batch."""

    def epoch(self) -> int:
        """Of the first sample of the next batch."""

    def take(self) -> Any:
        """The next batch of this rank; `begin` moves behind it."""

    def end(self) -> None:
        """End what reads ahead."""


class RowSource(NamedTuple):
    """A dataset that can be read from any cursor on."""

    num_samples: int | None
    """In an epoch; None where that is not known."""
    rows: Callable[[Cursor, DataPlace, Settings], Rows]
    """Those of a rank."""


def row_source(dataset: Any) -> RowSource:
    """How a dataset is read. Raises DataError for one that has no places to begin at."""
    if isinstance(dataset, Mapping):
        return _indexed(TensorRows(dataset))
    # All have what a dataset has, by accident: characters, `Path.open`, the methods of the objects to come.
    if isinstance(dataset, str | bytes | bytearray | PathLike):
        raise DataError(
            f"the dataset is a {type(dataset).__name__}, {str(dataset)[:80]!r}; give an object that reads it, with "
            "__len__ and __getitem__"
        )
    if isinstance(dataset, type):
        raise DataError(f"the dataset is the class {dataset.__name__}; give an object of it: {dataset.__name__}(...)")
    if has_items(dataset) and hasattr(dataset, "__len__"):
        return _indexed(dataset)
    if (opened := as_opened(dataset)) is not None:
        return RowSource(None, partial(OpenedRows, opened))
    if has_items(dataset):
        return RowSource(None, partial(SampledRows, dataset, None))
    raise DataError(
        f"a {type(dataset).__name__} cannot be read from a position on. sw.Data takes a dataset with __len__ and "
        "__getitem__, or a dict of tensors. An iterable needs open(position) or skip(count), which gives the samples "
        "from there on"
    )


def as_opened(dataset: Any) -> Any:
    """An object with `open(position)`, where the dataset has that or `skip(count)`; else None."""
    if callable(getattr(dataset, "open", None)):
        return dataset
    return SkippedRows(dataset) if callable(getattr(dataset, "skip", None)) and not has_items(dataset) else None


class SkippedRows:
    """A stream that can leave out its first samples (an `IterableDataset` of Hugging Face), opened at a position."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def open(self, position: int) -> Iterator[Any]:
        """The samples from there on."""
        if get_worker_info() is not None:
            raise DataError(
                "a stream of Hugging Face gives each worker other samples, so no order of all is known; set "
                "num_workers=0 (data.num_workers)"
            )
        return iter(self._stream.skip(position) if position else self._stream)


def has_items(dataset: object) -> bool:
    """Whether samples can be had by number."""
    # torch gives an IterableDataset a `__getitem__` that only raises.
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)


class TensorRows:
    """Tensors by name, as a dataset of their rows."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        strange = {name: each for name, each in tensors.items() if not isinstance(each, torch.Tensor) or not each.ndim}
        if strange or not tensors:
            found = ", ".join(
                f"{name!r} is a {'tensor without rows' if isinstance(each, torch.Tensor) else type(each).__name__}"
                for name, each in list(strange.items())[:3]
            )
            raise DataError(
                f"a dict as a dataset has tensors with rows in dim 0; {found or 'this one is empty'}. torch.as_tensor "
                "makes tensors of arrays and lists"
            )
        sizes = {name: len(each) for name, each in tensors.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"all tensors of a dataset have the same number of rows, but they have {sizes}")
        self._tensors = dict(tensors)

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: each[index] for name, each in self._tensors.items()}


def _indexed(dataset: Any) -> RowSource:
    """A dataset of a known size, whose order in each epoch comes from (seed, epoch)."""
    try:
        size = len(dataset)
    except TypeError as error:
        raise DataError(f"the dataset, a {type(dataset).__name__}, has no number of samples: {error}") from error
    if not size:
        raise DataError(f"the dataset, a {type(dataset).__name__}, has no samples")
    return RowSource(size, partial(SampledRows, dataset, size))


class _AskedSamples:
    """A dataset that says which of its samples is not there."""

    def __init__(self, dataset: Any, size: int | None) -> None:
        self._dataset = dataset
        self._size = size

    def __getitem__(self, number: int) -> Any:
        with self._explained(number):
            return self._dataset[number]

    def __getitems__(self, numbers: list[int]) -> Any:
        """Those of a batch together, where the dataset gives them so."""
        if not hasattr(self._dataset, "__getitems__"):
            return [self[number] for number in numbers]
        with self._explained(*numbers):
            return self._dataset.__getitems__(numbers)

    @contextmanager
    def _explained(self, *numbers: int) -> Iterator[None]:
        try:
            yield
        except IndexError as error:
            asked = f"sample {numbers[0]}" if len(numbers) == 1 else f"one of the samples {list(numbers)}"
            known = (
                "has no __len__, so it is asked for samples without end. Give it one"
                if self._size is None
                else f"has {self._size} samples by its __len__"
            )
            raise DataError(
                f"the dataset, a {type(self._dataset).__name__}, {known}; {asked} raised IndexError: {error}"
            ) from error


class SampledRows:
    """Rows of a dataset with `__getitem__`."""

    def __init__(self, dataset: Any, size: int | None, begin: Cursor, place: DataPlace, settings: Settings) -> None:
        """size: None for a dataset without an end, which is asked for samples in the order of their numbers."""
        # The size may have changed since the cursor was taken by hand: it is brought into an epoch.
        self.begin = begin = begin.advanced(0, size)
        self._size = size
        self._global_batch = settings.global_batch
        first = begin.position + begin.epoch * (size or 0)
        of_rank = place.rows(settings.global_batch)

        def batches() -> Iterator[list[int]]:
            # Samples are counted through all epochs.
            for start in count(first, settings.global_batch):
                numbers = range(start + of_rank.start, start + of_rank.stop)
                given = np.arange(numbers.start, numbers.stop, dtype=np.int64)
                yield list(numbers if size is None else map(int, shuffled(given, seed=settings.seed, size=size)))

        self._batches = _Reading(
            _AskedSamples(dataset, size), begin, place, settings, batch_sampler=batches(), collate_fn=settings.collate
        )
        self.end = self._batches.end

    def epoch(self) -> int:
        """See `Rows`."""
        return self.begin.epoch

    def take(self) -> Any:
        """See `Rows`."""
        batch = next(self._batches)
        self.begin = self.begin.advanced(self._global_batch, self._size)
        return batch


class _Reading:
    """The batches of torch's DataLoader, whose workers end with it, and at the latest before Python does."""

    def __init__(self, dataset: Any, begin: Cursor, place: DataPlace, settings: Settings, **options: Any) -> None:
        """options: further arguments of the DataLoader."""
        # torch draws the seeds of workers from here; else it would draw from the generator of the program. They depend
        # on the cursor too: after a resume, workers must not draw the same numbers again.
        word = epoch_key(settings.seed, begin.epoch) ^ np.uint64(begin.position) ^ np.uint64(place.data_rank << 40)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            num_workers=settings.num_workers,
            worker_init_fn=_leave_signals_to_rank,
            generator=torch.Generator().manual_seed(int(word[0]) >> 1),
            **options,
        )
        self._batches = iter(loader)
        # Not left to the iterator's `__del__`. In a cycle (that of an error and its frames) its queues may be gone by
        # then, and at the end of Python it does nothing: Python would wait forever for workers that leave SIGTERM to
        # their rank.
        self.end = Finalize(self, _end_workers, (self._batches,), exitpriority=10)

    def __next__(self) -> Any:
        return next(self._batches)


def _end_workers(batches: Any) -> None:
    if workers := getattr(batches, "_workers", ()):
        batches._shutdown_workers()
        for worker in workers:
            if worker.is_alive():
                worker.kill()


@dataclass(frozen=True, slots=True)
class _Opened:
    """A batch, with what only its reader knows: where epochs ended."""

    batch: Any
    epoch: int
    """Of its first sample."""
    after: Cursor


class OpenedRows:
    """Rows of a dataset with `open(position)`, an iterable of its samples from there to the end of an epoch.

    Every rank reads the samples of all ranks, and keeps its own.
    """

    def __init__(self, dataset: Any, begin: Cursor, place: DataPlace, settings: Settings) -> None:
        self.begin = begin
        in_turn = _BatchesInTurn(dataset, begin, place, settings)
        # Whole batches come.
        self._batches = _Reading(in_turn, begin, place, settings, batch_size=None, collate_fn=_as_given)
        self.end = self._batches.end
        self._next: _Opened | None = None

    def epoch(self) -> int:
        """See `Rows`."""
        # Whether the epoch has ended is known only after the next sample was asked for.
        if self._next is None:
            self._next = next(self._batches)
        return self._next.epoch

    def take(self) -> Any:
        """See `Rows`."""
        self.epoch()
        assert self._next is not None
        taken, self._next = self._next, None
        self.begin = taken.after
        return taken.batch


class _BatchesInTurn(IterableDataset[_Opened]):
    """The batches of one worker: worker w of n makes each n-th from the w-th on, and torch takes them in turn."""

    def __init__(self, dataset: Any, begin: Cursor, place: DataPlace, settings: Settings) -> None:
        self._dataset = dataset
        self._begin = begin
        self._settings = settings
        self._rows = place.rows(settings.global_batch)

    def __iter__(self) -> Iterator[_Opened]:
        worker = get_worker_info()
        turn, num_turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        collate = self._settings.collate or default_collate
        samples = self._samples()
        for number in count():
            # Samples of other workers are read too: where the batch begins depends on all that come before.
            given = [next(samples) for _ in range(self._settings.global_batch)]
            if number % num_turns == turn:
                rows = [given[at][0] for at in self._rows]
                yield _Opened(collate(rows), given[0][1].epoch, given[-1][1].advanced(1, None))

    def _samples(self) -> Iterator[tuple[Any, Cursor]]:
        """Samples without end, each with its place."""
        at = self._begin
        while True:
            for sample in self._opened(at.position):
                yield sample, at
                at = at.advanced(1, None)
            if not at.position:
                spent = " in this epoch, after it gave some before. Make a new iterator in each call of open"
                raise DataError(
                    f"the dataset, a {type(self._dataset).__name__}, has no samples: open(0) gave none"
                    f"{spent if at.epoch else ''}"
                )
            at = Cursor(epoch=at.epoch + 1)

    def _opened(self, position: int) -> Iterable[Any]:
        opened: Iterable[Any] = self._dataset.open(position)
        if not isinstance(opened, Iterable):
            raise DataError(
                f"open({position}) of the dataset, a {type(self._dataset).__name__}, gave a {type(opened).__name__}; "
                "give an iterable of the samples from there on"
            )
        return opened


def _leave_signals_to_rank(_: int) -> None:
    # A scheduler signals all processes of a job: the rank ends its workers itself, after it has saved.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _as_given(batch: Any) -> Any:
    return batch
