"""The data of a run: the text of [data], its rows or the dataset that it names, and the rows that evaluations read.

    [data]                              trained on                 evaluated on
    a text, or rows that are packed     windows of the text        windows of blocks that are held out, or of another
    rows, or a dataset                  its samples but some       those, spread evenly
    and one for evaluation              all samples of the one     samples of the other, spread evenly

`sw.Data` reads what is trained on. It knows nothing of texts and rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import default_collate

from shardwise.data import Data, DataPlace, EngineOfData, first_batches
from shardwise.data.row_sources import as_opened, has_items
from shardwise.engine.forward.batches import DIM_0, Batch, BatchRows, rows_of
from shardwise.errors import DataError
from shardwise.train.config import RunConfig
from shardwise.train.corpus import Corpus, TextSamples, corpus_of, evaluation_rows, packed, read_corpus, text_batch
from shardwise.train.held_out_split import HeldOutSamples, TrainingSamples
from shardwise.train.run_rows import RunRows, read_rows
from shardwise.train.run_state import OtherSamples, Samples


class SampleSequence(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run trains on and is evaluated on; made alike on every rank."""

    data: Data
    samples: Samples | OtherSamples
    """What a run that goes on has to have again."""
    held_out: SampleSequence
    """The samples of every evaluation, on all ranks together."""
    collate: Callable[[list[Any]], Any]
    tokens_per_row: int
    """1 where rows are no text."""
    corpus: Corpus | None
    """The text; None for a dataset that the configuration names."""
    rows: BatchRows = DIM_0
    """Where the rows of a batch are."""

    def evaluation(self, place: DataPlace, global_batch: int) -> list[Batch]:
        """The rows of one rank, of each `global_batch` rows of an evaluation; a rank may have none of the last ones.

        They are read once, so that all evaluations see the same ones, whatever a dataset draws.
        """
        batches = []
        for start in range(0, len(self.held_out), global_batch):
            rows = place.rows(min(global_batch, len(self.held_out) - start))
            # A collator makes nothing of no samples; a batch without rows has the entries of one with some.
            batch = self.collate([self.held_out[start + at] for at in rows or range(1)])
            batches.append(batch if rows else rows_of(batch, rows, self.rows))
        return batches


def build_data(config: RunConfig, rows: RunRows | None = None) -> RunData:
    """The data that [data] asks for. Raises ConfigError or DataError for what cannot be read.

    rows: those of `read_rows`, where all ranks have read them together.
    """
    num_rows = config.train.global_batch * config.train.evaluate_batches
    if config.data.is_text:
        corpus = _corpus(config, rows)
        return RunData(
            data=_ordered(config, TextSamples(corpus=corpus, seed=config.order_seed), text_batch),
            samples=Samples.of(config, corpus),
            held_out=evaluation_rows(corpus, num_rows),
            collate=text_batch,
            rows=BatchRows(config.data.row_dims),
            tokens_per_row=corpus.sequence_length,
            corpus=corpus,
        )
    rows = rows or read_rows(config)
    dataset, held_out = rows.samples(rows.training), rows.samples(rows.held_out)
    if held_out is None:
        if not _has_size(dataset):
            way_out = "held_out_dataset" if config.data.dataset is not None else "held_out_options"
            raise DataError(
                f"data.{'dataset' if config.data.dataset is not None else 'source'}: a "
                f"{type(rows.training).__name__} has no __len__ and __getitem__, so no part of it can be held out. "
                f"Name the samples of evaluations: data.{way_out}"
            )
        fraction = config.data.held_out
        try:
            dataset, held_out = TrainingSamples(dataset, fraction), HeldOutSamples(dataset, fraction)
        except DataError as error:
            key = "source" if config.data.dataset is None else "dataset"
            raise DataError(f"data.{key}: {error}, or samples of their own by data.held_out_{key}") from error
    data = _ordered(config, dataset, rows.collate)
    return RunData(
        data=data,
        samples=OtherSamples.of(config, num_samples=data.num_samples),
        held_out=_evaluated(held_out, num_rows),
        collate=rows.collate or default_collate,
        rows=BatchRows(config.data.row_dims),
        tokens_per_row=1,
        corpus=None,
    )


def _corpus(config: RunConfig, rows: RunRows | None) -> Corpus:
    """The text, or the rows that are packed into one."""
    if not config.data.has_rows:
        return read_corpus(config.data, config.folder)
    rows = rows or read_rows(config)
    for each in (rows.training, rows.held_out):
        if each is not None and not _has_size(each):
            raise DataError(f'data.collate: "packing" reads all rows, and a {type(each).__name__} has no known end')
    assert rows.tokenizer is not None, "a configuration that packs names a column of text"
    tokens, held_out = (
        None if each is None else packed(each, rows.encoder, rows.tokenizer) for each in (rows.training, rows.held_out)
    )
    assert tokens is not None
    return corpus_of(config.data, rows.tokenizer, tokens, held_out)


def batches_of(data: Data, engine: EngineOfData) -> Iterator[Batch]:
    """This rank's rows of each update, from epoch to epoch without end."""
    while True:
        yield from data.on(engine)


def sample_batch(data: Data, place: DataPlace) -> Batch:
    """The rows of the first update of a run, also of one that goes on."""
    batch: Batch = first_batches(data, place, 1)[0]
    return batch


def _ordered(config: RunConfig, dataset: object, collate: Callable[[list[Any]], Any] | None) -> Data:
    return Data(
        dataset,
        global_batch=config.train.global_batch,
        seed=config.order_seed,
        collate=collate,
        num_workers=config.data.num_workers,
    )


def _has_size(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and has_items(dataset)


class _Spread:
    """So many samples of a dataset, at equal distances; or all, where it has fewer."""

    def __init__(self, dataset: Any, size: int, max_rows: int) -> None:
        self._dataset = dataset
        self._size = size
        self._num_samples = min(size, max_rows)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> Any:
        return self._dataset[number * self._size // self._num_samples]


def _evaluated(dataset: Any, max_rows: int) -> SampleSequence:
    """The samples of evaluations; the first ones where it is not known how many there are."""
    rows: SampleSequence = []
    if _has_size(dataset):
        rows = _Spread(dataset, len(dataset), max_rows)
    elif (opened := as_opened(dataset)) is not None:
        rows = list(islice(opened.open(0), max_rows))
    elif has_items(dataset):
        rows = _Spread(dataset, max_rows, max_rows)
    if not len(rows):
        raise DataError(f"data.held_out_dataset: a {type(dataset).__name__} gives no samples to evaluate on")
    return rows
