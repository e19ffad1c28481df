"""`shardwise train` and the signals of schedulers: real processes save, end with the code of the signal, and go on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import checkpoint
from tests.cli.processes import members_of_group, metrics, simulated, started
from tests.train.runs import without_times

NET = '''
import os
import signal
import threading
import time
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
                begin = time.monotonic()
                while time.monotonic() < begin + 60:
                    if time.monotonic() > begin + 1.2:
                        self.send(2)
        return self.head(nn.functional.dropout(self.embedding(input_ids), 0.3, self.training))


def loss(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
'''

CONFIG = """
model = {factory = "net.py:Net", loss = "net.py:loss"}
data = {source = "net.py", sequence_length = 16, held_out = 0.2}
train = {steps = 8, global_batch = 4, microbatch = 1, log_every = 1, evaluate_every = 4, timeout_seconds = 30}
checkpoint = {every = 6}
"""


def config_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(NET)
    (folder / "run.toml").write_text(CONFIG)
    return folder / "run.toml"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_in(tmp_path_factory.mktemp("uninterrupted"))
    simulated(config, f"train.output={config.parent / 'out'}", num_processes=2)
    return config.parent / "out"


def ended(config: Path, *, when: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """A run of two processes that get a signal `when`."""
    settings = {"model.config.when": when, **{f"model.config.{name}": value for name, value in more.items()}}
    words = [word for name, value in settings.items() for word in ("--set", f'{name}="{value}"')]
    arguments = ["train", str(config), "--nproc", "2", "--set", f"train.output={config.parent / 'out'}", *words]
    if when == "save":
        arguments += ["--set", "checkpoint.background=false"]
    with started(arguments) as process:
        out, err = process.communicate(timeout=90)
        assert not members_of_group(process.pid), "processes were left running"
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)


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
def test_torchrun_passes_the_signal_on_and_the_run_is_saved(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "-m", "shardwise.cli", "train", str(config)]
    command += ["--set", f"train.output={tmp_path / 'out'}", "--set", 'model.config.when="step"']
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert "stopped by SIGTERM after step 3 of 8, which is saved in" in result.stderr
    assert checkpoint.open(tmp_path / "out" / "checkpoints").step == 3
