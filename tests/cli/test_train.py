"""`shardwise train`: exit codes, one paragraph of error, and real processes that end when they should."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.comm import Channel
from shardwise.launchers import thread_settings
from shardwise.train import rank
from tests.cli.processes import done, done_anew, in_this_process, losses, simulated
from tests.cli.small_net import words, written
from tests.forks.programs import members_of_session, started

EXAMPLES = Path(__file__).parents[2] / "examples"

TABLES = """
train = {steps = 6, global_batch = 4, microbatch = 2, log_every = 1, timeout_seconds = 30}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, TABLES)


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
        (["--set", "model.factory=net.py:Nets"], "net.py has no Nets"),
        (["--set", "model.factory=absent_package:Net"], "absent_package cannot be imported: ModuleNotFoundError"),
        (["--set", "model.config.width=3"], "model.config.width: net.py:Net takes no width"),
        (["--set", "data.source=absent.txt"], "no file or directory"),
        (["--set", "data.sequence_length=9000"], "tokens are too few"),
        (["--set", "mesh.dp_shard=2"], "start 2 processes"),
        (["--nproc", "3"], "train.global_batch: 4 rows cannot be cut"),
        (["--device", "quantum"], "train.device: 'quantum' was asked for, but torch"),
        (["--device", "GPU"], "train.device: 'GPU' given; it must be auto, cpu, or a kind of device as torch names it"),
        (["--set", "train.device=auto:1"], "train.device: 'auto:1' given; it must be"),
        (
            ["--device", "xpu:0", "--nproc", "2"],
            "xpu:0 given for 2 processes, and no two can share a device. Give xpu",
        ),
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


def test_ranks_get_the_device_of_the_option_as_a_setting(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def note(arguments: list[str], *, overrides: tuple[str, ...], **_: object) -> int:
        commands.append(overrides)
        return 0

    monkeypatch.setattr(
        sys.modules["shardwise.cli.train"], "launched", note
    )  # the package has the command by that name
    in_this_process(*words(config, "--nproc", "2", "--device", "cpu", "--set", "train.steps=3"))
    [overrides] = commands
    assert overrides[1:] == ("train.steps=3", "train.device=cpu")


def test_a_config_that_is_not_there_ends_with_exit_code_2(tmp_path: Path) -> None:
    result = in_this_process(*words(tmp_path / "absent.toml"))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: the config ")


def test_debug_adds_the_traceback(config: Path) -> None:
    result = in_this_process(*words(config, "--set", "model.config.fault=build", "--debug"))
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: model.factory: net.py:Net raised ValueError")


def test_a_bug_in_the_forward_of_the_only_process_is_one_paragraph_and_exit_code_1(config: Path) -> None:
    result = in_this_process(*words(config, "--set", "model.config={fault='raise', at=3}"))
    assert result.exit_code == 1
    assert "Error: RuntimeError: the layer went wrong" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_command_line_imports_no_torch_before_it_has_checked_the_config(config: Path) -> None:
    program = (
        "import sys\nfrom shardwise.cli import main\n"
        f"try: main({words(config, '--set', 'train.step=3')!r})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, "did you mean train.steps" in result.stderr) == (0, True), result.stderr


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "3"}])
def test_threads_of_the_only_process_spin_for_a_short_time_unless_the_user_has_chosen(
    config: Path, own: dict[str, str]
) -> None:
    program = (
        "import os\nfrom shardwise.cli import main\n"
        f"try: main({words(config, '--set', 'train.step=3')!r})\nexcept SystemExit: pass\n"
        "import json; print(json.dumps({n: e for n, e in os.environ.items() if n.startswith(('OMP_', 'GOMP_'))}))"
    )
    environment = {name: each for name, each in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))} | own
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    expected = {name: each for name, each in thread_settings(None).items() if name.startswith("OMP_")} | own
    if "OMP_WAIT_POLICY" not in own:
        expected = {"GOMP_SPINCOUNT": "10000"} | expected
    assert json.loads(result.stdout) == expected, result.stderr


@pytest.mark.processes
def test_two_processes_train_an_example_to_the_same_losses_as_one(tmp_path: Path) -> None:
    example, brief = EXAMPLES / "byte_gru.toml", ("--set", "train.steps=12")
    one = in_this_process(*words(example, "--nproc", "1", *brief, output=tmp_path / "1"))
    two = done_anew("-m", "shardwise.cli", *words(example, "--nproc", "2", *brief, output=tmp_path / "2"))
    for n, code, out, err in ((1, one.exit_code, one.stdout, one.stderr), (2, two.returncode, two.stdout, two.stderr)):
        assert (code, err) == (0, ""), err
        assert re.fullmatch(
            r"held-out loss \d\.\d{4}; of a model that knows only byte frequencies: \d\.\d{4}", out.splitlines()[-1]
        )
        assert out.count("step 12/12") == 1
        assert (tmp_path / str(n) / "loss.png").exists()
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-3)


def test_two_simulated_ranks_train_the_smallest_example_to_the_losses_of_one(tmp_path: Path) -> None:
    for ranks in (1, 2):
        output = f"train.output={tmp_path / str(ranks)}"
        simulated(EXAMPLES / "tiny.toml", output, "train.steps=5", num_processes=ranks)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-3)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("{fault='raise', at=3}", 1, "Error: rank 0: RuntimeError: the layer went wrong"),
        ("{fault='build', rank='1'}", 2, "Error: rank 1: model.factory: net.py:Net raised ValueError"),
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
        assert not members_of_session(process.pid)
    assert len(losses(config.parent / "out")) >= 3
