"""`shardwise train` with every axis at once on eight real processes: the numbers of simulated ranks, to the bit."""

from pathlib import Path

import pytest
import torch

from tests.cli.processes import members_of_group, metrics, started
from tests.train.runs import without_times
from tests.train.test_hybrid import EXAMPLE, SHORT, SMALL, example


@pytest.mark.processes
@pytest.mark.timeout(300)  # eight processes load torch and transformers on two cores
def test_the_reference_run_on_eight_processes_has_the_bits_of_simulated_ranks(tmp_path: Path) -> None:
    words = [f"train.output={tmp_path / 'real'}", *SHORT, *SMALL]
    settings = [word for each in words for word in ("--set", each)]
    with started(["train", str(EXAMPLE), "--nproc", "8", *settings]) as process:
        out, err = process.communicate(timeout=240)
        assert not members_of_group(process.pid), "processes were left running"
    assert (process.returncode, err) == (0, ""), err
    assert "mesh pp=2,dp_shard=2,tp=2, stage 1, compute bfloat16" in out
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have
    simulated = example(tmp_path / "simulated", num_processes=8)
    torch.set_num_threads(num_threads)
    assert without_times(metrics(tmp_path / "real")) == without_times(simulated.metrics)
    assert out.split("held-out text:")[1] == simulated.printed.split("held-out text:")[1]
