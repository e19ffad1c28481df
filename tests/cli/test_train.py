"""`shardwise train`: exit codes, one paragraph of error, and real processes that end when they should."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import done, in_this_process, losses, members_of_group, started

EXAMPLES = Path(__file__).parents[2] / "examples"

FAULTS = """
import os
import torch
from torch import nn

RANK = os.environ.get("RANK")


class Faulty(nn.Module):
    def __init__(self, fault="", rank="1", update=3):
        super().__init__()
        self.embedding = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.fault, self.rank, self.at, self.calls = fault, rank, update, 0
        if fault == "build" and RANK == rank:
            raise ValueError("this net cannot be built")

    def forward(self, input_ids):
        self.calls += self.training
        if self.calls == self.at and (self.rank == "all" or RANK == self.rank):
            if self.fault == "raise":
                raise RuntimeError("the forward went wrong")
        return self.head(self.embedding(input_ids))


def loss(logits, batch):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
"""

CONFIG = """
model = {factory = "faulty.py:Faulty", loss = "faulty.py:loss"}
data = {source = "faulty.py", sequence_length = 16, held_out = 0.2}
train = {steps = 6, global_batch = 4, microbatch = 2, log_every = 1, timeout_seconds = 30}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "faulty.py").write_text(FAULTS)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "run.toml"


def words(config: Path, *more: str, output: Path | None = None) -> list[str]:
    return ["train", str(config), "--set", f"train.output={output or config.parent / 'out'}", *more]


def test_wrong_settings_are_all_listed_on_stderr_with_exit_code_2(config: Path) -> None:
    result = in_this_process(
        *words(config, "--set", "train.step=3", "--set", "train.steps=many", "--set", "sharding.stage=9")
    )
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "Error: 3 problems:\n"
        "  - train.steps: 'many' given; it must be a whole number\n"
        "  - train.step: unknown setting; did you mean train.steps?\n"
        "  - sharding.stage: 9 asked; the stages are 0, 1, 2 and 3\n"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "model.factory=faulty.py:Fault"], "faulty.py has no Fault"),
        (["--set", "model.factory=absent_package:Net"], "absent_package cannot be imported: ModuleNotFoundError"),
        (["--set", "model.config.width=3"], "model.factory: faulty.py:Faulty raised TypeError"),
        (["--set", "data.source=absent.txt"], "no file or directory"),
        (["--set", "data.sequence_length=9000"], "tokens are too few"),
        (["--set", "mesh.dp_shard=2"], "start 2 processes"),
        (["--nproc", "3"], "train.global_batch: 4 rows cannot be cut"),
        (["--nproc", "0"], "Invalid value for '--nproc'"),
    ],
)
def test_what_cannot_be_trained_ends_with_a_message_and_exit_code_2(
    config: Path, more: list[str], message: str
) -> None:
    result = in_this_process(*words(config, *more))
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert "Traceback" not in result.stderr
    assert not (config.parent / "out").exists()


def test_a_config_that_is_not_there_ends_with_exit_code_2(tmp_path: Path) -> None:
    result = in_this_process(*words(tmp_path / "absent.toml"))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: the config ")


def test_debug_adds_the_traceback(config: Path) -> None:
    result = in_this_process(*words(config, "--set", "model.config.width=3", "--debug"))
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: model.factory")


def test_a_bug_in_the_forward_of_the_only_process_is_one_paragraph_and_exit_code_1(config: Path) -> None:
    result = in_this_process(*words(config, "--set", "model.config={fault='raise', rank='all'}"))
    assert result.exit_code == 1
    assert "Error: RuntimeError: the forward went wrong" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_line_imports_no_torch_before_it_has_checked_the_config(config: Path) -> None:
    program = (
        "import sys\nfrom shardwise.cli import main\n"
        f"try: main({words(config, '--set', 'train.step=3')!r})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, "did you mean train.steps" in result.stderr) == (0, True), result.stderr


@pytest.mark.processes
def test_two_processes_train_the_example_to_the_same_losses_as_one(tmp_path: Path) -> None:
    example = EXAMPLES / "tiny.toml"
    one = in_this_process(*words(example, "--nproc", "1", output=tmp_path / "1"))
    two = done(*words(example, "--nproc", "2", output=tmp_path / "2"))
    for n, code, out, err in ((1, one.exit_code, one.stdout, one.stderr), (2, two.returncode, two.stdout, two.stderr)):
        assert (code, err) == (0, ""), err
        assert re.fullmatch(r"held-out loss \d\.\d{4}, byte-frequency loss \d\.\d{4}", out.splitlines()[-1])
        assert out.count("step 12/12") == 1
        assert (tmp_path / str(n) / "loss.png").exists()
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-3)


@pytest.mark.processes
def test_torchrun_starts_ranks_that_join(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "-m", "shardwise.cli"]
    command += words(EXAMPLES / "byte_gru.toml", "--set", "train.steps=6", output=tmp_path)
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert run.returncode == 0, run.stderr
    assert "mesh dp_shard=2" in run.stdout
    assert run.stdout.count("held-out loss") == 1
    assert len(losses(tmp_path)) == 6


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("{fault='raise', rank='all'}", 1, "Error: rank 0: RuntimeError: the forward went wrong"),
        ("{fault='build', rank='1'}", 2, "Error: rank 1: model.factory: faulty.py:Faulty raised ValueError"),
    ],
)
def test_ranks_that_fail_stop_all_and_are_reported_once(config: Path, fault: str, code: int, message: str) -> None:
    run = done(*words(config, "--nproc", "2", "--set", f"model.config={fault}"))
    assert (run.returncode, message in run.stderr) == (code, True), run.stderr
    assert len(re.findall("^Error: ", run.stderr, flags=re.MULTILINE)) == 1
    assert "Traceback" not in run.stderr
    if "build" not in fault:
        assert len(losses(config.parent / "out")) == 2


@pytest.mark.processes
def test_ctrl_c_to_the_first_process_alone_stops_all_ranks_with_exit_code_130(config: Path) -> None:
    with started(words(config, "--nproc", "2", "--set", "train.steps=1000000")) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "stopped by Ctrl-C\n")
        assert not members_of_group(process.pid)
    assert len(losses(config.parent / "out")) >= 3
