"""The folder of a run of Lightning: its lines, its ranks, and its end."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

import shardwise as sw
from shardwise.lightning import RunRecord, Strategy
from shardwise.runs.rank_table import heading
from shardwise.runs.run_folder import view
from tests.lightning.lightning_modules import PLANS, ByHand, Net, fitted, under
from tests.refusals import Refusals


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_lines_have_the_losses_of_steps_and_validations_and_the_times_of_ranks(tmp_path: Path) -> None:
    def run(strategy: Any, **asked: Any) -> list[float]:
        record = RunRecord(tmp_path)
        return fitted(strategy, Net, record, log_every_n_steps=2, **asked)[1].losses

    losses, _ = under(PLANS["stage 3"], run)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [2, 3, 4, 6, 6]  # three batches are an epoch
    assert [line["loss"] for line in lines[:4]] == pytest.approx([losses[at - 1] for at in (2, 3, 4, 6)])
    assert [line["held_out_loss"] is not None for line in lines] == [False, True, False, False, True]
    assert all(len(line["ranks"]) == 2 for line in lines[:4])
    assert view(tmp_path).state == "finished"
    assert f"{tmp_path.name}  step 6/6  loss {losses[-1]:.4f}  held-out " in heading(view(tmp_path))


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_fit_that_ends_between_two_lines_has_its_last_update(is_endless: bool, tmp_path: Path) -> None:
    asked = {"max_epochs": -1, "max_time": {"seconds": 1}} if is_endless else {}
    record = RunRecord(tmp_path)
    _, seen = fitted(Strategy(sw.Plan()), Net, record, limit_val_batches=0, log_every_n_steps=10**6, **asked)
    (line,) = lines_of(tmp_path)
    assert line["loss"] == pytest.approx(seen.losses[-1])
    said = f"step {line['step']}" if is_endless else "step 6/6"
    assert f"{tmp_path.name}  {said}  loss " in heading(view(tmp_path))


@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
def test_a_trace_has_the_updates_of_all_ranks_and_changes_no_number(by_hand: bool, tmp_path: Path) -> None:
    def run(channel: sw.Channel, folder: Path | None) -> list[float]:
        strategy = Strategy(PLANS["stage 3"], channel=channel, trace=folder)
        return fitted(strategy, ByHand if by_hand else Net)[1].losses

    traced = sw.simulate(2, lambda channel: run(channel, tmp_path / "traced"))
    assert traced == sw.simulate(2, lambda channel: run(channel, None))
    events = json.loads((tmp_path / "traced" / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert (names.count("step"), names.count("forward head")) == (6, 6)


def test_an_error_is_how_a_run_has_ended(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, *given: Any) -> None:
            raise KeyError("x")

    with pytest.raises(KeyError):
        under(PLANS["one rank"], lambda strategy: fitted(strategy, Net, RunRecord(tmp_path), Fails()))
    assert view(tmp_path).state == "failed: KeyError: 'x'"


REFUSED = Refusals("lightning.run_record", {"a plain strategy": lambda: fitted("auto", Net, RunRecord("x"))})


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_without_ranks_is_refused(case: str) -> None:
    REFUSED.check(case)
