"""A run that is over names the next things to do, as commands that this configuration allows."""

import shlex
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.next_commands import next_commands
from shardwise.cli.train import train
from shardwise.train import rank
from shardwise.train.config import find_config, read_config
from tests.cli.processes import in_this_process

OWN_MODEL = """
model = {factory = "net.py:Net"}
train = {steps = 10, global_batch = 4, microbatch = 2}
checkpoint = {every = 5}
"""


def lines(name: str, *overrides: str, num_processes: int) -> list[str]:
    config = read_config(Path(name), overrides=overrides, num_processes=num_processes)
    return [each.line for each in next_commands(config, name, overrides)]


def test_the_demo_is_found_by_its_name_and_a_file_of_that_name_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config(Path("demo"), num_processes=2)
    assert (config.name, config.output, config.train.steps) == ("demo", Path("runs/demo"), 200)
    Path("demo").mkdir()  # no configuration is a folder
    assert read_config(Path("demo"), num_processes=2).path == config.path
    Path("demo").rmdir()
    Path("demo").write_text(OWN_MODEL)
    assert find_config(Path("demo")) == Path("demo")
    assert find_config(Path("folder/demo")) == Path("folder/demo")


def test_commands_of_the_demo_name_its_saves_and_a_pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "shardwise").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert lines("demo", num_processes=2) == [
        "shardwise ckpt ls runs/demo/checkpoints",
        "shardwise ckpt convert runs/demo/checkpoints runs/demo/hf --to hf --dtype float32",
        "shardwise train demo --nproc 2 --resume auto --set mesh.pp=2 --set train.steps=240",
    ]


def test_a_program_that_is_not_on_the_path_is_named_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "a venv"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    assert lines("demo", num_processes=2)[0].startswith(f"'{folder}/python' -m shardwise.cli ckpt ls ")
    (folder / "shardwise").touch()
    assert lines("demo", num_processes=2)[0].startswith("'a venv/shardwise' ckpt ls ")


@pytest.mark.parametrize(
    ("overrides", "num_processes", "mesh"),
    [
        ((), 1, "dp_shard=2"),
        ((), 2, "single"),
        (("mesh.tp=2", "tensor.rules=auto", "train.output=a b", "train.steps=20"), 2, "single"),
        (("mesh.pp=2", "mesh.dp_shard=2"), 4, "single"),
    ],
)
def test_more_updates_run_under_another_layout(
    tmp_path: Path, overrides: tuple[str, ...], num_processes: int, mesh: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(OWN_MODEL)
    steps = read_config(file, overrides=overrides, num_processes=num_processes).train.steps
    _, line = lines(str(file), *overrides, num_processes=num_processes)
    words = shlex.split(line)
    given = train.make_context("train", words[words.index("train") + 1 :]).params
    read = read_config(given["config"], overrides=given["overrides"], num_processes=given["nproc"])
    assert (str(read.plan.mesh), read.train.steps, given["resume"]) == (mesh, steps + steps // 5, "auto")
    assert main.commands["train"] is train


def test_a_run_without_saves_has_no_next_commands(tmp_path: Path) -> None:
    assert lines("demo", "checkpoint.every=null", num_processes=2) == []


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt  # before the first save

    monkeypatch.setattr(rank, "run", stopped)
    result = in_this_process("train", "demo")
    said = "--resume auto continues from the newest save in runs/demo/checkpoints, if there is one"
    assert (result.exit_code, result.stderr) == (130, f"stopped by Ctrl-C; {said}\n")
