"""`shardwise train` with `checkpoint.replicas`: a run whose rank was killed goes on from memory, without any file."""

from pathlib import Path

from shardwise.comm.connections import host_identity
from tests.cli.processes import done, metrics, simulated
from tests.cli.small_net import written
from tests.keepers.kept import Kept
from tests.train.runs import without_times

TABLES = """
train = {steps = 8, global_batch = 4, microbatch = 1, log_every = 1, evaluate_every = 4, timeout_seconds = 30}
checkpoint = {replicas = 2}
"""


def test_a_run_whose_rank_was_killed_goes_on_from_memory_bit_for_bit(tmp_path: Path) -> None:
    config = written(tmp_path, TABLES)
    whole, parts = (f"train.output={tmp_path / name}" for name in ("whole", "parts"))
    simulated(config, whole, "checkpoint.replicas=null", num_processes=2)
    # Two training calls make an update: it is killed in the seventh, and the copies of the second and fourth are whole.
    faults = ("model.config.fault=kill", "model.config.rank='1'", "model.config.at=13")
    dies = done("train", str(config), "--nproc", "2", "--set", parts, *(f"--set={each}" for each in faults))
    assert dies.returncode == 1
    assert "rank 1 was killed by SIGKILL" in dies.stderr
    resumed = done("train", str(config), "--nproc", "2", "--set", parts, "--resume", "auto")
    assert resumed.returncode == 0, resumed.stderr
    saves = tmp_path / "parts" / "checkpoints"
    assert (
        f"goes on from step 6, out of the replicas of {saves}/save-" in resumed.stdout
        or f"goes on from step 4, out of the replicas of {saves}/save-" in resumed.stdout
    )
    assert "they survive the loss of ranks, and not of the host" in resumed.stdout
    assert without_times(metrics(tmp_path / "parts")) == without_times(metrics(tmp_path / "whole"))
    assert not saves.exists()
    assert Kept(str(saves), [host_identity()]).have_ended()
