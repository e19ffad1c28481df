"""A Trainer over an `sw.Data`: the order of one process on any ranks, and resumes that read what is left alone."""

from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
import shardwise.hf as hf
from tests.hf.tiny_trainers import PLANS, arguments, assert_close, build, logged, rows_of
from tests.refusals import Refusals

SAMPLES = rows_of(22)
"""Three updates of 8 rows are an epoch of the Trainer."""


class Noted:
    """The samples, and which of them were read."""

    def __init__(self, read: list[int]) -> None:
        self.read = read

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, at: int) -> Any:
        self.read.append(at)
        return SAMPLES[at]


def run(folder: Path, plan: str, *, resumes: bool = False, **asked: Any) -> tuple[list[Any], list[int]]:
    """What is logged, and the rows that ranks have read, along pp and tp once."""
    layout, num_data_ranks = PLANS[plan]
    read: list[list[int]] = [[] for _ in range(layout.mesh.size)]

    def on(channel: sw.Channel) -> list[Any]:
        data = sw.Data(Noted(read[channel.rank]), global_batch=8, seed=5)
        settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, **asked}
        args = arguments(str(folder), 4 // num_data_ranks, of=hf.TrainingArguments, **settings)
        trainer = hf.Trainer(build(), args, train_dataset=data, plan=layout, channel=channel)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resumes else None)
        return logged(trainer)

    logs, *_ = sw.simulate(layout.mesh.size, on)
    data_ranks = [layout.mesh.data_rank(rank) for rank in range(layout.mesh.size)]
    return logs[:-1], [
        at for rank, each in enumerate(read) if rank == data_ranks.index(data_ranks[rank]) for at in each
    ]


def test_every_plan_trains_on_the_rows_of_one_process_and_resumes_on_the_next_one_reading_no_other(
    tmp_path: Path,
) -> None:
    whole, rows = run(tmp_path / "one", "one process")
    assert len(whole) == 6
    left = sorted(rows[16:])
    for plan in ("stage 3", "pp"):
        found, read = run(tmp_path / plan, plan)
        assert_close(found, whole)
        assert sorted(read) == sorted(rows)
        resumed, read = run(tmp_path / plan, plan, resumes=True)
        assert resumed == found
        assert sorted(read) == left
    elsewhere, read = run(tmp_path / "stage 3", "one process", resumes=True)
    assert_close(elsewhere, whole)
    assert read == rows[16:]


def test_rows_without_an_end_train_for_so_many_steps(tmp_path: Path) -> None:
    class Endless:
        def __getitem__(self, at: int) -> Any:
            return SAMPLES[at % len(SAMPLES)]

    args = arguments(str(tmp_path), 4, of=hf.TrainingArguments, max_steps=3)
    trainer = hf.Trainer(build(), args, train_dataset=sw.Data(Endless(), global_batch=8), plan=sw.Plan())
    trainer.train()
    assert trainer.state.global_step == 3


def another_batch(folder: Path) -> None:
    args = arguments(str(folder), 4, of=hf.TrainingArguments)
    hf.Trainer(build(), args, train_dataset=sw.Data(SAMPLES, global_batch=6), plan=sw.Plan()).train()


def evaluated(folder: Path) -> None:
    data = sw.Data(SAMPLES, global_batch=2)
    hf.Trainer(build(), arguments(str(folder), 1), train_dataset=data, eval_dataset={"held out": data})


REFUSED = Refusals("hf.data_order", {"another global batch": another_batch, "an evaluation of it": evaluated})


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_a_trainer_cannot_take_are_refused(case: str) -> None:
    REFUSED.check(case)
