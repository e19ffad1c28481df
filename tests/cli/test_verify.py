"""`shardwise verify`: exit codes, what is told, simulated and real ranks."""

from pathlib import Path

import pytest

from shardwise.comm import simulated
from shardwise.engine.pipeline.stage_ties import StageTies
from tests.cli.processes import done, in_this_process
from tests.train.runs import small_run

TIED = """
from net import Net


class Tied(Net):
    def __init__(self, width):
        super().__init__(width)
        self.head.weight = self.embedding.weight
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    small_run(tmp_path)
    (tmp_path / "tied.py").write_text(TIED)
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


def test_real_ranks_are_compared_like_simulated_ones(config: Path) -> None:
    arguments = ("verify", str(config), "--against", "dp_shard=2,sharding.stage=3", "--steps", "1")
    simulated_ranks = in_this_process(*arguments, "--simulate")
    real = done(*arguments, "--nproc", "2")
    assert (real.returncode, real.stderr) == (0, "")
    assert real.stdout.endswith("verdict: rounding\n")
    assert real.stdout.replace(" real ", " simulated ") == simulated_ranks.stdout


def test_a_divergence_is_named_with_exit_code_1(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: StageTies, _: object) -> None:
        for gradients in self._gradients.values():
            gradients.stop()

    monkeypatch.setattr(StageTies, "collect", forget)
    tied = ("--set", "model.factory=tied.py:Tied")
    result = in_this_process("verify", str(config), "--against", "pp=2", *tied)
    assert result.exit_code == 1
    assert result.stderr == ""
    *_, named, verdict = result.stdout.splitlines()
    assert named.startswith(
        "first diverging tensor: mean gradient of 'embedding.weight' of module 'embedding', step 0: "
    )
    assert verdict == "verdict: diverges"


def test_where_nothing_is_finite_the_exit_code_is_1(config: Path) -> None:
    (config.parent / "lost.py").write_text(
        "from net import Net\n\n\nclass Lost(Net):\n    def forward(self, input_ids):\n"
        "        return super().forward(input_ids) * float('nan')\n"
    )
    lost = ("--set", "model.factory=lost.py:Lost", "--steps", "1")
    result = in_this_process("verify", str(config), "--against", "dp_shard=2", *lost)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.endswith("verdict: inconclusive\n")


def test_a_layout_whose_ranks_fail_ends_in_one_paragraph(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise OSError("the network is gone")

    monkeypatch.setattr(simulated._SimulatedChannel, "reduce_scatter", lost)
    result = in_this_process("verify", str(config), "--against", "dp_shard=2")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: OSError: the network is gone")
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
