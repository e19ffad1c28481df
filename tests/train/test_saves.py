"""The saves of a run: when they come, how many stay, and what is refused."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, LocalStore, State
from shardwise.comm import alone
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.rank import run
from tests.train.runs import finished, small_run


def folders(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir())


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize(("keep", "steps"), [(1, [10]), (2, [9, 10]), (3, [6, 9, 10]), (9, [3, 6, 9, 10])])
def test_the_newest_saves_stay_and_the_last_update_is_saved(
    tmp_path: Path, background: str, keep: int, steps: list[int]
) -> None:
    words = ["train.steps=10", "checkpoint.every=3", f"checkpoint.keep={keep}", f"checkpoint.background={background}"]
    done = finished(small_run(tmp_path, *words, num_processes=2))
    saves = tmp_path / "out" / "checkpoints"
    assert folders(saves) == [f"save-{number:08d}" for number in range(5 - len(steps), 5)]
    assert [checkpoint.open(saves / folder).step for folder in folders(saves)] == steps
    assert all(checkpoint.verify(saves / folder).good for folder in folders(saves))
    assert f"saved step 10 to {saves} (" in done.printed


def test_saves_after_a_multiple_of_so_many_updates_stay_as_well(tmp_path: Path) -> None:
    words = ["train.steps=7", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=3"]
    finished(small_run(tmp_path, *words))
    saves = tmp_path / "out" / "checkpoints"
    assert [checkpoint.open(saves / folder).step for folder in folders(saves)] == [3, 6, 7]


def test_a_save_that_fails_in_the_background_stops_the_run_after_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, save = LocalStore.write, AsyncSaver.save

    def refused(store: LocalStore, name: str, *, num_bytes: int) -> object:
        if name.endswith("rank00001.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(store, name, num_bytes=num_bytes)

    def save_and_join(saver: AsyncSaver, state: State, **options: Any) -> None:
        save(saver, state, **options)
        assert saver._task is not None
        if saver._task._rank == 1:
            saver._task.join(30)  # it is known before the next update begins

    monkeypatch.setattr(LocalStore, "write", refused)
    monkeypatch.setattr(AsyncSaver, "save", save_and_join)
    words = ["train.steps=20", "checkpoint.every=3", "train.evaluate_every=20"]
    with pytest.raises(CheckpointError, match=r"rank 1: .*Input/output error"):
        finished(small_run(tmp_path, *words, num_processes=2))
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_nothing_is_saved_unless_asked_for(tmp_path: Path) -> None:
    done = finished(small_run(tmp_path, "checkpoint.keep=1"))
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert "saved step" not in done.printed


def test_saves_can_lie_at_an_address(tmp_path: Path) -> None:
    address = f"checkpoint.path=memory://{tmp_path.name}/run"
    words = ["train.steps=4", "checkpoint.every=2", "checkpoint.layout=whole", address]
    done = finished(small_run(tmp_path, *words, num_processes=2))
    assert f"saved step 4 to memory://{tmp_path.name}/run (" in done.printed
    longer = finished(small_run(tmp_path, *words, "train.steps=6"), resume="auto")
    assert f"goes on from step 4, saved in memory://{tmp_path.name}/run/save-00000002" in longer.printed
    assert len(longer.metrics) == 6


def test_a_fresh_start_where_saves_are_is_refused_with_three_ways_out(tmp_path: Path) -> None:
    finished(small_run(tmp_path, "checkpoint.every=2"))
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    for num_processes in (1, 2):
        with pytest.raises(ConfigError) as caught:
            finished(small_run(tmp_path, num_processes=num_processes))
        for words in (str(tmp_path / "out" / "checkpoints"), "--resume auto", "--set train.output=", "remove"):
            assert words in str(caught.value)
        assert not str(caught.value).startswith("rank")
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("num_processes", [1, 2])
def test_auto_begins_where_there_is_no_save_and_says_which(tmp_path: Path, num_processes: int) -> None:
    torn = tmp_path / "out" / "checkpoints" / "save-00000001"
    torn.mkdir(parents=True)
    (torn / "5e1f09ab-rank00000.safetensors").write_bytes(b"half")
    config = small_run(tmp_path, "checkpoint.every=3", num_processes=num_processes)
    done = finished(config, resume="auto")
    assert f"--resume auto: {torn.parent} holds no save yet; torn and not loadable: save-00000001" in done.printed
    assert len(done.metrics) == 6
    assert folders(torn.parent) == ["save-00000001", "save-00000002"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=6", r"train\.seed was 5 and is 6"),
        ("train.global_batch=24", r"train\.global_batch was 12 and is 24"),
        ("data.sequence_length=8", r"data\.sequence_length was 16 and is 8"),
        ("data.held_out=0.3", r"tokens of the training text was \d+ and is \d+; the digest of the training text was"),
    ],
)
def test_a_run_that_reads_other_samples_cannot_go_on_from_a_save(tmp_path: Path, override: str, message: str) -> None:
    finished(small_run(tmp_path, "checkpoint.every=2"))
    for num_processes in (1, 2):
        with pytest.raises(ConfigError, match=message):
            finished(small_run(tmp_path, override, num_processes=num_processes), resume="auto")
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 6


def test_another_text_of_the_same_length_is_noticed(tmp_path: Path) -> None:
    finished(small_run(tmp_path, "checkpoint.every=2"))
    config = small_run(tmp_path)
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text.replace("7 squared", "7 quadred", 1))
    with pytest.raises(ConfigError, match=r"other samples: the digest of the training text was \w{32} and is \w{32}"):
        finished(config, resume="auto")


def test_what_is_no_save_of_a_run_is_refused(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    checkpoint.save(tmp_path / "mine", {"w": torch.zeros(2)}, extra={"step": 3}, channel=alone())
    for resume, message in (
        (tmp_path, "holds tensors, but no position of a run"),
        (tmp_path / "mine", "holds tensors, but no position of a run"),
        (tmp_path / "absent", "--resume: .*absent holds no checkpoint"),
    ):
        with pytest.raises(ConfigError, match=message):
            finished(config, resume=str(resume))


def test_a_model_of_another_shape_is_refused_with_the_findings(tmp_path: Path) -> None:
    finished(small_run(tmp_path, "checkpoint.every=2"))
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        finished(small_run(tmp_path, "model.config.width=16"), resume="auto")


@pytest.mark.parametrize("victim", ["manifest.json", "*rank00000.safetensors"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_damaged_newest_save_is_named_with_the_way_to_the_one_before_it(
    tmp_path: Path, victim: str, num_processes: int
) -> None:
    through = finished(small_run(tmp_path, "checkpoint.every=2", num_processes=num_processes))
    saves = tmp_path / "out" / "checkpoints"
    (file,) = (saves / "save-00000003").glob(victim)
    damaged = bytearray(file.read_bytes())
    damaged[-20] ^= 4
    file.write_bytes(damaged)
    config = small_run(tmp_path, "checkpoint.every=2", num_processes=num_processes)
    with pytest.raises(CheckpointError) as caught:
        finished(config, resume="auto")
    assert str(file) in str(caught.value)
    older = f"{saves}/save-00000002"
    assert str(caught.value).endswith(f"to take the save before it: --resume {older} (step 4)")
    resumed = finished(config, resume=older)
    assert resumed.curve("loss") == through.curve("loss")
    # What cannot be read does not count among those that are kept.
    kept = ["save-00000002"] if victim == "manifest.json" else []
    assert folders(saves) == [*kept, "save-00000003", "save-00000004"]


def test_the_only_save_being_damaged_no_other_is_offered(tmp_path: Path) -> None:
    words = ["checkpoint.every=6", "train.steps=6"]
    finished(small_run(tmp_path, *words))
    (tmp_path / "out" / "checkpoints" / "save-00000001" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="manifest") as caught:
        finished(small_run(tmp_path, *words), resume="auto")
    assert "--resume" not in str(caught.value)


def test_old_saves_that_cannot_be_removed_stop_the_run_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, *, keep: int, keep_every: int | None) -> None:
        raise CheckpointError(f"{path}: not to be removed")

    monkeypatch.setattr("shardwise.train.checkpointing.prune", refuse)
    with pytest.raises(CheckpointError, match=r"rank 0: .*not to be removed"):
        finished(small_run(tmp_path, "checkpoint.every=2", num_processes=2))
    assert checkpoint.open(tmp_path / "out" / "checkpoints").step == 2


def test_a_resumed_run_continues_its_metrics_and_drops_what_came_after_the_save(tmp_path: Path) -> None:
    words = ["checkpoint.every=4", "train.steps=6"]
    done = finished(small_run(tmp_path, *words))
    lines = (tmp_path / "out" / "metrics.jsonl").read_text()
    (tmp_path / "out" / "metrics.jsonl").write_text(lines + '{"step": 7, "loss"')  # torn by a kill
    resumed = finished(small_run(tmp_path, *words), resume=str(tmp_path / "out" / "checkpoints" / "save-00000001"))
    assert [line["step"] for line in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert resumed.metrics[:4] == done.metrics[:4]
    elapsed = resumed.curve("elapsed_s")
    assert elapsed == sorted(elapsed)


def test_a_resume_into_another_output_leaves_the_first_run_as_it_was(tmp_path: Path) -> None:
    words = ["checkpoint.every=4", "train.steps=6"]
    done = finished(small_run(tmp_path, *words))
    branch = small_run(tmp_path, *words, f"train.output={tmp_path / 'branch'}", "train.steps=8")
    other = finished(branch, resume=str(tmp_path / "out" / "checkpoints"))
    assert [line["step"] for line in other.metrics] == [7, 8]
    assert [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()] == done.metrics
    assert checkpoint.open(tmp_path / "out" / "checkpoints").step == 6
    assert checkpoint.open(tmp_path / "branch" / "checkpoints").step == 8


def test_a_terminal_shows_the_last_save_beside_the_progress(tmp_path: Path) -> None:
    printed = io.StringIO()
    config = small_run(tmp_path, "checkpoint.every=2", "checkpoint.background=false")
    run(config, alone(), Console(file=printed, force_terminal=True, width=160))
    assert "step 6/6" in printed.getvalue()
    assert "saved 4" in printed.getvalue()
