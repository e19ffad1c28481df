"""Weights & Biases: what is written, by whom, under which id; a double of the module stands in its place."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import CallbackError, ConfigError
from tests.train.runs import finished, small_run

TABLE = 'train.callbacks=[{factory = "shardwise.train:Wandb", options = {project = "mine", mode = "offline"}}]'


class Double:
    """What `wandb.init` was given, and what its runs were."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self.ends: list[int] = []
        self.axes: list[Any] = []

    def init(self, **given: Any) -> SimpleNamespace:
        self.opened.append(given)
        return SimpleNamespace(
            id=given["id"] or f"made-{len(self.opened)}",
            log=self.points.append,
            define_metric=lambda name, **axis: self.axes.append((name, axis)),
            finish=lambda exit_code: self.ends.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    monkeypatch.setitem(sys.modules, "wandb", double)
    return double


def test_rank_0_writes_every_curve_and_the_settings(tmp_path: Path, wandb: Double) -> None:
    done = finished(small_run(tmp_path, TABLE, "train.evaluate_first=true", num_processes=2))
    (opened,) = wandb.opened
    assert (opened["project"], opened["mode"], opened["resume"]) == ("mine", "offline", "allow")
    assert opened["config"]["train"]["learning_rate"] == 0.02
    assert "dp_shard = 2" in opened["config"]["plan"]
    assert wandb.axes == [("step", {}), ("*", {"step_metric": "step"})]
    assert [each["step"] for each in wandb.points] == [0, 1, 2, 3, 4, 5, 6]
    for point, line in zip(wandb.points, done.metrics, strict=True):
        for name in ("loss", "held_out_loss", "learning_rate", "grad_norm"):
            assert point.get(name) == line.get(name)
    assert wandb.ends == [0]


def test_a_run_that_goes_on_continues_its_record(tmp_path: Path, wandb: Double) -> None:
    words = ["checkpoint.every=2", TABLE]
    finished(small_run(tmp_path, *words, "train.steps=2"))
    finished(small_run(tmp_path, *words, "train.steps=4"), resume="auto")
    assert [each["id"] for each in wandb.opened] == [None, "made-1"]
    assert [each["step"] for each in wandb.points] == [1, 2, 3, 4]


def test_a_run_that_fails_is_marked_as_failed(tmp_path: Path, wandb: Double) -> None:
    (tmp_path / "failing.py").write_text(
        "from shardwise.train import Callback\n\nclass Failing(Callback):\n"
        "    def on_step(self, loop, metrics):\n        raise ValueError\n"
    )
    tables = TABLE.removesuffix("]") + ', {factory = "failing.py:Failing"}]'
    with pytest.raises(CallbackError):
        finished(small_run(tmp_path, tables))
    assert wandb.ends == [1]


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'Wandb needs the package wandb; pip install "shardwise\[wandb\]"'):
        finished(small_run(tmp_path, TABLE))


def test_the_package_itself_takes_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    finished(small_run(tmp_path, TABLE, "train.steps=2"))
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))
