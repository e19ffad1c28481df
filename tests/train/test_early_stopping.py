"""Early stopping, against a loop with a count in it, and through a resume."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.train import EarlyStopping, EvaluationValues
from tests.properties import tried
from tests.refusals import Refusals
from tests.train.runs import finished, small_run


def stopped_at(values: list[float], patience: int, min_delta: float, mode: str) -> int | None:
    """The number of the evaluation after which a hand-written loop stops."""
    best, waited = None, 0
    for number, value in enumerate(values):
        signed = value if mode == "min" else -value
        if math.isfinite(value) and (best is None or signed < best - min_delta):
            best, waited = signed, 0
        else:
            waited += 1
        if waited == patience:
            return number
    return None


class Wished:
    """Of a loop, that which a callback asks to stop."""

    def __init__(self) -> None:
        self.why = ""

    def stop(self, why: str) -> None:
        self.why = self.why or why


@tried(100)
@given(
    values=st.lists(st.sampled_from([1.0, 1.5, 2.0, 2.5, 3.0, math.nan, math.inf]), max_size=12),
    patience=st.integers(1, 4),
    min_delta=st.sampled_from([0.0, 0.5, 0.75]),
    mode=st.sampled_from(["min", "max"]),
    cut=st.integers(0, 12),
)
@example(values=[2.0, 2.0, 2.0], patience=2, min_delta=0.0, mode="min", cut=1)
def test_it_stops_where_a_count_by_hand_stops_also_through_a_save(
    values: list[float], patience: int, min_delta: float, mode: Any, cut: int
) -> None:
    def made() -> EarlyStopping:
        return EarlyStopping("score", patience=patience, min_delta=min_delta, mode=mode)

    stopping, found = made(), None
    loop: Any = Wished()
    for number, value in enumerate(values):
        if number == cut:
            state, stopping = stopping.state_dict(), made()
            stopping.load_state_dict(state)
            stopping.on_begin(loop)
        stopping.on_evaluation(loop, EvaluationValues(step=number, values={"loss": 0.0, "score": value}))
        if found is None and loop.why:
            found = number
    assert found == stopped_at(values, patience, min_delta, mode)


def test_a_run_that_no_longer_improves_ends_and_says_why(tmp_path: Path) -> None:
    tables = 'train.callbacks=[{factory = "shardwise.train:EarlyStopping", options = {patience = 2, min_delta = 9.0}}]'
    settings = ["train.steps=20", "train.evaluate_every=2", "checkpoint.every=50", "checkpoint.keep=1"]
    config = small_run(tmp_path, *settings, tables, num_processes=2)
    done = finished(config)
    best = done.curve("held_out_loss")[0]
    why = f"loss has not improved in 2 evaluations; the best was loss {best:.6g} at step 2"
    assert f"ended after step 7: {why}" in done.printed
    assert done.metrics[-1]["step"] == 7
    assert sw.checkpoint.open(tmp_path / "out" / "checkpoints").step == 7
    again = finished(config, resume="auto")
    assert f"ended after step 7: {why.replace('2 eval', '3 eval')}" in again.printed  # that of step 7 counts
    assert again.metrics[-1]["step"] == 7
    patience = tables.replace("= 2,", "= 5,")
    patient = finished(small_run(tmp_path, *settings, patience, num_processes=2), resume="auto")
    assert "ended after step 11: loss has not improved in 5 evaluations" in patient.printed


REFUSED = Refusals(
    "train.early_stopping",
    {
        str(options): partial(EarlyStopping, **options)
        for options in ({"patience": 0}, {"patience": 1.5}, {"min_delta": -1.0}, {"mode": "lowest"})
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_make_no_sense_are_refused(case: str) -> None:
    REFUSED.check(case)


def test_the_state_of_another_metric_is_not_taken() -> None:
    stopping = EarlyStopping("loss", patience=1)
    stopping.load_state_dict({"metric": "f1", "num_worse": 3, "best": 0.5, "best_step": 2})
    assert stopping.num_worse == 0
