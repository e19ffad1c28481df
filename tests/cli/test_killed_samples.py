"""Real processes killed at random instants and started again under other plans: each update reads the same samples.

The loss of an update is the mean of numbers that its samples alone decide. It is exact under every plan, so that equal
losses are equal samples.
"""

import contextlib
import random
import signal
from pathlib import Path

import pytest

from tests.cli.processes import done, losses, metrics, simulated
from tests.cli.small_net import words
from tests.forks.programs import started

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


class Numbers:
    def __len__(self):
        return 57

    def __getitem__(self, index):
        return {"inputs": torch.ones(4), "code": torch.tensor(float(index * 40503 % 65536))}


def loss(output, batch):
    return batch["code"].mean() + 0 * output.sum()
"""

TABLES = """
[data]
dataset = "net.py:Numbers"

[train]
steps = 10
global_batch = 8
microbatch = 2
log_every = 1
evaluate_every = 99
timeout_seconds = 60

[checkpoint]
every = 2
"""

PLANS = [["mesh.dp_shard=2"], ["mesh.pp=3"], [], ["mesh.pp=2", "mesh.dp_shard=2"], ["mesh.dp_replicate=4"]]
"""Of 2, 3, 1, 4 and 4 ranks."""
RANKS = [2, 3, 1, 4, 4]


@pytest.mark.processes
@pytest.mark.parametrize("attempt", [9, *(pytest.param(n, marks=pytest.mark.stress) for n in range(9))])
def test_killed_processes_go_on_with_the_same_samples_under_any_plan(tmp_path: Path, attempt: int) -> None:
    config = tmp_path / "run.toml"
    (tmp_path / "net.py").write_text(NET)
    config.write_text(f'model = {{factory = "net.py:Net", loss = "net.py:loss"}}\n{TABLES}')
    simulated(config, f"train.output={tmp_path / 'whole'}", num_processes=1)
    chance = random.Random(attempt)
    lives = chance.sample(range(len(PLANS)), 3)
    for number, plan in enumerate(lives):
        settings = [word for setting in PLANS[plan] for word in ("--set", setting)]
        command = words(config, "--nproc", str(RANKS[plan]), *settings, "--resume", "auto")
        if number < 2:
            killed(command, after_lines=chance.randrange(6), delay_s=chance.uniform(0.0, 0.05))
        else:
            ended = done(*command)
            assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in metrics(tmp_path / "out")] == list(range(1, 11))
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")


def killed(command: list[str], *, after_lines: int, delay_s: float) -> None:
    """Start a run, and kill all of its processes after so many updates of it and a while."""
    with started(command) as process:
        assert process.stdout is not None
        steps = 0
        for line in process.stdout:
            steps += line.startswith("step ")
            if steps >= after_lines:
                break
        with contextlib.suppress(Exception):
            process.wait(timeout=delay_s)
        with contextlib.suppress(ProcessLookupError):  # it was faster
            process.send_signal(signal.SIGKILL)  # the kernel ends its ranks
