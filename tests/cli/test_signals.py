"""`shardwise train` and the signals of schedulers: real processes save, end with the code of the signal, and go on."""

import signal
import subprocess
from pathlib import Path

import pytest

from shardwise import checkpoint
from tests.cli.processes import done, metrics, simulated, torchrun
from tests.cli.small_net import back_at, words, written
from tests.train.runs import without_times

NET = '''
import os
import signal
import threading
import torch
from torch import nn
from shardwise.checkpoint import LocalStore

SENT = []


def send(number, to):
    """Return when the signal has come back to this process: a launcher passes it on when it gets to it."""
    number = getattr(signal, number)
    handle, has_come = signal.getsignal(number), threading.Event()
    signal.signal(number, lambda *of_call: (has_come.set(), handle(*of_call)))
    os.kill(os.getppid() if to == "parent" else os.getpid(), number)
    SENT.append(number)
    while not has_come.wait(0.01):
        pass


class Net(nn.Module):
    def __init__(self, when="", number="SIGTERM", to="parent", rank="0"):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        is_here = os.environ.get("RANK", "0") == rank
        self.when, self.number, self.to, self.calls = when if is_here else "", number, to, 0
        if self.when == "build":
            self.send(1)
        if self.when == "save":
            write = LocalStore.write

            def written(*arguments, **options):
                self.send(1)
                return write(*arguments, **options)

            LocalStore.write = written

    def send(self, most):
        if len(SENT) < most:
            send(self.number, self.to)

    def forward(self, input_ids):
        self.calls += self.training
        if self.training and self.calls == 5:  # two calls make an update
            if self.when in ("step", "twice"):
                self.send(1)
            if self.when == "twice":
                threading.Event().wait(1.2)  # signals within a second are one request
                self.send(2)
                threading.Event().wait(60)
        return self.head(nn.functional.dropout(self.embedding(input_ids), 0.3, self.training))


def loss(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
'''

TABLES = """
train = {steps = 8, global_batch = 4, microbatch = 1, log_every = 1, evaluate_every = 4, timeout_seconds = 30}
checkpoint = {every = 6}
"""


def config_in(folder: Path) -> Path:
    return written(folder, TABLES, net=NET)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_in(tmp_path_factory.mktemp("uninterrupted"))
    saves = ("checkpoint.every=2", "checkpoint.keep=9")
    simulated(config, f"train.output={config.parent / 'out'}", *saves, num_processes=2)
    return config.parent / "out"


def ended(config: Path, *, when: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """A run of two processes that get a signal `when`."""
    given = {"when": when, **more}
    settings = [word for name, value in given.items() for word in ("--set", f'model.config.{name}="{value}"')]
    if when == "save":
        settings += ["--set", "checkpoint.background=false"]
    return done(*words(config, "--nproc", "2", *settings))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("when", "step", "more"),
    [
        ("step", 3, {}),
        ("save", 7, {"to": "rank", "rank": "1", "number": "SIGUSR1"}),
    ],
)
def test_a_signal_ends_the_run_with_a_save_from_which_it_goes_on_bit_for_bit(
    when: str, step: int, more: dict[str, str], tmp_path: Path, uninterrupted: Path
) -> None:
    config = config_in(tmp_path)
    saves = tmp_path / "out" / "checkpoints"
    name = more.get("number", "SIGTERM")
    run_of_two = ended(config, when=when, **more)
    assert (run_of_two.returncode, run_of_two.stderr) == (
        128 + signal.Signals[name],
        f"stopped by {name} after step {step} of 8, which is saved in {saves}; --resume auto goes on from there\n",
    )
    assert checkpoint.open(saves).step == step
    assert checkpoint.verify(saves).good
    simulated(config, f"train.output={tmp_path / 'out'}", num_processes=2, resume="auto")
    assert without_times(metrics(tmp_path / "out")) == without_times(metrics(uninterrupted))


@pytest.mark.processes
@pytest.mark.parametrize(("when", "to"), [("build", "rank"), ("twice", "parent")])
def test_before_the_first_update_and_at_the_second_signal_the_run_ends_at_once(
    when: str, to: str, tmp_path: Path
) -> None:
    config = config_in(tmp_path)
    result = ended(config, when=when, to=to, rank="1")
    assert result.returncode == 143, result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out" / "checkpoints").exists() or not list((tmp_path / "out" / "checkpoints").iterdir())


@pytest.mark.processes
def test_torchrun_starts_ranks_that_join_go_on_and_stop_at_a_signal_that_it_passes_on(
    tmp_path: Path, uninterrupted: Path
) -> None:
    config = config_in(tmp_path)
    saves = back_at(2, uninterrupted, config)
    result = torchrun(*words(config, "--resume", str(saves), "--set", 'model.config.when="step"'))
    assert result.stdout.count("mesh dp_shard=2") == 1, result.stderr
    assert result.stdout.count(f"goes on from step 2, saved in {saves}") == 1
    assert "stopped by SIGTERM after step 5 of 8, which is saved in" in result.stderr
    assert checkpoint.open(saves).step == 5
    assert without_times(metrics(tmp_path / "out")) == without_times(metrics(uninterrupted))[:5]
