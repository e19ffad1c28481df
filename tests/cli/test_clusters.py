"""`shardwise train` as the launchers of clusters start it: one world, or a refusal that all tasks give."""

import contextlib
import os
from pathlib import Path

import pytest

from tests.cli.processes import in_this_process, metrics
from tests.cli.small_net import written
from tests.forks.programs import started

TABLES = """
train = {steps = 2, global_batch = 4, microbatch = 2, output = "out", timeout_seconds = 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, TABLES)


def srun(config: Path, folders: list[Path], *more: str) -> "list[tuple[int, str, str]]":
    """A task in each folder, with what srun tells it; exit code, output and errors of each."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    step |= {"SLURM_STEP_NODELIST": "localhost"}
    with contextlib.ExitStack() as stack:
        tasks = [
            stack.enter_context(
                started(
                    ["train", str(config), *more],
                    environment={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                    folder=folder,
                )
            )
            for rank, folder in enumerate(folders)
        ]
        ends = [task.communicate(timeout=90) for task in tasks]
        return [(task.wait(timeout=0), *end) for task, end in zip(tasks, ends, strict=True)]


@pytest.mark.processes
def test_tasks_of_srun_train_one_run(config: Path) -> None:
    (first, words, _), (second, silence, _) = srun(config, [config.parent] * 2)
    assert (first, second, silence) == (0, 0, "")
    assert "mesh dp_shard=2" in words
    assert [line["step"] for line in metrics(config.parent / "out")] == [1, 2]


@pytest.mark.processes
def test_tasks_that_share_no_storage_all_refuse_before_the_first_update(config: Path) -> None:
    folders = [config.parent / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    (first, _, words), (second, _, same) = srun(config, folders, "--set", "checkpoint.every=1")
    assert (first, second) == (1, 1)
    assert words == same
    assert f"rank 0 on {os.uname().nodename} writes to {folders[0]}/out/checkpoints; rank 1 on" in words
    assert not list(config.parent.rglob("metrics.jsonl"))


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpirun"])
def test_processes_that_a_launcher_has_started_start_no_more(
    command: str, launcher: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {
        "srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "a"},
        "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "mpirun": {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
    }[launcher]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    against = ["--against", "dp_shard=2"] if command == "verify" else []
    result = in_this_process(command, str(config), "--nproc", "2", *against)
    assert result.exit_code == 2
    assert "has started 2 already, and this is rank 1." in result.stderr
    assert "Leave out --nproc" in result.stderr
