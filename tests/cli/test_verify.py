"""`shardwise verify`: exit codes, and what is told."""

from pathlib import Path

import pytest

from tests.cli.processes import done, in_this_process
from tests.train.row_kinds import run_of
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


@pytest.mark.parametrize("kind", ["turns", "frames", "words"])
def test_rows_turns_and_groups_hold_in_a_verification(tmp_path: Path, kind: str) -> None:
    from shardwise.train.verification.program import configured
    from shardwise.train.verification.verifier import verify_simulated

    groups = ["train.groups=[{parameters=['*norm*'], frozen=true}, {parameters=['lm_head'], learning_rate=0.1}]"]
    schedule = ["train.schedule=polynomial", "train.decay=null", "train.warmup_steps=1"]
    words = [*groups, *schedule, "mesh.pp=2", "mesh.dp_shard=2"] if kind == "words" else ["mesh.dp_shard=2"]
    assert verify_simulated(configured(run_of(tmp_path, kind, *words), steps=2)).verdict in ("equal", "rounding")


@pytest.mark.processes
def test_real_ranks_are_compared_like_simulated_ones(config: Path) -> None:
    arguments = ("verify", str(config), "--against", "dp_shard=2,sharding.stage=3", "--steps", "1")
    simulated_ranks = in_this_process(*arguments, "--simulate")
    real = done(*arguments, "--nproc", "2")
    assert (real.returncode, real.stderr) == (0, "")
    assert real.stdout.endswith("verdict: rounding\n")
    assert real.stdout.replace(" real ", " simulated ") == simulated_ranks.stdout


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


def test_a_layout_whose_ranks_fail_ends_in_one_paragraph(config: Path) -> None:
    (config.parent / "mine.py").write_text(OTHER.replace("(FACTOR", "([][0]"))
    result = in_this_process("verify", str(config), "--against", "dp_shard=2", "--set", "model.factory=mine.py:Other")
    assert result.exit_code == 1
    assert "Error: IndexError" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--against", "dp_shard=5"), "train.global_batch: 12 rows cannot be cut"),
        (("--against", "pq=2"), "'pq' is no mesh axis"),
        (("--against", "dp_shard=2", "--nproc", "3"), "asks for 2 ranks, but the world has 3"),
        (("--against", "pp=2", "--simulate", "--nproc", "2"), "exclude each other"),
        (
            ("--against", "pp=2", "--nproc", "2", "--set", "train.device=quantum"),
            "train.device: 'quantum' was asked for",
        ),
        (("--against", "pp=2", "--set", "train.step=2"), "did you mean train.steps?"),
        ((), "--against"),
    ],
)
def test_wrong_usage_is_told_with_exit_code_2(config: Path, words: tuple[str, ...], told: str) -> None:
    result = in_this_process("verify", str(config), *words)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert "Traceback" not in result.stderr
