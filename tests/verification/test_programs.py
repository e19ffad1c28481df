"""Programs with a loop of their own are compared update by update, as far as they go."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.verification.report import VerificationReport
from tests.oracle.batches import Batch, word_loss
from tests.refusals import Refusals
from tests.verification.verified import Net, batches, compared, plan

Parallelize = Callable[..., sw.Engine[Any]]


def is_one_process() -> bool:
    return not threading.current_thread().name.startswith("simulated rank")


def engine_of(parallelize: Parallelize, **settings: Any) -> sw.Engine[Any]:
    torch.manual_seed(3)
    made: dict[str, Any] = {"optimizer": lambda each: torch.optim.AdamW(each, lr=0.01), "loss": word_loss, **settings}
    return parallelize(Net(), **made)


def share_of(engine: sw.Engine[Any], batch: Batch) -> Batch:
    mesh = engine.plan.mesh
    size = len(batch["words"]) // mesh.num_data_ranks
    first = mesh.data_rank(engine.channel.rank) * size
    return {name: each[first : first + size] for name, each in batch.items()}


def long_loop(parallelize: Parallelize) -> None:
    """A schedule, a clamp after each update, an evaluation between, and more updates than anybody waits for."""
    engine = engine_of(parallelize, groups={"inner": ["wide", "narrow"]})
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    for update, batch in enumerate(batches(1000, 8)):
        engine.step(share_of(engine, batch), only="inner" if update == 1 else None)
        schedule.step()
        with torch.no_grad():
            for group in engine.optimizer.param_groups:
                for each in group["params"]:
                    each.clamp_(-0.3, 0.3)
        engine.evaluate(share_of(engine, batch))


@pytest.mark.parametrize(
    ("asked", "verdict"), [(plan(dp_shard=2), "rounding"), (plan(4, pp=2), "equal"), (plan(4, tp=2), "rounding")]
)
def test_a_loop_of_its_own_is_compared_for_some_updates_and_left(asked: sw.Plan, verdict: str) -> None:
    report = sw.verify_program(long_loop, asked)
    assert report.verdict == verdict, report.text()
    assert len(report.steps) == 3
    # Of the second update those of the group alone.
    assert compared(report, "mean gradients")[0] == 8 + 4 + 8


def on_data(parallelize: Parallelize) -> None:
    engine = engine_of(parallelize)
    rows = [{name: each[0] for name, each in batch.items()} for batch in batches(20, 1)]
    for batch in sw.Data(rows, global_batch=8, seed=1).on(engine):
        engine.step(batch)


def lists(parallelize: Parallelize) -> None:
    """Microbatches of unlike sizes, more of them on the second data rank."""
    engine = engine_of(parallelize, loss_weight=lambda batch: float((batch["words"][0, 0] > 2).item()))
    parts = [
        [{name: each[at : at + rows] for name, each in batch.items()} for at, rows in ((0, 1), (1, 2), (3, 2))]
        for batch in batches(2, 5)
    ]
    own = engine.plan.mesh.data_rank(engine.channel.rank)
    for one, two, three in parts:
        engine.step([one, two, three] if engine.plan.mesh.num_data_ranks == 1 else [[one], [two, three]][own])


@pytest.mark.parametrize("program", [on_data, lists])
def test_data_and_lists_of_microbatches_are_those_of_all_data_ranks_in_order(program: Callable[..., None]) -> None:
    """On ranks of the caller, all of which get the report."""

    def run(channel: sw.Channel) -> VerificationReport:
        return sw.verify_program(program, plan(dp_shard=2), steps=2, channel=channel)

    report, other = sw.simulate(2, run)
    assert report == other
    assert report.verdict in ("rounding", "equal"), report.text()
    assert len(report.steps) == 2


@pytest.mark.quick
def test_rows_in_another_order_are_named() -> None:
    def striped(parallelize: Parallelize) -> None:
        engine = engine_of(parallelize)
        mesh = engine.plan.mesh
        for batch in batches(2, 8):
            own = slice(mesh.data_rank(engine.channel.rank), None, mesh.num_data_ranks)
            engine.step({name: each[own] for name, each in batch.items()})

    found = sw.verify_program(striped, plan(dp_shard=2)).divergence
    assert found is not None
    assert (found.kind, found.tensor, found.step, found.microbatch, found.rank) == ("batch", "microbatch", 0, 0, 0)
    assert "The first data rank has to train on the first rows" in found.text()


@pytest.mark.parametrize(("ours", "theirs", "words"), [(1, 2, "1"), (2, 1, "at least 2")])
def test_an_end_before_the_other_side_is_named(ours: int, theirs: int, words: str) -> None:
    def program(parallelize: Parallelize) -> None:
        engine = engine_of(parallelize)
        for batch in batches(ours if is_one_process() else theirs, 8):
            engine.step(share_of(engine, batch))

    report = sw.verify_program(program, plan(pp=2))
    found = report.divergence
    assert (report.verdict, len(report.steps)) == ("diverges", 1)
    assert found is not None
    assert (found.tensor, found.step, found.one_process, found.layout) == ("updates", 1, words, str(theirs))


@pytest.mark.parametrize("as_arrays", [False, True])
def test_on_a_device_microbatches_lie_in_memory_as_on_their_ranks(fake: str, as_arrays: bool) -> None:
    offsets: dict[bool, list[int]] = {True: [], False: []}

    class Placed(Net):
        is_one: bool

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            offsets[self.is_one].append(int(words.storage_offset()))
            return super().forward(words)

    def program(parallelize: Parallelize) -> None:
        torch.manual_seed(0)
        model = Placed()
        engine = parallelize(model, optimizer=torch.optim.SGD, loss=word_loss)
        model.is_one = engine.plan.mesh.size == 1
        (batch,) = batches(1, 8)
        share = share_of(engine, batch)
        engine.step({name: each.numpy() for name, each in share.items()} if as_arrays else share)

    def run(channel: sw.Channel) -> VerificationReport:
        return sw.verify_program(program, plan(dp_shard=2), channel=channel)

    assert sw.simulate(2, run, device=fake)[0].verdict == "rounding"
    assert offsets[True] == [0, 10, 0, 10]
    assert sorted(offsets[False]) == [0, 0, 10, 10]


def asked_of(program: Any, layout: Any = None, **settings: Any) -> None:
    sw.verify_program(program, plan(dp_shard=2) if layout is None else layout, **settings)


def twice(parallelize: Parallelize) -> None:
    engine_of(parallelize)
    engine_of(parallelize)


def uneven(parallelize: Parallelize) -> None:
    engine_of(parallelize).step(batches(1, 3)[0])


REFUSED = Refusals(
    "verification.programs",
    {
        "no program": lambda: asked_of(3),
        "no plan": lambda: asked_of(long_loop, {"tp": 2}),
        "no steps": lambda: asked_of(long_loop, steps=0),
        "no update": lambda: asked_of(engine_of),
        "no engine": lambda: asked_of(lambda parallelize: None),
        "two engines": lambda: asked_of(twice),
        "rows that are not cut evenly": lambda: asked_of(uneven),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_a_program_that_cannot_be_compared_is_refused_in_words(case: str) -> None:
    REFUSED.check(case)


def test_errors_of_a_program_are_its_own() -> None:
    def failing(parallelize: Parallelize) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sw.verify_program(failing, plan(pp=2))
