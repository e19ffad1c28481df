"""Samples in one order under every layout, and a cursor that loses none and reads none twice."""

import gc
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

import shardwise as sw
from shardwise.comm import alone
from shardwise.data import DataPlace
from shardwise.data.global_batches import rows_of
from shardwise.data.permutation import shuffled
from shardwise.errors import DataError
from tests.data.runs import PLANS, ROWS, SAMPLES, Counting, Endless, Squares, StandIn, engine_of, joined, killed_run
from tests.forks.programs import started
from tests.properties import tried
from tests.refusals import Refusals


def order(num_batches: int, *, rows: int = ROWS, size: int = SAMPLES, seed: int = 7) -> list[list[int]]:
    """The numbers of the first batches: the permutations of the epochs, one after the other, cut into rows."""
    numbers: list[int] = []
    for epoch in range(num_batches * rows // size + 1):
        numbers += shuffled(np.arange(epoch * size, (epoch + 1) * size), seed=seed, size=size).tolist()
    return [numbers[at * rows : (at + 1) * rows] for at in range(num_batches)]


@tried(8)
@given(size=st.integers(1, 60), rows=st.integers(1, 20), seed=st.integers(0, 2**63 - 1), first=st.integers(0, 99))
def test_data_ranks_together_read_one_order_in_which_each_epoch_has_every_sample(
    size: int, rows: int, seed: int, first: int
) -> None:
    expected = order(first + 4, rows=rows, size=size, seed=seed)
    flat = [number for batch in expected for number in batch]
    for epoch in range(len(flat) // size):
        assert sorted(flat[epoch * size : (epoch + 1) * size]) == list(range(size))
    for num_data_ranks in {1, 2, rows} & set(range(1, rows + 1)):
        shares = []
        for data_rank in range(num_data_ranks):
            data = sw.Data(list(range(size)), global_batch=rows, seed=seed, collate=list)
            cursor = {"epoch": first * rows // size, "position": first * rows % size, "seed": seed, "num_samples": size}
            data.resume(cursor)
            reading = rows_of(data, DataPlace(data_rank=data_rank, num_data_ranks=num_data_ranks))
            shares.append([reading.take() for _ in range(4)])
        assert joined(shares) == expected[first:]


class Columns:
    """The interface of a Hugging Face Dataset with_format("torch"): rows by number, by list, and a batch at once."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, key: Any) -> Any:
        assert type(key) is int or isinstance(key, list)
        return {"number": torch.as_tensor(key)}

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        columns = self[keys]
        return [{name: column[at] for name, column in columns.items()} for at in range(len(keys))]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["stream", "numbered", "indexed", "columns"])
def test_every_kind_of_dataset_is_read_in_its_order_with_and_without_workers(kind: str, num_workers: int) -> None:
    dataset: Any = {"stream": Counting(), "numbered": Endless(), "indexed": Squares(), "columns": Columns()}[kind]
    in_order = [[at % SAMPLES for at in range(start, start + ROWS)] for start in range(0, 9 * ROWS, ROWS)]
    numbered = [list(range(start, start + ROWS)) for start in range(0, 9 * ROWS, ROWS)]
    expected = {"stream": in_order, "numbered": numbered}.get(kind, order(9))
    data = sw.Data(dataset, global_batch=ROWS, seed=7, num_workers=num_workers)
    engine = StandIn(alone(), PLANS[0])
    read: list[list[int]] = []
    for _ in range(4):
        begun = len(read)
        for batch in data.on(engine):
            engine.step(batch)
            read.append(batch["number"].tolist())
            if len(read) in (3, 9):
                break
        if kind != "numbered" and begun:  # batches 3 to 7 begin in other epochs
            assert len({at * ROWS // SAMPLES for at in range(begun, len(read))}) == 1
        if len(read) == 9:
            break
    assert read == expected
    # Workers have read ahead by now; the cursor has not.
    assert data.cursor()["position"] == (9 * ROWS if kind == "numbered" else 9 * ROWS % SAMPLES)


def test_a_batch_that_the_engine_made_no_step_on_comes_again() -> None:
    data, engine = sw.Data(Squares(), global_batch=ROWS, seed=7), StandIn(alone(), PLANS[0])
    first = next(iter(data.on(engine)))
    assert data.cursor()["position"] == 0
    for again in data.on(engine):
        assert torch.equal(again["number"], first["number"])
        engine.step(again)
        assert data.cursor()["position"] == ROWS
        break
    batches = iter(data.on(engine))
    next(batches)
    later = next(batches)
    assert data.cursor()["position"] == ROWS
    engine.step(later)  # the loop left out a batch by itself: it has trained on a later one
    assert data.cursor()["position"] == 3 * ROWS


class Interrupted(Squares):
    """One sample cannot be read at first."""

    def __init__(self, error: BaseException, number: int) -> None:
        super().__init__()
        self.error: BaseException | None = error
        self.number = number

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.number and self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().__getitem__(index)


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_a_batch_that_could_not_be_read_comes_again(error: BaseException) -> None:
    expected = order(5)
    data = sw.Data(Interrupted(error, expected[2][1]), global_batch=ROWS, seed=7)
    engine = StandIn(alone(), PLANS[0])
    read: list[list[int]] = []
    while len(read) < 5:
        try:
            for batch in data.on(engine):
                engine.step(batch)
                read.append(batch["number"].tolist())
                if len(read) == 5:
                    break
        except type(error):
            assert data.cursor()["position"] == 2 * ROWS
    assert read == expected


def test_a_stream_whose_epoch_ends_with_a_batch_is_in_the_next_epoch_then() -> None:
    class Lines:
        def open(self, position: int) -> Iterator[dict[str, int]]:
            return iter([{"number": number} for number in range(position, 2 * ROWS)])

    engine = StandIn(alone(), PLANS[0])
    data = sw.Data(Lines(), global_batch=ROWS)
    for batch in data.on(engine):
        engine.step(batch)
    assert (data.epoch, data.cursor()["position"]) == (1, 0)
    # A cursor from before the loop had asked: no sample of that epoch is left, and none of the next is taken for one.
    data.resume({**data.cursor(), "epoch": 0, "position": 2 * ROWS})
    while data.epoch < 3:
        for batch in data.on(engine):
            engine.step(batch)
    assert engine.steps == 2 + 4


def test_after_a_relayout_the_loop_begins_anew_on_the_new_engine() -> None:
    engine = engine_of(sw.Plan(), alone())
    data = sw.Data(Squares(), global_batch=ROWS, seed=7)
    read: list[list[int]] = []
    with pytest.raises(DataError, match=r"Begin the loop anew on that one: for batch in data\.on\(engine\)"):  # noqa: PT012
        for batch in data.on(engine):
            if len(read) == 1:
                old, engine = engine, sw.relayout(engine, sw.Plan(sharding=sw.Sharding(stage=3)))
            engine.step(batch)
            read.append(batch["number"].tolist())
    with pytest.raises(DataError, match="another engine"):
        data.on(old)
    for batch in data.on(engine):
        engine.step(batch)
        read.append(batch["number"].tolist())
        if len(read) == 4:
            break
    assert read == order(4)


def test_tensors_by_name_are_a_dataset_of_their_rows() -> None:
    tensors = {"x": torch.arange(SAMPLES * 2).view(SAMPLES, 2), "y": torch.arange(SAMPLES)}
    data, engine = sw.Data(tensors, global_batch=ROWS, seed=7), StandIn(alone(), PLANS[0])
    for batch, numbers in zip(data.on(engine), order(3), strict=False):
        assert batch["y"].tolist() == numbers
        assert torch.equal(batch["x"], tensors["x"][numbers])


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.stress) for seed in range(4, 31))])
def test_killed_runs_read_each_sample_once_under_all_plans(tmp_path: Path, seed: int) -> None:
    """Four kills each; losses are those of one process, up to the sums of other layouts."""
    killed = killed_run(tmp_path / "killed", seed, steps=9, num_kills=4, plans=PLANS)
    whole = killed_run(tmp_path / "whole", 0, steps=9, num_kills=0, plans=PLANS[:1])
    assert killed.numbers == whole.numbers == order(9)
    assert killed.losses == pytest.approx(whole.losses, rel=1e-4)


def test_a_run_that_is_killed_and_goes_on_has_the_losses_of_the_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = killed_run(tmp_path / "whole", 0, steps=6, num_kills=0, plans=PLANS[1:2])
    killed = killed_run(tmp_path / "killed", 1, steps=6, num_kills=2, plans=PLANS[1:2])
    assert killed.numbers == undisturbed.numbers == order(6)
    assert killed.losses == undisturbed.losses


class Drawing(Squares):
    """Draws at random, as crops of pictures are."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": torch.rand(())}


@pytest.mark.quick
def test_what_samples_draw_at_random_goes_on_with_the_cursor() -> None:
    drawn = []
    for position in (0, ROWS, 0):
        data = sw.Data(Drawing(), global_batch=ROWS, seed=7, num_workers=1)
        data.resume({"epoch": 0, "position": position, "seed": 7, "num_samples": SAMPLES})
        drawn.append(next(iter(data.on(StandIn(alone(), PLANS[0]))))["number"])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_a_save_keeps_the_cursor_and_a_load_gives_it_back(tmp_path: Path) -> None:
    engine = engine_of(PLANS[0], alone())
    data = sw.Data(Squares(), global_batch=ROWS, seed=7)
    engine.step(next(iter(data.on(engine))))
    sw.save(tmp_path / "a", engine, extra={"step": 1}, data=data)
    cursor = {"epoch": 0, "position": ROWS, "seed": 7, "num_samples": SAMPLES}
    assert sw.load(tmp_path / "a", engine) == {"step": 1, "sw.Data": cursor}
    fresh = sw.Data(Squares(), global_batch=ROWS, seed=7)
    assert sw.load(tmp_path / "a", engine, data=fresh) == {"step": 1}
    assert fresh.cursor() == cursor
    with sw.checkpoint.AsyncSaver(tmp_path / "background") as saver:
        saver.save(engine, data=data)
    assert sw.load(tmp_path / "background", engine)["sw.Data"] == cursor


def two() -> dict[str, sw.Data]:
    return {
        "text": sw.Data(Squares(), global_batch=ROWS, seed=7),
        "code": sw.Data(Squares(30), global_batch=4, seed=8),
    }


def test_several_data_are_saved_and_loaded_by_name(tmp_path: Path) -> None:
    engine, data = engine_of(PLANS[0], alone()), two()
    for number, (text, code) in enumerate(zip(data["text"].on(engine), data["code"].on(engine), strict=False)):
        engine.step(text)
        engine.step(code)
        if number == 2:
            break
    sw.save(tmp_path, engine, data=data)
    fresh = two()
    assert sw.load(tmp_path, engine, data=fresh) == {}
    assert {name: each.cursor() for name, each in fresh.items()} == {name: each.cursor() for name, each in data.items()}
    assert [each.cursor()["position"] for each in fresh.values()] == [3 * ROWS, 12]


class Unopened(IterableDataset[int]):
    """An iterable without places."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])


class Short(Squares):
    """Says that it has more samples than it has."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return [super(Short, self).__getitem__(at) for at in range(3)][index]


class ShortTogether(Short):
    """The same, for those who ask for a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class Ending:
    """Numbers without a size, which end."""

    def __getitem__(self, index: int) -> int:
        return [3, 4][index]


class Spent:
    """One iterator for all epochs."""

    def __init__(self) -> None:
        self.rows = iter(range(6))

    def open(self, position: int) -> Iterator[int]:
        return self.rows


class Opened:
    """Its `open` gives nothing."""

    def open(self, position: int) -> None:
        pass


def of(dataset: Any, **settings: Any) -> Any:
    return lambda: sw.Data(dataset, **{"global_batch": 4, **settings})


def read_all(dataset: Any, **settings: Any) -> Any:
    data = sw.Data(dataset, **{"global_batch": 4, **settings})
    return lambda: list(data.on(StandIn(alone(), PLANS[0])))


def after_a_save(saved: Any, data: Any) -> Any:
    """A load with data, of a save with others."""

    def call(folder: Path) -> None:
        engine = engine_of(PLANS[0], alone())
        sw.save(folder, engine, **({} if saved is None else {"data": saved}))
        sw.load(folder, engine, data=data)

    return call


def overtaken() -> None:
    data, engine = sw.Data(Squares(), global_batch=ROWS), StandIn(alone(), PLANS[0])
    first = iter(data.on(engine))
    engine.step(next(first))
    next(iter(data.on(engine)))
    next(first)


def differing() -> None:
    def on_rank(channel: sw.Channel) -> None:
        data = sw.Data(Squares(), global_batch=ROWS, seed=channel.rank // 3)
        next(iter(data.on(StandIn(channel, sw.Plan(mesh=sw.Mesh(dp_shard=4))))))

    sw.simulate(4, on_rank)


ONE = two()["text"]
WRONG: Any = {"text": Squares()}
REFUSED = Refusals(
    "data.data",
    {
        "no samples": of([]),
        "an iterable without places": of(Unopened()),
        "columns of several lengths": of({"x": torch.zeros(2), "y": torch.zeros(3)}),
        "columns that are no tensors": of({"x": [1, 2], "y": np.float64(3)}),
        "a column without rows": of({"x": torch.tensor(3)}),
        "no column": of({}),
        "a name": of("texts/train.jsonl"),
        "a class": of(Squares),
        "a tensor without a length": of(torch.tensor(3)),
        "no rows": of([1], global_batch=0),
        "a negative seed": of([1], seed=-1),
        "a seed that is a fraction": of([1], seed=1.0),
        "a seed of 64 bits": of([1], seed=1 << 63),
        "a collate that is a number": of([1], collate=3),
        "workers that are a flag": of([1], num_workers=True),
        "fewer rows than ranks": lambda: sw.Data([1], global_batch=3).on(
            StandIn(alone(), sw.Plan(mesh=sw.Mesh(dp_shard=4)))
        ),
        "no engine": lambda: sw.Data([1], global_batch=3).on(3),  # type: ignore[arg-type]
        "an empty stream": read_all(Counting(0)),
        "shorter than it says": read_all(Short()),
        "shorter than it says, at once": read_all(ShortTogether()),
        "numbers that end": read_all(Ending()),
        "one iterator for all epochs": read_all(Spent()),
        "nothing opened": read_all(Opened()),
        "a cursor without a position": lambda: two()["text"].resume({"epoch": 0}),
        "a cursor before the first": lambda: two()["text"].resume({"epoch": 0, "position": -1}),
        "a cursor that is a list": lambda: two()["text"].resume([3]),  # type: ignore[arg-type]
        "another order": after_a_save(ONE, sw.Data(Squares(44), global_batch=ROWS, seed=8)),
        "saved without data": after_a_save(None, ONE),
        "saved with several": after_a_save(two(), ONE),
        "one of several": after_a_save(two(), {"text": ONE}),
        "another order of one": after_a_save(two(), {**two(), "code": sw.Data(Squares(30), global_batch=4, seed=7)}),
        "a dataset saved in the place of data": after_a_save(Squares(), ONE),
        "a dataset among several": after_a_save(WRONG, ONE),
        "no data in a dict": after_a_save({}, ONE),
        "the key of data in extra": lambda folder: sw.save(
            folder, engine_of(PLANS[0], alone()), extra={"sw.Data": {}}, data=ONE
        ),
        "another loop": overtaken,
        "ranks with other data": differing,
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case: str) -> None:
    REFUSED.check(case)


def test_what_fails_in_a_worker_is_told_with_its_sample() -> None:
    with pytest.raises(DataError, match=r"a Short, has 43 samples by its __len__; sample \d+ raised IndexError: list"):
        read_all(Short(), num_workers=2, global_batch=SAMPLES)()


def test_whole_numbers_of_numpy_and_torch_are_whole_numbers() -> None:
    counts: dict[str, Any] = {"global_batch": np.int32(4), "seed": np.int64(3), "num_workers": torch.tensor(0)}
    data = sw.Data(list(range(9)), **counts)
    assert data.cursor() == {"epoch": 0, "position": 0, "seed": 3, "num_samples": 9}
    assert json.loads(json.dumps(data.cursor())) == data.cursor()


def test_a_program_ends_although_workers_read_ahead() -> None:
    program = (
        "import shardwise as sw\nfrom shardwise.comm import alone\nfrom tests.data.runs import *\n"
        "data = sw.Data(Squares(), global_batch=12, num_workers=2)\n"
        "batches = iter(data.on(StandIn(alone(), PLANS[0])))\nnext(batches)\nprint('over')\n"
    )
    with started(["-c", program]) as ended:
        assert ended.communicate(timeout=100) == ("over\n", "")
        assert ended.wait(timeout=0) == 0


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_workers_end_with_their_data(in_a_cycle: bool) -> None:
    before = set(multiprocessing.active_children())
    data = sw.Data(Squares(), global_batch=ROWS, num_workers=2)
    batches = iter(data.on(StandIn(alone(), PLANS[0])))
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    if in_a_cycle:
        cycle: list[Any] = [batches]
        cycle.append(cycle)
    del data, batches
    if in_a_cycle:
        del cycle
        gc.collect()
    assert not any(worker.is_alive() for worker in workers)
