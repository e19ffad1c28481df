"""`sw.Data`: one global order of samples for all ranks, and a cursor that counts what a run has trained on.

    handed out      batch 0     batch 1     batch 2            workers may have read batches 3 and 4 already
    engine.step          step 0      step 1
    cursor          0 ......... 1 ......... 2 ....             a save here makes a run that begins with batch 2

A batch is consumed when the engine has made a step on it, or on a later one (`hand_outs`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import Any, Protocol, TypeVar

from shardwise.comm import Channel
from shardwise.comm.agreement import compare
from shardwise.data.cursors import Cursor, DataPlace
from shardwise.data.hand_outs import HandOuts
from shardwise.data.row_sources import Collate, Rows, Settings, row_source
from shardwise.errors import DataError
from shardwise.plan import Plan

_Read = TypeVar("_Read")


class ToldOfSteps(Protocol):
    """Those whom an engine tells on which batch it has made a step."""

    def add(self, source: HandOuts, /) -> None:
        """One more."""


class EngineOfData(Protocol):
    """The part of an engine that data is read for."""

    @property
    def channel(self) -> Channel:
        """All ranks."""

    @property
    def plan(self) -> Plan:
        """Its mesh says which rows are those of a rank."""

    @property
    def trained_batches(self) -> "ToldOfSteps":
        """Where data ask for a call after each step."""

    @property
    def successor(self) -> "EngineOfData | None":
        """The engine that has the model now, where that is another one."""


class Data:
    """A dataset in one global order, read by ranks of any layout, and resumed on exactly the next sample.

    dataset: anything with `__len__` and `__getitem__` (a torch Dataset, a Hugging Face Dataset, a list), or a dict of
        tensors with rows in dim 0. Or an iterable with `open(position)`, which gives the samples of an epoch from there
        on, or with `skip(count)`, as Hugging Face streams have it. Or an object with `__getitem__` alone: it has no
        end, and is asked for samples 0, 1, 2, ...
    global_batch: rows of all data ranks together in one update; no layout changes it.
    seed: from 0 to 2**63 - 1; together with the epoch it decides the order of a dataset with `__len__`.
    collate: f(list of samples) -> what `engine.step` takes; None: torch's `default_collate`.
    num_workers: processes per rank that read ahead, as torch's DataLoader has them.

    Every batch is full: one that reaches the end of an epoch goes on with the first samples of the next. Raises
    DataError for a dataset without samples, and for one that has no positions to begin at. One loop at a time reads it;
    under `sw.simulate` each rank makes its own.
    """

    def __init__(
        self,
        dataset: object,
        *,
        global_batch: int,
        seed: int = 0,
        collate: Collate | None = None,
        num_workers: int = 0,
    ) -> None:
        global_batch = _whole("global_batch", global_batch, 1)
        seed = _whole("seed", seed, 0)
        num_workers = _whole("num_workers", num_workers, 0)
        if seed >= 1 << 63:
            raise DataError(f"seed is {seed}; give at most 2**63 - 1")
        if collate is not None and not callable(collate):
            raise DataError(f"collate is a {type(collate).__name__}; give a function of a list of samples, or None")
        self._settings = Settings(global_batch=global_batch, seed=seed, collate=collate, num_workers=num_workers)
        self._source = row_source(dataset)
        self._hand_outs = HandOuts(Cursor())
        self._rows: Rows | None = None
        self._place: DataPlace | None = None
        self._reader: object = None
        """The loop that reads; another one, which began before it, is refused."""

    @property
    def num_samples(self) -> int | None:
        """In an epoch; None where that is not known."""
        return self._source.num_samples

    def __len__(self) -> int:
        """Samples in an epoch. Raises TypeError where that is not known."""
        if (found := self.num_samples) is None:
            raise TypeError("this sw.Data has no length: its dataset does not say how many samples an epoch has")
        return found

    @property
    def global_batch(self) -> int:
        """Rows of all data ranks together in one update."""
        return self._settings.global_batch

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0 on."""
        return self._hand_outs.next_epoch

    def on(self, engine: EngineOfData) -> "RankBatches":
        """This rank's share of each global batch, up to the end of the epoch: `for batch in data.on(engine)`.

        The data rank decides the share: ranks along pp and tp get the same rows. The loop begins where the last one or
        a load has left off, and ends before the first batch that begins in another epoch. Where the dataset has no end,
        it does not end.

        All ranks begin it together: MismatchError on all of them names those whose data differ. Raises DataError where
        the global batch has fewer rows than there are data ranks, and in a loop that goes on after another has begun.
        """
        if not all(hasattr(engine, name) for name in ("channel", "plan", "trained_batches")):
            raise DataError(f"data.on takes an engine, as sw.parallelize returns it, not a {type(engine).__name__}")
        _check_in_charge(engine)
        mesh, num_rows = engine.plan.mesh, self._settings.global_batch
        if num_rows < mesh.num_data_ranks:
            raise DataError(
                f"a global batch of {num_rows} rows has none for some of {mesh.num_data_ranks} data ranks; give "
                f"global_batch={mesh.num_data_ranks} or more"
            )
        return RankBatches(self, engine)

    def cursor(self) -> dict[str, Any]:
        """How far the run is, as JSON values, the same on all ranks; `sw.save(path, engine, data=data)` saves it.

        Batches that workers or the loop have got ahead do not count: only those that the engine has made a step on.
        Raises DataError where that cannot be known, because the loop is ahead and the engine got copies.
        """
        return self._values(self._hand_outs.cursor)

    def check(self, cursor: Mapping[str, object]) -> None:
        """Raise DataError for a cursor of other samples or of another order."""
        Cursor.read(cursor)
        words = {"seed": "seed", "num_samples": "the number of samples"}
        if differences := [
            f"{words[key]} was {cursor.get(key)} and is {now}"
            for key, now in self._identity().items()
            if cursor.get(key) != now
        ]:
            raise DataError(
                f"the cursor counts samples in another order: {'; '.join(differences)}. Give the dataset and the seed "
                "of the saved run, or leave data out of the load and begin anew"
            )

    def resume(self, cursor: Mapping[str, object]) -> None:
        """Go on from a cursor; `sw.load(path, engine, data=data)` calls it. Raises the errors of `check`.

        A loop that reads meanwhile is refused its next batch: begin it anew.
        """
        self.check(cursor)
        self._hand_outs = HandOuts(Cursor.read(cursor))
        self._rows = self._reader = None

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._settings.seed, "num_samples": self._source.num_samples}

    def _values(self, at: Cursor) -> dict[str, Any]:
        return {"epoch": at.epoch, "position": at.position, **self._identity()}

    def _begin(self, engine: EngineOfData, reader: object) -> Rows:
        """The rows from the cursor on; what an earlier loop has read ahead is used."""
        self._hand_outs, self._reader = self._hand_outs.continued(), reader
        begin = self._hand_outs.drawn
        lines = [f"{name} {value}" for name, value in self._values(begin).items()]
        compare(
            engine.channel,
            [*lines, f"global_batch {self._settings.global_batch}"],
            subject="data",
            hint="Make the same sw.Data on all ranks, load it on all, and end loops over it after the same batch",
        )
        mesh = engine.plan.mesh
        place = DataPlace(data_rank=mesh.data_rank(engine.channel.rank), num_data_ranks=mesh.num_data_ranks)
        if self._rows is None or place != self._place or self._rows.begin != begin:
            self._rows = rows_of(self, place)
            self._place = place
        engine.trained_batches.add(self._hand_outs)
        return self._rows

    def _read(self, rows: Rows, reading: Callable[[], _Read]) -> _Read:
        """What reads on. Where it ends in an error, or is interrupted, a later loop reads anew from the cursor on."""
        self._rows = None
        try:
            found = reading()
        except BaseException:
            rows.end()
            raise
        self._rows = rows
        return found

    def _ends(self, rows: Rows, epoch: int) -> bool:
        """Whether the next sample is of another epoch; then the cursor is there."""
        if (following := self._read(rows, rows.epoch)) == epoch:
            return False
        self._hand_outs.end(following)
        if rows.begin != self._hand_outs.drawn:  # the end of a stream
            self._rows = None
        return True

    def _hand_out(self, rows: Rows) -> Any:
        """The next batch."""
        batch = self._read(rows, rows.take)
        self._hand_outs.hand_out(batch, rows.begin)
        return batch

    def _settle(self, reader: object, engine: EngineOfData) -> None:
        """The loop asks for the next batch."""
        if reader is not self._reader:
            raise DataError(
                "this loop reads an sw.Data that another loop has begun to read, or a load has set back. Begin the "
                "loop anew; under sw.simulate, make the data on each rank"
            )
        _check_in_charge(engine)

    def _leave(self, reader: object) -> None:
        """The loop is over, or was left."""
        if reader is self._reader:
            self._hand_outs.leave()


class RankBatches:
    """What `Data.on` gives: an iterable of this rank's batches; each loop over it begins at the cursor."""

    def __init__(self, data: Data, engine: EngineOfData) -> None:
        self._data = data
        self._engine = engine

    def __iter__(self) -> Iterator[Any]:
        data, reader = self._data, object()
        rows = data._begin(self._engine, reader)
        epoch = rows.begin.epoch
        try:
            while not data._ends(rows, epoch):
                yield data._hand_out(rows)
                data._settle(reader, self._engine)
        finally:
            data._leave(reader)


def first_batches(data: Data, place: DataPlace, count: int) -> list[Any]:
    """Those of a rank at the beginning of epoch 0, read in this process; the cursor stays."""
    rows = data._source.rows(Cursor(), place, replace(data._settings, num_workers=0))
    return [rows.take() for _ in range(count)]


def rows_of(data: Data, place: DataPlace) -> Rows:
    """The rows from where the next loop begins, of any rank; the cursor stays."""
    return data._source.rows(data._hand_outs.drawn, place, data._settings)


def _check_in_charge(engine: EngineOfData) -> None:
    if engine.successor is not None:
        raise DataError(
            "sw.relayout has given the model to another engine, whose ranks may have other rows. Begin the loop anew "
            "on that one: for batch in data.on(engine)"
        )


def _whole(name: str, value: object, least: int) -> int:
    """The value as an int, also where it is a whole number of numpy or torch."""
    try:
        found = least - 1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]  # asked by calling
    except (TypeError, ValueError):
        found = least - 1
    if found < least:
        raise DataError(f"{name} is {value!r}; give a whole number from {least} on")
    return found
