"""Loops that are ahead, leave batches out, change them or train on them twice: the cursor counts what was trained."""

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import DataError
from tests.data.runs import PLANS, ROWS, SAMPLES, Counting, Endless, Squares, StandIn, engine_of
from tests.properties import tried

Batch = dict[str, Any]


def whole(batch: Batch) -> Batch:
    return batch


def part(batch: Batch) -> Batch:
    return {"number": batch["number"]}


def views(batch: Batch) -> Batch:
    return {"now": batch["number"][:-1], "next": batch["number"][1:]}


def copied(batch: Batch) -> Batch:
    return {name: value.clone() for name, value in batch.items()}


def ahead(batches: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """What a loop does that moves batches to a device while the one before is trained on."""
    waiting: deque[Batch] = deque()
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > depth:
            yield waiting.popleft()
    yield from waiting


def place(cursor: dict[str, Any], *, size: int | None) -> int:
    """Samples before the cursor."""
    return int(cursor["epoch"] * (size or 0) + cursor["position"])


@tried(15)
@given(
    kind=st.sampled_from([Squares, Counting, Endless]),
    depth=st.integers(0, 3),
    given_=st.sampled_from([whole, part, views]),
    drawn=st.randoms(use_true_random=False),
)
def test_the_cursor_is_behind_the_last_batch_that_was_trained_on(
    kind: Callable[[], Any], depth: int, given_: Callable[[Batch], Batch], drawn: random.Random
) -> None:
    size = None if kind is Endless else SAMPLES
    data, engine = sw.Data(kind(), global_batch=ROWS, seed=7), StandIn(alone(), PLANS[0])

    def forever() -> Iterator[Batch]:
        while True:
            yield from data.on(engine)

    at = 0
    for number, batch in enumerate(ahead(forever(), depth)):
        if drawn.random() < 0.7:
            for _ in range(drawn.randint(1, 2)):
                engine.step(given_(batch))
            at = (number + 1) * ROWS
            if not depth:  # nothing is left to train on: a step on other rows moves nothing
                engine.step({"other": torch.zeros(1)})
        assert place(data.cursor(), size=size) == at
        if number == 12:
            break
    fresh = sw.Data(kind(), global_batch=ROWS, seed=7)
    fresh.resume(data.cursor())
    again = next(iter(fresh.on(engine)))["number"].tolist()
    undisturbed = sw.Data(kind(), global_batch=ROWS, seed=7)
    through = (each for _ in range(99) for each in undisturbed.on(StandIn(alone(), PLANS[0])))
    expected = [next(through)["number"].tolist() for _ in range(at // ROWS + 1)]
    assert again == expected[-1]


def test_copies_are_counted_where_one_batch_alone_can_be_meant() -> None:
    data, engine = sw.Data(Squares(), global_batch=ROWS, seed=7), StandIn(alone(), PLANS[0])
    for number, batch in enumerate(data.on(engine)):
        engine.step(copied(batch))
        assert place(data.cursor(), size=SAMPLES) == (number + 1) * ROWS
    assert data.epoch == 1


def test_copies_of_a_loop_that_is_ahead_are_told_when_it_saves() -> None:
    data, engine = sw.Data(Squares(), global_batch=ROWS, seed=7), StandIn(alone(), PLANS[0])
    words = r"1 steps on copies or on other batches, while the loop was 2 batches ahead.*make changes in"
    batches = ahead(iter(data.on(engine)), 1)
    engine.step(copied(next(batches)))
    with pytest.raises(DataError, match=words):
        data.cursor()
    # At the end of the epoch it has made as many steps as it got batches.
    for batch in batches:
        engine.step(copied(batch))
    assert (data.epoch, place(data.cursor(), size=SAMPLES)) == (1, 4 * ROWS)


def test_a_batch_is_known_again_although_all_batches_share_a_tensor() -> None:
    mask = torch.ones(3)
    data = sw.Data(
        Squares(), global_batch=ROWS, seed=7, collate=lambda rows: {"x": torch.zeros(len(rows)), "mask": mask}
    )
    engine = StandIn(alone(), PLANS[0])
    batches = ahead(iter(data.on(engine)), 2)
    engine.step(next(batches))
    assert place(data.cursor(), size=SAMPLES) == ROWS
    only_read = sw.Data(Squares(), global_batch=ROWS, collate=lambda rows: {"x": torch.zeros(len(rows)), "mask": mask})
    assert sum(1 for _ in only_read.on(StandIn(alone(), PLANS[0]))) > 2
    assert (only_read.epoch, only_read.cursor()["epoch"]) == (1, 1)


def test_batches_in_buffers_that_are_filled_anew_are_known_again() -> None:
    buffers = deque([torch.zeros(ROWS), torch.zeros(ROWS)])

    def filled(rows: list[Any]) -> Batch:
        buffers.rotate()
        return {"x": buffers[0].fill_(len(rows))}

    data, engine = sw.Data(Squares(), global_batch=ROWS, seed=7, collate=filled), StandIn(alone(), PLANS[0])
    for number, batch in enumerate(ahead(iter(data.on(engine)), 1)):
        engine.step(batch)
        assert place(data.cursor(), size=SAMPLES) == (number + 1) * ROWS


def test_a_load_between_a_batch_and_its_step_counts_nothing(tmp_path: Path) -> None:
    engine = engine_of(PLANS[0], alone())
    data = sw.Data(Squares(), global_batch=ROWS, seed=7)
    for number, batch in enumerate(data.on(engine)):
        if number == 1:
            sw.load(tmp_path, engine)
            assert data.cursor()["position"] == ROWS
            break
        engine.step(batch)
        sw.save(tmp_path, engine)


def test_a_loop_that_only_evaluates_has_read_its_epoch_at_the_end() -> None:
    train, held_out = (sw.Data(Squares(), global_batch=ROWS, seed=seed) for seed in (7, 8))
    engine = StandIn(alone(), PLANS[0])
    for number, batch in enumerate(train.on(engine)):
        assert sum(1 for _ in held_out.on(engine)) > 2
        assert held_out.epoch == number + 1
        engine.step(batch)
        assert place(train.cursor(), size=SAMPLES) == (number + 1) * ROWS
    # One that is left anew each time begins anew, whatever is trained meanwhile.
    begun = held_out.cursor()
    for batch in train.on(engine):
        for at, _ in enumerate(held_out.on(engine)):
            if at == 2:
                break
        for _ in range(2):
            engine.step(copied(batch))
        assert held_out.cursor() == begun


def test_batches_of_two_data_in_one_step_are_counted_for_both() -> None:
    first, second = (sw.Data(Squares(), global_batch=ROWS, seed=seed) for seed in (7, 8))
    engine = StandIn(alone(), PLANS[0])
    for number, (one, other) in enumerate(zip(first.on(engine), second.on(engine), strict=False)):
        engine.step({"one": one["number"], "other": other["number"]})
        for data in (first, second):
            assert place(data.cursor(), size=SAMPLES) == (number + 1) * ROWS
        if number == 1:
            break


def test_data_that_the_program_has_dropped_are_not_held_by_the_engine() -> None:
    engine = StandIn(alone(), PLANS[0])
    data = sw.Data(Squares(), global_batch=ROWS)
    held = weakref.ref(data)
    batch = next(iter(data.on(engine)))
    del data
    assert held() is None
    engine.step(batch)
