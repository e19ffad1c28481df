"""`shardwise train` in this process: exit codes, one paragraph of error, devices, threads, examples."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.comm import Channel
from shardwise.launchers import thread_settings
from shardwise.train import rank
from tests.cli.processes import in_this_process, losses, metrics, simulated
from tests.cli.small_net import back_at, words, written
from tests.train.runs import without_times

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLES = """
train = {steps = 6, global_batch = 4, microbatch = 2, log_every = 1, timeout_seconds = 30}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, TABLES)


def setting(*overrides: str) -> list[str]:
    return [word for each in overrides for word in ("--set", each)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            setting("train.step=3", "train.steps=many", "sharding.stage=9"),
            "Error: 3 problems:\n"
            "  - train.steps: 'many' given; it must be a whole number\n"
            "  - train.step: unknown setting; did you mean train.steps?\n"
            "  - sharding.stage: 9 asked; the stages are 0, 1, 2 and 3\n",
        ),
        (setting("model.factory=net.py:Nets"), "net.py has no Nets"),
        (setting("model.config.width=3"), "model.config.width: net.py:Net takes no width"),
        (setting("data.source=absent.txt"), "no file or directory"),
        (setting("data.sequence_length=9000"), "tokens are too few"),
        (setting("mesh.dp_shard=2"), "start 2 processes"),
        (["--nproc", "3"], "train.global_batch: 4 rows cannot be cut"),
        (["--device", "quantum"], "train.device: 'quantum' was asked for, but torch"),
        (["--device", "GPU"], "train.device: 'GPU' given; it must be auto, cpu, or a kind of device as torch names it"),
        (setting("train.device=auto:1"), "train.device: 'auto:1' given; it must be"),
        (["--device", "xpu:0", "--nproc", "2"], "xpu:0 given for 2 processes, and no two can share a device. Give xpu"),
        (["--nproc", "0"], "Invalid value for '--nproc'"),
        (["--resume", "absent"], "absent holds no checkpoint"),
    ],
)
def test_what_cannot_be_trained_ends_with_a_message_and_exit_code_2(
    config: Path, more: list[str], message: str
) -> None:
    result = in_this_process(*words(config, *more))
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert "Traceback" not in result.stderr
    assert not (config.parent / "out").exists()
    absent = in_this_process(*words(config.with_name("absent.toml"), *more))
    assert (absent.exit_code, "Error" in absent.stderr) == (2, True)


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


@pytest.mark.parametrize(
    ("asked", "given"), [("fake", "fake:2"), ("fake:1", "fake:1"), ("cpu", "cpu"), ("auto", "cpu")]
)
def test_the_option_says_where_the_only_process_computes(
    config: Path, monkeypatch: pytest.MonkeyPatch, fake: str, asked: str, given: str
) -> None:
    channels: list[Channel] = []
    monkeypatch.setattr(rank, "run", lambda config, channel, *_, **__: channels.append(channel))
    torch.accelerator.set_device_index(2)
    result = in_this_process(*words(config, "--device", asked))
    assert result.exit_code == 0, result.output
    assert [each.device for each in channels] == [torch.device(given)]


@pytest.mark.parametrize(
    ("fault", "code", "last"),
    [
        ("{fault='build'}", 2, "Error: model.factory: net.py:Net raised ValueError"),
        ("{fault='raise', at=3}", 1, "Error: RuntimeError: the layer went wrong"),
    ],
)
def test_a_bug_of_the_only_process_is_one_paragraph_and_debug_adds_the_traceback(
    config: Path, fault: str, code: int, last: str
) -> None:
    for more in ([], ["--debug"]):
        result = in_this_process(*words(config, *setting(f"model.config={fault}"), *more))
        assert result.exit_code == code
        assert ("Traceback" in result.stderr) == bool(more)
        assert any(line.startswith(last) for line in result.stderr.splitlines())


SAVING = ("checkpoint.every=2", "train.steps=6", "checkpoint.keep=9")


def test_a_run_goes_on_by_an_option_and_a_damaged_save_is_told_once_with_the_way_out(config: Path) -> None:
    whole = config.parent / "whole"
    simulated(config, f"train.output={whole}", *SAVING, num_processes=2)
    saves = back_at(4, whole, config)
    result = in_this_process(*words(config, "--resume", "auto", *setting(*SAVING)))
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"goes on from step 4, saved in {saves}" in result.stdout
    assert losses(config.parent / "out") == pytest.approx(losses(whole), rel=2e-5)
    again = in_this_process(*words(config, *setting(*SAVING)))
    assert (again.exit_code, again.stderr.count("Error")) == (2, 1)
    assert again.stderr.startswith(f"Error: {saves} holds saves of an earlier run, save-00000001 to save-00000003. Go")
    (file,) = (saves / "save-00000003").glob("*rank00000.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    run = in_this_process(*words(config, "--resume", "auto"))
    assert (run.exit_code, run.stderr.count("Error")) == (1, 1), run.stderr
    assert str(file) in run.stderr
    assert run.stderr.endswith(f"to take the save before it: --resume {saves}/save-00000002 (step 4)\n")


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "3"}])
def test_threads_spin_for_a_short_time_unless_the_user_has_chosen_and_torch_waits_for_the_config(
    config: Path, own: dict[str, str]
) -> None:
    program = (
        "import os, sys\nfrom shardwise.cli import main\n"
        f"try: main({words(config, '--set', 'train.step=3')!r})\nexcept SystemExit: pass\n"
        "import json; print(json.dumps({n: e for n, e in os.environ.items() if n.startswith(('OMP_', 'GOMP_'))}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {name: each for name, each in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))} | own
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    expected = {name: each for name, each in thread_settings(None).items() if name.startswith("OMP_")} | own
    if "OMP_WAIT_POLICY" not in own:
        expected = {"GOMP_SPINCOUNT": "10000"} | expected
    assert json.loads(result.stdout) == expected, result.stderr
    assert (result.returncode, "did you mean train.steps" in result.stderr) == (0, True), result.stderr


def test_an_example_trains_in_the_command_and_on_two_ranks_to_the_same_losses(tmp_path: Path) -> None:
    brief = setting("train.steps=5")
    one = in_this_process(*words(EXAMPLES / "byte_gru.toml", "--nproc", "1", *brief, output=tmp_path / "1"))
    assert (one.exit_code, one.stderr) == (0, "")
    last = r"held-out loss \d\.\d{4}; of a model that knows only byte frequencies: \d\.\d{4}"
    assert re.fullmatch(last, one.stdout.splitlines()[-1])
    assert (tmp_path / "1" / "loss.png").exists()
    simulated(EXAMPLES / "byte_gru.toml", f"train.output={tmp_path / '2'}", "train.steps=5", num_processes=2)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-3)


def test_the_example_of_stages_has_the_losses_of_one_process(tmp_path: Path) -> None:
    brief = ("train.steps=2", "train.warmup_steps=1", "generate.max_new_tokens=4")
    one = ("mesh.pp=1", "train.trace=false")
    said = simulated(EXAMPLES / "pipeline.toml", f"train.output={tmp_path / 'staged'}", *brief, num_processes=2)
    simulated(EXAMPLES / "pipeline.toml", f"train.output={tmp_path / 'whole'}", *brief, *one, num_processes=1)
    assert without_times(metrics(tmp_path / "staged")) == without_times(metrics(tmp_path / "whole"))
    assert "stage 1 (rank 1): model.layers.2-3, model.norm, lm_head: 115.0 k parameters, 50%" in said
