"""`shardwise train` in this process: devices, threads, examples."""

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.comm import Channel
from shardwise.launchers.environment import thread_settings
from shardwise.train import check_references, rank, read_config
from tests.cli.processes import in_this_process, losses, metrics, simulated
from tests.cli.small_net import words, written

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
    unknown = in_this_process(*words(config, "--device", "quantum"))
    assert (unknown.exit_code, "'quantum' was asked for, but torch" in unknown.stderr) == (2, True)


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("train", {}),
        ("train", {"OMP_WAIT_POLICY": "active"}),
        ("train", {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "3"}),
        ("verify --against pp=2", {}),
    ],
)
def test_threads_spin_for_a_short_time_unless_the_user_has_chosen_and_torch_waits_for_the_config(
    config: Path, command: str, own: dict[str, str]
) -> None:
    program = (
        "import os, sys\nfrom shardwise.cli import main\n"
        f"try: main({[*command.split(), str(config), '--set', 'train.step=3']!r})\nexcept SystemExit: pass\n"
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


@pytest.mark.parametrize("name", ["byte_gru", "hybrid", "pipeline", "tiny"])
def test_names_and_settings_of_the_examples_are_there(name: str) -> None:
    file = EXAMPLES / f"{name}.toml"
    sizes = tomllib.loads(file.read_text()).get("mesh", {})
    config = read_config(file, num_processes=math.prod(sizes.values()))
    check_references(config)
    assert str(config.plan.mesh) == str(sw.Mesh(**sizes))


def test_an_example_trains_in_the_command_and_on_two_ranks_to_the_same_losses(tmp_path: Path) -> None:
    brief = setting("train.steps=5")
    one = in_this_process(*words(EXAMPLES / "byte_gru.toml", "--nproc", "1", *brief, output=tmp_path / "1"))
    assert (one.exit_code, one.stderr) == (0, "")
    last = r"held-out loss \d\.\d{4}; of a model that knows only byte frequencies: \d\.\d{4}"
    assert re.fullmatch(last, one.stdout.splitlines()[-1])
    assert (tmp_path / "1" / "loss.png").exists()
    simulated(EXAMPLES / "byte_gru.toml", f"train.output={tmp_path / '2'}", "train.steps=5", num_processes=2)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-3)


BRIEF = (
    *("train.steps=2", "train.warmup_steps=1", "train.log_every=1", "train.evaluate_batches=1", "train.global_batch=8"),
    *("generate.max_new_tokens=1", "data.sequence_length=8", "model.config.num_hidden_layers=2"),
    # The first update of Adam has the size of a sign: a gradient that is rounding alone would be +1 or -1.
    *("precision.compute=float32", "train.optimizer_options.eps=1e-5"),
)


def test_the_example_with_everything_at_once_has_the_curves_of_one_process(tmp_path: Path) -> None:
    single = ("mesh.tp=1", "mesh.pp=1", "mesh.dp_shard=1")
    for size, mesh in ((8, ()), (1, single)):
        output = f"train.output={tmp_path / str(size)}"
        simulated(EXAMPLES / "hybrid.toml", output, *BRIEF, *mesh, num_processes=size)
    for curve in ("loss", "grad_norm", "held_out_loss"):
        together, alone = ([each[curve] for each in metrics(tmp_path / size) if each[curve]] for size in "81")
        # Sums over tp and over data ranks are added in another order: some 1e-7 each, in 2 layers and 2 updates.
        assert together == pytest.approx(alone, rel=1e-6), curve
