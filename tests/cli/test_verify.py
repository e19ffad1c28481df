"""`shardwise verify`: exit codes, and what is told."""

from pathlib import Path

import pytest

from tests.cli.processes import done, in_this_process
from tests.train.runs import small_run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    small_run(tmp_path)
    return tmp_path / "small.toml"


def test_stages_are_equal(config: Path) -> None:
    result = in_this_process("verify", str(config), "--against", "pp=2", "--steps", "2", "--set", "train.microbatch=3")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "small: pp=2 on 2 simulated ranks against one process, 2 updates of 4 microbatches"
    assert lines[1] == "error model:"
    assert lines[-1] == "verdict: equal"
    assert sum(line.startswith("step ") for line in lines) == 2
    assert not (config.parent / "out").exists()


@pytest.mark.processes
def test_real_ranks_are_compared_like_simulated_ones(config: Path) -> None:
    arguments = ("verify", str(config), "--against", "dp_shard=2,sharding.stage=3", "--steps", "1")
    simulated_ranks = in_this_process(*arguments, "--simulate")
    real = done(*arguments, "--nproc", "2")
    assert (real.returncode, real.stderr) == (0, "")
    assert real.stdout.endswith("verdict: rounding\n")
    assert real.stdout.replace(" real ", " simulated ") == simulated_ranks.stdout


PROGRAM = """
import torch
from net import Net, next_token


def train(parallelize):
    torch.manual_seed(0)
    engine = parallelize(Net(8), optimizer=torch.optim.SGD, loss=next_token)
    ranks, own = engine.plan.mesh.num_data_ranks, engine.plan.mesh.data_rank(engine.channel.rank)
    for update in range(9):
        text = torch.randint(256, (4, 6), generator=torch.Generator().manual_seed(update))
        rows = text.chunk(ranks)[own]
        engine.step({"input_ids": rows, "labels": rows})
"""


@pytest.mark.processes
def test_a_program_without_a_configuration_is_compared_like_one(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (config.parent / "mine.py").write_text(PROGRAM)
    monkeypatch.chdir(config.parent)
    layout = ("--against", "dp_shard=2,sharding.stage=3", "--set", "merge.microbatches=2", "--steps", "2")
    result = in_this_process("verify", "mine.py:train", *layout)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "train: dp_shard=2 on 2 simulated ranks against one process, 2 updates of 4 microbatches"
    assert lines[-1] == "verdict: rounding"
    real = done("verify", str(config.parent / "mine.py:train"), *layout, "--nproc", "2")
    assert (real.returncode, real.stderr) == (0, "")
    assert real.stdout.replace(" real ", " simulated ") == result.stdout


@pytest.mark.parametrize(
    ("program", "layout", "words"),
    [
        ("mine.py:train", "dp_shard=2,tp=0", "tp"),
        ("mine.py:train", "dp_shard=2,train.steps=3", "train.steps=3"),
        ("mine.py:trains", "dp_shard=2", "did you mean mine.py:train?"),
        ("yours.py:train", "dp_shard=2", "no file yours.py"),
    ],
)
def test_a_program_or_a_layout_that_is_not_there_is_wrong_usage(
    config: Path, program: str, layout: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent / "mine.py").write_text(PROGRAM)
    monkeypatch.chdir(config.parent)
    result = in_this_process("verify", program, "--against", layout)
    assert result.exit_code == 2
    assert words in result.stderr


OTHER = """
import threading
from net import Net


class Other(Net):
    def forward(self, input_ids):
        is_rank = threading.current_thread().name.startswith("simulated rank")
        return super().forward(input_ids) * (FACTOR if is_rank else 1.0)
"""


@pytest.mark.parametrize(
    ("name", "code", "verdict"), [("mine.py:Other", 1, "diverges"), ("net.py:Lost", 1, "inconclusive")]
)
def test_a_divergence_is_named_and_the_exit_code_is_1(config: Path, name: str, code: int, verdict: str) -> None:
    (config.parent / "mine.py").write_text(OTHER.replace("FACTOR", "1.01"))
    words = ("--set", f"model.factory={name}", "--steps", "1")
    result = in_this_process("verify", str(config), "--against", "dp_shard=2", *words)
    assert (result.exit_code, result.stderr) == (code, "")
    *_, named, last = result.stdout.splitlines()
    assert last == f"verdict: {verdict}"
    assert verdict != "diverges" or named.startswith("first diverging tensor: output")
