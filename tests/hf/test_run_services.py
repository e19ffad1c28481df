"""The folder of a Trainer's run, as `shardwise top` shows it."""

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise.hf as hf
from shardwise.runs.rank_table import heading, table
from shardwise.runs.run_folder import view
from tests.hf.tiny_trainers import Make, simple, under


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_top_shows_what_the_trainer_logs_and_what_its_ranks_do(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3}
    make = simple(**asked, logging_strategy="epoch", eval_strategy="steps", eval_steps=2)
    logs, _ = under("stage 3", make, microbatches=2, folder=str(tmp_path))
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [2, 3, 4, 6]  # evaluations, and ends of epochs
    losses = {each["step"]: each["eval_loss"] for each in logs if "eval_loss" in each}
    assert {line["step"]: line["held_out_loss"] for line in lines if line["step"] in losses} == losses
    assert [[each["rank"] for each in line["ranks"]] for line in lines] == [[0, 1]] * 4
    shown = view(tmp_path)
    assert shown.state == "finished"
    assert f"{tmp_path.name}  step 6/6  loss " in heading(shown)
    assert table(shown)[1].split()[0] == "0"

    elapsed_s = lines[1]["elapsed_s"]
    under(
        "one process",
        make,
        lambda trainer: trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3")),
        microbatches=2,
        folder=str(tmp_path),
    )
    again = lines_of(tmp_path)
    assert again[:2] == lines[:2]
    assert [line["step"] for line in again[2:]] == [4, 6]
    assert [len(line["ranks"]) for line in again] == [2, 2, 1, 1]
    assert again[2]["elapsed_s"] > elapsed_s


def test_an_evaluation_after_the_line_of_its_update_has_one_of_its_own(tmp_path: Path) -> None:
    logs, *_ = under("pp", simple(eval_strategy="epoch"), folder=str(tmp_path))
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 2]
    losses = [each["loss"] for each in logs if "loss" in each]  # which the Trainer adds up in float32
    assert [line["loss"] for line in lines[:-1]] == pytest.approx(losses, rel=1e-6)
    assert lines[-1].keys() == {"step", "held_out_loss"}
    assert "held-out" in heading(view(tmp_path))


@pytest.mark.parametrize("plan", ["stage 3", "pp"])
def test_a_trace_has_the_updates_of_all_ranks_and_changes_no_number(plan: str, tmp_path: Path) -> None:
    def make(**asked: Any) -> Make:
        return simple(of=hf.TrainingArguments, num_train_epochs=2, **asked)

    traced, _ = under(plan, make(shardwise_trace=True), folder=str(tmp_path))
    assert traced[:-1] == under(plan, make())[0][:-1]
    bars = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        names = [bar["name"] for bar in bars if bar["tid"] == rank]
        assert (names.count("step"), names.count("exchange: losses and norms")) == (4, 4)
    if plan == "stage 3":
        assert {"forward model.layers.0", "backward model.layers.1"} <= {bar["name"] for bar in bars}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
