"""The example with everything at once: 2 tp x 2 pp x 2 dp, the cast with the optimizer, gradients merged."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwise.train import rank
from tests.processes.forked_run import shortened
from tests.train.runs import finished, without_times

FLOAT32 = 'precision.compute="float32"'
ALONE = ("mesh.tp=1", "mesh.pp=1", "mesh.dp_shard=1")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As many as the processes have: the same kernels, the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "_SAMPLE_TOKENS", 1)


def test_the_example_asks_for_all_at_once() -> None:
    plan = shortened(Path("unused")).plan
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp_shard) == (2, 2, 2)
    assert (plan.sharding.stage, plan.precision.compute, plan.precision.master) == (1, "bfloat16", "float32")
    assert plan.merge.microbatches == 4


def test_eight_simulated_ranks_have_the_curves_of_one_process(tmp_path: Path) -> None:
    alone = finished(shortened(tmp_path / "alone", FLOAT32, *ALONE, num_processes=1))
    together = finished(shortened(tmp_path / "together", FLOAT32))
    for name in ("loss", "grad_norm", "held_out_loss"):
        # Sums over tp and over data ranks are added in another order: some 1e-7 each, in 4 layers and 2 updates.
        assert together.curve(name) == pytest.approx(alone.curve(name), rel=1e-5), name


@pytest.mark.timeout(240)
def test_eight_processes_have_the_bits_of_eight_simulated_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.processes.forked_run", str(tmp_path / "real")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as real:
        simulated = finished(shortened(tmp_path / "simulated"))
        try:
            _, said = real.communicate(timeout=200)
        finally:
            if real.poll() is None:
                os.killpg(real.pid, signal.SIGKILL)
    assert real.returncode == 0, said
    lines = (tmp_path / "real" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert without_times([json.loads(line) for line in lines]) == without_times(simulated.metrics)
