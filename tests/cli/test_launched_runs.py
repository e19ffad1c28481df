"""`shardwise train` in real processes: launchers, signals, deaths, and what is told; the rest is on simulated ranks.

What they are compared with, and how they go on where that alone is asked, is computed on simulated ranks: the same
bits, without the start of processes.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest

from shardwise import checkpoint
from shardwise.comm.process.connections import host_identity
from tests.cli.processes import done, losses, metrics, simulated
from tests.cli.small_net import words, written
from tests.forks.programs import started
from tests.keepers.kept import Kept
from tests.train.runs import without_times

pytestmark = pytest.mark.processes

TABLES = """
precision = {compute = "bfloat16"}
train = {steps = 8, global_batch = 4, microbatch = 1, log_every = 1, evaluate_every = 4, timeout_seconds = 30}
checkpoint = {every = 2}
"""
STAGES = ("mesh.pp=2", 'pipeline.stages={embedding=0, "layers.[012]"=0, "layers.3"=1, head=1}')


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, TABLES)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of two ranks that went through, with all of its saves."""
    config = written(tmp_path_factory.mktemp("uninterrupted"), TABLES)
    simulated(config, f"train.output={config.parent / 'out'}", "checkpoint.keep=9", num_processes=2)
    return config.parent / "out"


def ended(config: Path, fault: str, *settings: str, at: int = 0, rank: str = "") -> "subprocess.CompletedProcess[str]":
    """A run of two processes with a fault in the call `at` of the last layer: two calls make an update."""
    given = (f"model.config={{fault='{fault}', rank='{rank}', at={at}}}", *settings)
    return done(*words(config, "--nproc", "2", *(word for each in given for word in ("--set", each)), "--debug"))


STRESS = pytest.mark.stress


@pytest.mark.parametrize(("name", "rank", "step"), [("SIGTERM", "0", 3), pytest.param("SIGUSR1", "1", 3, marks=STRESS)])
def test_a_signal_ends_the_run_with_a_save_from_which_it_goes_on_bit_for_bit(
    config: Path, uninterrupted: Path, name: str, rank: str, step: int
) -> None:
    saves = config.parent / "out" / "checkpoints"
    run = ended(config, name, at=5, rank=rank)
    said = f"stopped by {name} after step {step} of 8, which is saved in {saves}; --resume auto goes on from there\n"
    assert (run.returncode, run.stderr) == (128 + signal.Signals[name], said)
    assert checkpoint.open(saves).step == step
    assert checkpoint.verify(saves).good
    simulated(config, f"train.output={config.parent / 'out'}", num_processes=2, resume="auto")
    assert without_times(metrics(config.parent / "out")) == without_times(metrics(uninterrupted))


@pytest.mark.parametrize(
    ("fault", "at", "code", "message"),
    [
        (
            *("raise", 7, 1),
            "Error: rank 1: RuntimeError: the layer went wrong\n"
            "shardwise: in 'layers.3' on stage 1 (rank 1 of the pipeline), microbatch 2\n",
        ),
        pytest.param("kill", 19, 1, "Error: rank 1 is gone (its process died), while rank 0 was in ", marks=STRESS),
        pytest.param("build", 0, 2, "model.factory: net.py:Net raised ValueError", marks=STRESS),
    ],
)
def test_ranks_that_fail_stop_all_and_are_told_once(config: Path, fault: str, at: int, code: int, message: str) -> None:
    """Four microbatches of an update pass through the last stage."""
    run = ended(config, fault, *STAGES, at=at)
    assert (run.returncode, message in run.stderr) == (code, True), run.stderr
    assert len(re.findall("^Error: ", run.stderr, flags=re.MULTILINE)) == 1
    # The error that ranks agree on has that of the rank as its cause, which has one of the user's.
    assert run.stderr.count("Traceback (most recent call last)") == (3 if fault == "build" else 1)
    assert "PeerError" not in run.stderr or fault == "kill"
    if fault != "build":
        out = config.parent / "out"
        assert len(losses(out)) == (at - 1) // 4
    if fault == "kill":
        simulated(config, f"train.output={config.parent / 'whole'}", num_processes=1)
        said = simulated(config, f"train.output={out}", "mesh.pp=3", num_processes=3, resume="auto")
        assert re.search(r"goes on from step [24], saved in ", said)
        assert without_times(metrics(out)) == without_times(metrics(config.parent / "whole"))


def test_a_run_whose_rank_was_killed_goes_on_from_memory_bit_for_bit(config: Path, uninterrupted: Path) -> None:
    # It is killed in the seventh update, and the copies of the fourth or sixth are whole.
    memory = ("checkpoint.every=null", "checkpoint.replicas=2")
    dies = ended(config, "kill", *memory, at=13, rank="1")
    assert dies.returncode == 1
    assert "rank 1 was killed by SIGKILL" in dies.stderr
    settings = [word for each in memory for word in ("--set", each)]
    resumed = done(*words(config, "--nproc", "2", *settings, "--resume", "auto"))
    assert resumed.returncode == 0, resumed.stderr
    out, saves = config.parent / "out", config.parent / "out" / "checkpoints"
    assert re.search(rf"goes on from step [46], out of the replicas of {saves}/save-", resumed.stdout)
    assert "they survive the loss of ranks, and not of the host" in resumed.stdout
    assert without_times(metrics(out)) == without_times(metrics(uninterrupted))
    assert not saves.exists()
    assert Kept(str(saves), [host_identity()]).have_ended()


LAYOUTS = (("mesh.dp_shard=2",), STAGES[:1], (), ("mesh.pp=2", "mesh.dp_shard=2"), ("mesh.dp_replicate=4",))
RANKS = (2, 2, 1, 4, 4)


@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=STRESS) for n in range(1, 30))])
def test_a_run_killed_at_any_instant_goes_on_from_its_newest_whole_save_under_any_layout(
    config: Path, attempt: int
) -> None:
    chance, one = random.Random(attempt), ("precision.compute=null", "train.steps=10")
    lives = chance.sample(range(len(LAYOUTS)), 2)
    for number, which in enumerate(lives):
        settings = (*one, *LAYOUTS[which], f"checkpoint.background={str(attempt % 2 == 0).lower()}")
        command = words(config, "--nproc", str(RANKS[which]), *(word for each in settings for word in ("--set", each)))
        with started([*command, "--resume", "auto"]) as process:
            assert process.stdout is not None
            steps, last = 0, chance.randrange(6) if number == 0 else 99
            for line in process.stdout:
                steps += line.startswith("step ")
                if steps >= last:
                    break
            if number == 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=chance.uniform(0.0, 0.1))
                with contextlib.suppress(ProcessLookupError):  # it was faster
                    process.send_signal(signal.SIGKILL)  # the kernel ends its ranks
            else:
                assert process.wait(timeout=90) == 0
    out = config.parent / "out"
    simulated(config, f"train.output={config.parent / 'whole'}", *one, num_processes=1)
    assert [line["step"] for line in metrics(out)] == list(range(1, 11))
    # Dropout draws the same masks, and sums have another order.
    assert losses(out) == pytest.approx(losses(config.parent / "whole"), rel=1e-4)
    assert checkpoint.open(out / "checkpoints").step == 10
    assert checkpoint.verify(out / "checkpoints").good


@STRESS
def test_tasks_of_srun_that_share_no_storage_all_refuse(config: Path) -> None:
    config.write_text(config.read_text().replace("timeout_seconds = 30", 'timeout_seconds = 30, output = "out"'))
    folders = [config.parent / name for name in "ab"]
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    step |= {"SLURM_STEP_NODELIST": "localhost"}
    with contextlib.ExitStack() as stack:
        tasks = []
        for rank, folder in enumerate(folders):
            folder.mkdir(exist_ok=True)
            place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            tasks.append(stack.enter_context(started(["train", str(config)], environment=step | place, folder=folder)))
        (_, words_of_0), (_, words_of_1) = (task.communicate(timeout=90) for task in tasks)
        codes = [task.wait(timeout=0) for task in tasks]
    assert (codes, words_of_0) == ([1, 1], words_of_1)
    assert f"rank 0 on {os.uname().nodename} writes to {folders[0]}/out/checkpoints; rank 1 on" in words_of_0
    assert not list(config.parent.rglob("metrics.jsonl"))
