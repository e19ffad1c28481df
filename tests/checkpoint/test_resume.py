"""Save at step 2 of 5 and go on; restart from the save: the losses after it are equal bit for bit."""

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.arrangement import FileLayout
from shardwise.plan.specs import Partition
from tests.checkpoint.layouts import engine_of, layout, train
from tests.covering import covering

CASES = covering(
    (None, "bfloat16"), (0, 1), ("slice", "whole"), ("pieces", "whole"), (1, 4), ("at once", "in background")
)


@pytest.mark.parametrize(("compute", "stage", "partition", "file_layout", "k", "when"), CASES)
def test_the_losses_after_a_restart_are_those_of_the_run_that_went_on(
    compute: str | None, stage: int, partition: Partition, file_layout: FileLayout, k: int, when: str, tmp_path: Path
) -> None:
    plan = layout(1, 2, stage, partition, 500, compute=compute, microbatches=k)

    def save(engine: sw.Engine, channel: sw.Channel, saver: sw.checkpoint.AsyncSaver) -> None:
        if when == "in background":
            saver.save(engine, extra={"step": 2})
        else:
            sw.save(tmp_path, engine, extra={"step": 2}, layout=file_layout, channel=channel)

    def uninterrupted(channel: sw.Channel) -> list[float]:
        engine = engine_of(plan, channel)
        train(engine, channel, range(2))
        with sw.checkpoint.AsyncSaver(tmp_path, layout=file_layout, channel=channel) as saver:
            save(engine, channel, saver)
            return train(engine, channel, range(2, 5))

    def restarted(channel: sw.Channel) -> list[float]:
        engine = engine_of(plan, channel, seed=3)
        assert sw.load(tmp_path, engine, channel=channel) == {"step": 2}
        return train(engine, channel, range(2, 5))

    expected = sw.simulate(2, uninterrupted)
    assert sw.simulate(2, restarted) == expected
    assert len(set(expected[0])) == 3, "the losses move, so that equal ones say something"


def test_a_learning_rate_that_a_schedule_changed_goes_on_from_where_it_was(tmp_path: Path) -> None:
    plan = layout(1, 2, 1, "slice", 500)

    def run(channel: sw.Channel) -> tuple[list[float], list[float]]:
        engine = engine_of(plan, channel)
        schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        train(engine, channel, range(1))
        schedule.step()
        sw.save(tmp_path, engine, channel=channel)
        expected = train(engine, channel, range(1, 4))
        fresh = engine_of(plan, channel, seed=1)
        sw.load(tmp_path, fresh, channel=channel)
        rates = [group["lr"] for group in fresh.optimizer.param_groups]
        assert rates == [0.5e-2, 1.5e-3]
        return expected, train(fresh, channel, range(1, 4))

    for expected, got in sw.simulate(2, run):
        assert got == expected


def test_a_load_into_an_engine_that_has_trained_undoes_what_it_learnt(tmp_path: Path) -> None:
    plan = layout(1, 3, 1, "slice", 300, compute="bfloat16")

    def run(channel: sw.Channel) -> None:
        engine = engine_of(plan, channel)
        train(engine, channel, range(2))
        sw.save(tmp_path, engine, channel=channel)
        first = train(engine, channel, range(2, 4))
        sw.load(tmp_path, engine, channel=channel)
        assert train(engine, channel, range(2, 4)) == first

    sw.simulate(3, run)
