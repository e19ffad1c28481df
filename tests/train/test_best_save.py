"""The best save of a loop: which it is, that it stays, and that nothing of others goes for it."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import Channel, alone, simulate
from shardwise.engine import Engine
from shardwise.train import BestSave, TrainingLoop
from tests.refusals import Refusals
from tests.train.runs import finished, small_run, without_times

LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.0}
"""Evaluations by step; the tie of the last one is no improvement."""


def engine_on(channel: Channel, mesh: sw.Mesh, stage: int) -> Engine[nn.Module]:
    torch.manual_seed(0)
    return sw.parallelize(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)),
        sw.Plan(mesh=mesh, sharding=sw.Sharding(stage=stage)),
        optimizer=lambda each: torch.optim.AdamW(each, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
        channel=channel,
        sample={"input": torch.ones(4, 3)},
    )


def trained(engine: Engine[nn.Module], loop: TrainingLoop, steps: int = 9) -> list[dict[str, torch.Tensor]]:
    """The weights after each step, whole."""
    weights = []
    for step in range(1, steps + 1):
        report = engine.step({"input": torch.ones(4, 3)})
        weights.append({name: tensor.clone() for name, tensor in sw.full(engine)})
        loop.after_step(report, {"loss": LOSSES[step]} if step in LOSSES else None)
    return weights


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [(sw.Mesh(), 0), (sw.Mesh(dp_shard=2), 1), (sw.Mesh(dp_shard=2), 3), (sw.Mesh(pp=2), 1)],
)
@pytest.mark.parametrize("load_at_end", [False, True])
def test_the_best_save_is_the_weights_of_the_best_evaluation_and_is_loaded_if_asked(
    tmp_path: Path, mesh: sw.Mesh, stage: int, load_at_end: bool
) -> None:
    def body(channel: Channel) -> None:
        engine = engine_on(channel, mesh, stage)
        with TrainingLoop(engine, [BestSave(str(tmp_path / "best"), load_at_end=load_at_end)]) as loop:
            weights = trained(engine, loop)
        assert sw.checkpoint.open(tmp_path / "best").step == 4
        now = dict(sw.full(engine))
        expected = weights[3 if load_at_end else -1]
        assert all(torch.equal(now[name], expected[name]) for name in expected)
        other = engine_on(channel, mesh, stage)
        assert sw.load(tmp_path / "best", other)["best"] == {"metric": "loss", "value": 1.0}
        loaded = dict(sw.full(other))
        assert all(torch.equal(loaded[name], weights[3][name]) for name in loaded)

    simulate(mesh.size, body)
    assert [folder.name for folder in (tmp_path / "best").iterdir()] == ["save-00000002"], "one save is kept"


@pytest.mark.parametrize("ends", ["an error", "a signal"])
def test_nothing_is_loaded_after_an_error_or_a_signal(tmp_path: Path, ends: str) -> None:
    engine = engine_on(alone(), sw.Mesh(), 1)
    with (
        contextlib.suppress(ZeroDivisionError),
        TrainingLoop(engine, [BestSave(str(tmp_path), load_at_end=True)]) as loop,
    ):
        weights = trained(engine, loop, steps=5)
        if ends == "an error":
            raise ZeroDivisionError
        loop.after_step(engine.step({"input": torch.ones(4, 3)}, stop=lambda: True))
        weights.append(dict(sw.full(engine)))
    assert all(torch.equal(tensor, weights[-1][name]) for name, tensor in sw.full(engine))


def test_a_metric_may_have_to_be_large(tmp_path: Path) -> None:
    engine = engine_on(alone(), sw.Mesh(), 1)
    with TrainingLoop(engine, [BestSave(str(tmp_path), mode="max", min_delta=0.5)]) as loop:
        trained(engine, loop)
    assert sw.checkpoint.open(tmp_path).step == 2


def looped(*callbacks: BestSave, folder: Path | None = None) -> None:
    """Two steps, with a save of others after each where there is a folder."""
    engine = engine_on(alone(), sw.Mesh(), 1)
    with TrainingLoop(engine, callbacks) as loop:
        for value in (3.0, 2.0):
            loop.after_step(engine.step({"input": torch.ones(4, 3)}), {"loss": value, "hits": -value})
            if folder is not None:
                sw.save(folder, engine)


def with_saves_before(folder: Path) -> None:
    sw.save(folder / "mine", engine_on(alone(), sw.Mesh(), 1))
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
        assert sw.load(folder, engine_on(alone(), sw.Mesh(), 1))["best"]["metric"] == "loss"


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


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_keeps_its_best_save_among_its_saves_and_can_go_on_from_it(tmp_path: Path, num_processes: int) -> None:
    words = [*MANY, "checkpoint.every=1", "checkpoint.keep=1"]
    whole = finished(small_run(tmp_path, *words, TABLE, num_processes=num_processes))
    value, step = best_of(whole)
    best = tmp_path / "out" / "checkpoints" / "best"
    assert 0 < step < 12, "the run gets worse at its end, else this shows nothing"
    assert sw.checkpoint.open(best).step == step
    assert sw.checkpoint.open(tmp_path / "out" / "checkpoints").step == 12
    assert f"best save: loss {value:.6g} at step {step}, in {best}" in whole.printed
    branch = small_run(tmp_path, *words, f"train.output={tmp_path / 'branch'}", num_processes=num_processes)
    resumed = finished(branch, resume=str(best))
    assert without_times(resumed.metrics) == without_times(whole.metrics)[step:]


def test_a_run_that_goes_on_keeps_the_best_save_of_before_until_there_is_a_better_one(tmp_path: Path) -> None:
    words = [*MANY, "checkpoint.every=2"]
    best = tmp_path / "out" / "checkpoints" / "best"
    first = finished(small_run(tmp_path, *words, TABLE, "train.steps=10"))
    value, step = best_of(first)
    again = finished(small_run(tmp_path, *words, TABLE), resume="auto")
    assert f"best save so far: loss {value:.6g} at step {step}, in {best}" in again.printed
    value, step = best_of(again)
    assert sw.checkpoint.open(best).step == step


def test_best_saves_alone_need_no_other_saves_and_a_fresh_run_does_not_overwrite_them(tmp_path: Path) -> None:
    config = small_run(tmp_path, *MANY, TABLE)
    done = finished(config)
    saves = tmp_path / "out" / "checkpoints"
    assert [each.name for each in saves.iterdir()] == ["best"]
    assert sw.checkpoint.open(saves / "best").step == best_of(done)[1]
    # One command serves for all starts: this one had no save yet from which to go on.
    assert "best save so far" in finished(config, resume="auto").printed


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
