"""`shardwise train --resume`: runs of real processes that end at any instant go on as if nothing had been.

What they are compared with, and how they go on where that alone is asked, is computed on simulated ranks: the same
bits, without the start of processes.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import checkpoint
from tests.cli.processes import done, in_this_process, losses, members_of_group, metrics, simulated, started
from tests.train.runs import without_times

NET = """
import os
import signal
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, die_at=-1):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.die_at, self.calls = die_at, 0

    def forward(self, input_ids):
        self.calls += self.training
        if self.calls == self.die_at and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.head(nn.functional.dropout(self.embedding(input_ids), 0.3, self.training))


def loss(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
"""

CONFIG = """
model = {factory = "net.py:Net", loss = "net.py:loss"}
data = {source = "net.py", sequence_length = 16, held_out = 0.2}
precision = {compute = "bfloat16"}
train = {steps = 10, global_batch = 12, microbatch = 2, log_every = 1, evaluate_every = 4, timeout_seconds = 30}
checkpoint = {every = 2}
"""

LLAMA = """
[model]
factory = "transformers:LlamaForCausalLM"

[model.config]
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 32
attention_dropout = 0.2
use_cache = false
"""


def prepared(folder: Path) -> Path:
    (folder / "net.py").write_text(NET)
    (folder / "run.toml").write_text(CONFIG)
    return folder / "run.toml"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return prepared(tmp_path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of two ranks that went through, with all of its saves."""
    config = prepared(tmp_path_factory.mktemp("uninterrupted"))
    simulated(config, output(config, "out"), "checkpoint.keep=9", num_processes=2)
    return config.parent / "out"


def back_at(step: int, uninterrupted: Path, config: Path) -> Path:
    """The output of a run that was killed some time after it had saved `step`; returns its saves."""
    shutil.copytree(uninterrupted, config.parent / "out")
    saves = config.parent / "out" / "checkpoints"
    for folder in sorted(saves.iterdir()):
        if (checkpoint.open(folder).step or 0) > step:
            shutil.rmtree(folder)
    return saves


def output(config: Path, name: str) -> str:
    return f"train.output={config.parent / name}"


def words(config: Path, name: str, *more: str) -> list[str]:
    return ["train", str(config), "--set", output(config, name), *more]


def killed(arguments: list[str], *, step: int, delay_s: float) -> None:
    """Start a run, and kill all of its processes `delay_s` after it began (step 0), or came to `step`, or ended."""
    with started(arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if (step == 0 and line.startswith("text: ")) or (line.startswith("step ") and _step_of(line) >= step):
                break
        else:
            assert process.wait(timeout=60) == 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=delay_s)
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.killpg(process.pid, signal.SIGKILL)


def _step_of(line: str) -> int:
    return int(line.removeprefix("step ").partition("/")[0])


@pytest.mark.processes
def test_a_llama_with_dropout_goes_on_bit_for_bit(config: Path) -> None:
    config.write_text(CONFIG.replace(CONFIG.splitlines()[1], "") + LLAMA)
    simulated(config, output(config, "whole"), "checkpoint.keep=9", num_processes=2)
    back_at(4, config.parent / "whole", config)
    run = done(*words(config, "out", "--nproc", "2", "--resume", "auto"))
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    assert "goes on from step 4, saved in " in run.stdout
    assert "saved step 10 to " in run.stdout
    assert without_times(metrics(config.parent / "out")) == without_times(metrics(config.parent / "whole"))


@pytest.mark.processes
@pytest.mark.parametrize("attempt", [0, *(pytest.param(n, marks=pytest.mark.stress) for n in range(1, 30))])
def test_a_run_killed_at_any_instant_goes_on_from_its_newest_whole_save(
    config: Path, uninterrupted: Path, attempt: int
) -> None:
    chance = random.Random(attempt)
    more = ["--nproc", "2", "--set", f"checkpoint.background={str(attempt % 2 == 0).lower()}", "--resume", "auto"]
    for _ in range(1 + attempt % 3):
        killed(words(config, "out", *more), step=chance.randrange(9), delay_s=chance.uniform(0.0, 0.1))
    simulated(config, output(config, "out"), num_processes=2, resume="auto")
    assert without_times(metrics(config.parent / "out")) == without_times(metrics(uninterrupted))
    saves = config.parent / "out" / "checkpoints"
    assert checkpoint.open(saves).step == 10
    assert checkpoint.verify(saves).good


def test_a_run_goes_on_with_another_number_of_processes(config: Path, uninterrupted: Path) -> None:
    back_at(4, uninterrupted, config)
    said = simulated(config, output(config, "out"), num_processes=3, resume="auto")
    assert "goes on from step 4, saved in " in said
    assert "seeded anew" not in said
    found, expected = metrics(config.parent / "out"), metrics(uninterrupted)
    for same in ("step", "learning_rate"):
        assert [line[same] for line in found] == [line[same] for line in expected]
    # Dropout draws the same masks; bfloat16 rounds.
    assert losses(config.parent / "out") == pytest.approx(losses(uninterrupted), rel=2e-3)


@pytest.mark.processes
def test_torchrun_passes_resume_on(config: Path, uninterrupted: Path) -> None:
    saves = back_at(6, uninterrupted, config)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "-m", "shardwise.cli", *words(config, "out", "--resume", str(saves))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    assert f"goes on from step 6, saved in {saves}" in run.stdout
    assert without_times(metrics(config.parent / "out")) == without_times(metrics(uninterrupted))


@pytest.mark.processes
# Ctrl-C is among the stages of pipelines as well: tests/cli/test_stages.py.
@pytest.mark.parametrize("end", ["a rank is killed", pytest.param("Ctrl-C", marks=pytest.mark.stress)])
def test_what_stops_a_run_leaves_its_newest_save_to_go_on_from(config: Path, end: str) -> None:
    if end == "Ctrl-C":
        with started(words(config, "out", "--nproc", "2", "--set", "train.steps=1000000")) as process:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith("step 7/"))
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (130, "stopped by Ctrl-C\n")
            assert not members_of_group(process.pid)
    else:
        run = done(*words(config, "out", "--nproc", "2", "--set", "model.config.die_at=20"))  # 3 calls make an update
        assert (run.returncode, "Error: rank 1 is gone" in run.stderr) == (1, True), run.stderr
        assert len(re.findall("^Error: ", run.stderr, flags=re.MULTILINE)) == 1, run.stderr
        assert "Traceback" not in run.stderr
    saves = config.parent / "out" / "checkpoints"
    assert checkpoint.verify(saves).good
    step = checkpoint.open(saves).step
    assert step is not None
    assert step >= 4
    resumed = in_this_process(*words(config, "out", "--resume", "auto", "--set", f"train.steps={step + 3}"))
    assert (resumed.exit_code, resumed.stderr) == (0, ""), resumed.stderr
    assert f"goes on from step {step}, saved in {saves}" in resumed.stdout
    assert [line["step"] for line in metrics(config.parent / "out")] == list(range(1, step + 4))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "Error: {saves} holds saves of an earlier run, save-00000001 to save-00000005: go on with it"),
        (["--resume", "auto", "--set", "train.seed=8"], "train.seed was 0 and is 8"),
        (["--resume", "{saves}/absent"], "Error: --resume: {saves}/absent holds no checkpoint"),
    ],
)
def test_what_cannot_be_resumed_is_one_paragraph_and_exit_code_2(
    config: Path, uninterrupted: Path, more: list[str], message: str
) -> None:
    saves = back_at(10, uninterrupted, config)
    result = in_this_process(*words(config, "out", *(word.format(saves=saves) for word in more)))
    assert (result.exit_code, message.format(saves=saves) in result.stderr) == (2, True), result.stderr
    assert (result.stderr.count("Error"), "Traceback" in result.stderr) == (1, False), result.stderr
    assert metrics(config.parent / "out") == metrics(uninterrupted)


def test_a_damaged_save_is_reported_once_with_the_way_to_the_one_before_it(config: Path, uninterrupted: Path) -> None:
    saves = back_at(10, uninterrupted, config)
    (file,) = (saves / "save-00000005").glob("*rank00001.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    run = in_this_process(*words(config, "out", "--resume", "auto"))
    assert (run.exit_code, run.stderr.count("Error")) == (1, 1), run.stderr
    assert str(file) in run.stderr
    assert run.stderr.endswith(f"to take the save before it: --resume {saves}/save-00000004 (step 8)\n")
