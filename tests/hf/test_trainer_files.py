"""Checkpoints of trainers: from any layout into any other, and into and out of the plain Trainer."""

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, TrainerState

from tests.hf.tiny_trainers import HELD_OUT, ROWS, arguments, assert_close, build, logged, plain, trained, under

PLAIN = "plain"


def make(trainers: Any, folder: str, microbatches: int, *, asked: Any = None, **ours: Any) -> Any:
    settings = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, **(asked or {})}
    args = arguments(folder, microbatches, **settings)
    return trainers.Trainer(build(), args, train_dataset=ROWS, eval_dataset=HELD_OUT, **ours)


def run_on(name: str, run: Any, folder: Path) -> Any:
    """What `run` gives for a trainer of this layout, on its first rank."""
    if name == PLAIN:
        return plain(make, run, folder=str(folder))
    return under(name, make, run, folder=str(folder))[0]


@pytest.fixture(scope="module")
def expected() -> Any:
    return plain(make)


PAIRS = [
    (PLAIN, "stage 3"),
    ("stage 3", "pp"),
    ("pp", PLAIN),
    ("tp", "one process"),
    pytest.param(PLAIN, "tp", marks=pytest.mark.stress),
    ("stage 2, four ranks", PLAIN),
    pytest.param("one process", "replicas", marks=pytest.mark.stress),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_goes_on_in_another_layout(first: str, second: str, expected: Any, tmp_path: Path) -> None:
    # Its fourth update is the second of an epoch: batches are skipped.
    assert_close(run_on(first, trained, tmp_path / "first"), expected)
    checkpoint = tmp_path / "first" / "checkpoint-3"
    files = {each.name for each in checkpoint.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= files
    assert isinstance(LlamaForCausalLM.from_pretrained(checkpoint), LlamaForCausalLM)

    def resumed(trainer: Any) -> Any:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return [each for each in logged(trainer) if "train_loss" not in each]

    wanted = [each for each in expected if "train_loss" not in each]
    assert_close(run_on(second, resumed, tmp_path / "second"), wanted)


def test_weights_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    def weights(trainer: Any) -> Any:
        trainer.args.save_only_model = True
        return trained(trainer)

    run_on("stage 3", weights, tmp_path)
    assert not (tmp_path / "checkpoint-3" / "shardwise").exists()
    assert not (tmp_path / "checkpoint-3" / "optimizer.pt").exists()

    def evaluated(trainer: Any) -> float:
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-3"))
        return float(trainer.evaluate()["eval_loss"])

    def evaluated_late(trainer: Any) -> float:
        trainer.evaluate()
        return evaluated(trainer)

    wanted = run_on(PLAIN, evaluated, tmp_path / "plain")
    assert run_on("pp", evaluated, tmp_path / "pp") == pytest.approx(wanted, rel=1e-6)
    assert run_on("stage 3", evaluated_late, tmp_path / "late") == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", ["stage 3", pytest.param("pp", marks=pytest.mark.stress)])
def test_the_best_model_is_kept_loaded_and_saved_whole(name: str, tmp_path: Path) -> None:
    asked = {
        **{"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True},
        **{"save_total_limit": 1, "learning_rate": 0.5, "metric_for_best_model": "loss", "num_train_epochs": 1},
    }

    def best(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        return make(trainers, folder, microbatches, asked=asked, **ours)

    def run(trainer: Any) -> Any:
        trainer.train()
        trainer.save_model()
        state = trainer.state
        return trainer.evaluate()["eval_loss"], state.best_metric, state.best_global_step

    wanted = plain(best, run, folder=str(tmp_path / "plain"))
    assert wanted[2] == 1
    for found in under(name, best, run, folder=str(tmp_path / "ours")):
        assert found == pytest.approx(wanted, rel=1e-5)
    kept = [each.name for each in (tmp_path / "ours").glob("checkpoint-*")]
    assert kept == [each.name for each in (tmp_path / "plain").glob("checkpoint-*")]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    row = {key: each[None] for key, each in HELD_OUT[0].items()}
    other = LlamaForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert model(**row).loss.item() == pytest.approx(other(**row).loss.item(), rel=1e-5)


def test_without_optimizer_pt_runs_go_on_from_the_save(expected: Any, tmp_path: Path) -> None:
    def lean(trainer: Any) -> Any:
        trainer.args.shardwise_optimizer_pt = False
        return trained(trainer)

    run_on("stage 3", lean, tmp_path)
    checkpoint = tmp_path / "checkpoint-3"
    assert not (checkpoint / "optimizer.pt").exists()

    def resumed(trainer: Any) -> Any:
        trainer.train(resume_from_checkpoint=True)
        return [each for each in logged(trainer) if "train_loss" not in each]

    assert_close(run_on("stage 1", resumed, tmp_path), [each for each in expected if "train_loss" not in each])
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 3


def test_a_step_whose_loss_is_not_finite_is_skipped_and_left_out_of_the_log(tmp_path: Path) -> None:
    spoilt = [dict(row) for row in ROWS[:8]]

    def with_nan(trainers: Any, folder: str, microbatches: int, **ours: Any) -> Any:
        class Spoilt(trainers.Trainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
                loss = super().compute_loss(model, inputs, *args, **more)
                return loss * float("nan") if self.state.global_step == 1 else loss

        args = arguments(folder, microbatches, max_steps=3, logging_steps=3)
        return Spoilt(build(), args, train_dataset=spoilt, **ours)

    def run(trainer: Any) -> Any:
        trainer.train()
        engine = trainer.engine
        return engine.counters.skipped, engine.counters.updates, trainer.state.log_history[0]["loss"]

    for skipped, updates, loss in under("stage 3", with_nan, run, microbatches=2):
        assert (skipped, updates) == (1, 2)
        assert torch.isfinite(torch.tensor(loss))


def test_a_checkpoint_is_complete_for_every_rank_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_read = threading.Event()
    write, read = TrainerState.save_to_json, TrainerState.load_from_json

    def written(state: TrainerState, path: str) -> None:
        # After the others have read it, where they do not wait.
        has_read.wait(0.2)
        write(state, path)

    def looked_for(path: str) -> Any:
        try:
            return read(path)
        finally:
            has_read.set()

    monkeypatch.setattr(TrainerState, "save_to_json", written)
    monkeypatch.setattr(TrainerState, "load_from_json", looked_for)

    def again(trainer: Any) -> Any:
        trainer.train()
        return trainer.train(resume_from_checkpoint=True)

    under("pp", partial(make, asked={"max_steps": 1, "save_steps": 1}), again, folder=str(tmp_path))
