"""The best save of a loop: which it is, that it stays, and that nothing of others goes for it."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel, alone, simulate
from shardwise.train import BestSave, TrainingLoop
from tests.engine.loops import begun, plan_of
from tests.refusals import Refusals
from tests.train.runs import finished, small_run, without_times

LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.0}
"""Evaluations by step; the tie of the last one is no improvement."""
ONES = torch.ones(4, 3)


def engine_on(channel: Channel, plan: sw.Plan | None = None) -> Any:
    return begun(channel, lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), plan, sample={"input": ONES})


def trained(engine: Any, loop: TrainingLoop, steps: int = 9) -> list[dict[str, torch.Tensor]]:
    """The weights after each step, whole."""
    weights = []
    for step in range(1, steps + 1):
        report = engine.step({"input": ONES})
        weights.append({name: tensor.clone() for name, tensor in sw.full(engine)})
        loop.after_step(report, {"loss": LOSSES[step]} if step in LOSSES else None)
    return weights


@pytest.mark.parametrize(("plan", "load_at_end"), [(plan_of("dp_shard=2", 3), False), (plan_of("pp=2"), True)])
def test_the_best_save_is_the_weights_of_the_best_evaluation_and_is_loaded_if_asked(
    tmp_path: Path, plan: sw.Plan, load_at_end: bool
) -> None:
    def body(channel: Channel) -> None:
        engine = engine_on(channel, plan)
        with TrainingLoop(engine, [BestSave(str(tmp_path / "best"), load_at_end=load_at_end)]) as loop:
            weights = trained(engine, loop)
        assert sw.checkpoint.open(tmp_path / "best").step == 4
        now = dict(sw.full(engine))
        expected = weights[3 if load_at_end else -1]
        assert all(torch.equal(now[name], expected[name]) for name in expected)
        other = engine_on(channel, plan)
        assert sw.load(tmp_path / "best", other)["best"] == {"metric": "loss", "value": 1.0}
        loaded = dict(sw.full(other))
        assert all(torch.equal(loaded[name], weights[3][name]) for name in loaded)

    simulate(2, body)
    assert [folder.name for folder in (tmp_path / "best").iterdir()] == ["save-00000002"], "one save is kept"


@pytest.mark.parametrize("ends", ["an error", "a signal", "at its end"])
def test_a_metric_may_have_to_be_large_and_nothing_is_loaded_after_an_error_or_a_signal(
    tmp_path: Path, ends: str
) -> None:
    engine = engine_on(alone())
    best = BestSave(str(tmp_path), mode="max", min_delta=0.5, load_at_end=True)
    with contextlib.suppress(ZeroDivisionError), TrainingLoop(engine, [best]) as loop:
        weights = trained(engine, loop)
        if ends == "an error":
            raise ZeroDivisionError
        if ends == "a signal":
            loop.after_step(engine.step({"input": ONES}, stop=lambda: True))
            weights.append(dict(sw.full(engine)))
    expected = weights[1 if ends == "at its end" else -1]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sw.full(engine))
    assert sw.checkpoint.open(tmp_path).step == 2


def looped(*callbacks: BestSave, folder: Path | None = None) -> None:
    """Two steps, with a save of others after each where there is a folder."""
    engine = engine_on(alone())
    with TrainingLoop(engine, callbacks) as loop:
        for value in (3.0, 2.0):
            loop.after_step(engine.step({"input": ONES}), {"loss": value, "hits": -value})
            if folder is not None:
                sw.save(folder, engine)


def with_saves_before(folder: Path) -> None:
    sw.save(folder / "mine", engine_on(alone()))
    looped(BestSave(str(folder / "mine")))


def with_saves_between(folder: Path) -> None:
    try:
        looped(BestSave(str(folder)), folder=folder)
    finally:
        assert len(list(folder.iterdir())) == 2


def of_two_metrics(folder: Path) -> None:
    try:
        looped(BestSave(str(folder)), BestSave(str(folder), metric="hits"))
    finally:
        assert sw.load(folder, engine_on(alone()))["best"]["metric"] == "loss"


def of_another_run(folder: Path) -> None:
    config = small_run(folder, *MANY, TABLE)
    finished(config)
    finished(config)


REFUSED = Refusals(
    "train.best_save",
    {
        "saves of others before": with_saves_before,
        "saves of others between": with_saves_between,
        "two metrics": of_two_metrics,
        "no folder": lambda: looped(BestSave()),
        "another run": of_another_run,
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_saves_of_others_are_never_pruned_for_a_best_one(case: str) -> None:
    REFUSED.check(case)


TABLE = 'train.callbacks=[{factory = "shardwise.train:BestSave"}]'
MANY = ("train.steps=12", "train.evaluate_every=1", "train.decay=constant", "train.learning_rate=0.5")


def best_of(done: Any) -> tuple[float, int]:
    curve = done.curve("held_out_loss")
    return min(curve), curve.index(min(curve)) + 1


def test_a_run_keeps_its_best_save_among_its_saves_and_can_go_on_from_it(tmp_path: Path) -> None:
    words = [*MANY, "checkpoint.every=1", "checkpoint.keep=1"]
    whole = finished(small_run(tmp_path, *words, TABLE, num_processes=2))
    value, step = best_of(whole)
    best = tmp_path / "out" / "checkpoints" / "best"
    assert 0 < step < 12, "the run gets worse at its end, else this shows nothing"
    assert sw.checkpoint.open(best).step == step
    assert sw.checkpoint.open(tmp_path / "out" / "checkpoints").step == 12
    assert f"best save: loss {value:.6g} at step {step}, in {best}" in whole.printed
    branch = small_run(tmp_path, *words, f"train.output={tmp_path / 'branch'}", num_processes=2)
    resumed = finished(branch, resume=str(best))
    assert without_times(resumed.metrics) == without_times(whole.metrics)[step:]


@pytest.mark.parametrize("saves", [[], ["checkpoint.every=2"]], ids=["alone", "among others"])
def test_a_run_that_goes_on_keeps_the_best_save_of_before_until_there_is_a_better_one(
    tmp_path: Path, saves: list[str]
) -> None:
    """One command serves for all starts: with best saves alone the second run begins anew."""
    words = [*MANY, *saves, TABLE]
    best = tmp_path / "out" / "checkpoints" / "best"
    value, step = best_of(finished(small_run(tmp_path, *words, "train.steps=10")))
    assert saves or [each.name for each in best.parent.iterdir()] == ["best"]
    again = finished(small_run(tmp_path, *words), resume="auto")
    assert f"best save so far: loss {value:.6g} at step {step}, in {best}" in again.printed
    assert sw.checkpoint.open(best).step == best_of(again)[1]


def test_the_best_save_is_loaded_although_groups_have_changed_since(tmp_path: Path) -> None:
    words = [
        *MANY,
        "checkpoint.every=1",
        'train.callbacks=[{factory="shardwise.train:BestSave", options.load_at_end=true}]',
    ]
    finished(small_run(tmp_path, *words, "train.steps=2", "train.learning_rate=0.01"))
    best = sw.checkpoint.open(tmp_path / "out" / "checkpoints" / "best")
    # Large rates: no evaluation gets better, so that the best save has the groups of before.
    groups = "train.groups=[{parameters=['norm'], frozen=true}, {parameters=['*.bias'], learning_rate=50.0}]"
    again = finished(small_run(tmp_path, *words, "train.steps=4", "train.learning_rate=50.0", groups), resume="auto")
    assert f"at step {best.step}, in {tmp_path / 'out' / 'checkpoints' / 'best'}; the model has its values now" in (
        again.printed
    )
