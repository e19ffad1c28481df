"""The example scripts of transformers, with one changed import and a plan, against the plain ones in one process."""

from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from tests.hf.example_tasks import PLANS, TASKS, Outcome, causal_language_model, outcome


def check_equal(found: Outcome, expected: Outcome) -> None:
    assert len(expected.losses) == 4
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert [set(each) for each in found.evaluations] == [set(each) for each in expected.evaluations]
    for ours, plain in zip(found.evaluations, expected.evaluations, strict=True):
        for name in plain:
            assert name == "epoch" or ours[name] == pytest.approx(plain[name], rel=1e-5), name
    assert found.predictions.shape == expected.predictions.shape
    np.testing.assert_allclose(found.predictions, expected.predictions, atol=1e-4)
    assert set(found.weights) == set(expected.weights)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-4, atol=2e-6)


# Each task under one plan, and each plan under some task; the others are in `make stress`.
QUICK = {
    "causal_language_model": "dp_shard=2, stage 3",
    "masked_language_model": "pp=2",
    "sequence_to_sequence": "tp=2",
    "image_classification": "pp=2",
    "token_classification": "dp_shard=2, stage 3",
}


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        pytest.param(task, plan, marks=() if QUICK[task] == plan else pytest.mark.stress)
        for task in TASKS
        for plan in PLANS
        # Its collator draws masks for the batches that it makes: other ones on each data rank.
        if (task, plan) != ("masked_language_model", "dp_shard=2, stage 3")
    ],
)
def test_a_task_trains_evaluates_and_predicts_as_in_one_process(task: str, plan: str, tmp_path: Path) -> None:
    made = TASKS[task]()
    expected = outcome(made, tmp_path / "plain")

    def train(channel: sw.Channel) -> Outcome:
        return outcome(made, tmp_path / "plan", PLANS[plan], channel)

    for found in sw.simulate(2, train):
        check_equal(found, expected)


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if "dp" in plan else pytest.mark.stress) for plan in PLANS]
)
def test_a_run_goes_on_from_plain_to_a_plan_and_back(plan: str, tmp_path: Path) -> None:
    task = causal_language_model()
    saves = {"save_strategy": "steps", "save_steps": 1}
    expected = outcome(task, tmp_path / "plain", **saves)

    def go_on(channel: sw.Channel) -> Outcome:
        resume = str(tmp_path / "plain/checkpoint-2")
        return outcome(task, tmp_path / "plan", PLANS[plan], channel, resume=resume, **saves)

    for found in sw.simulate(2, go_on):
        check_equal(found, expected)
    check_equal(outcome(task, tmp_path / "back", resume=str(tmp_path / "plan/checkpoint-3"), **saves), expected)
