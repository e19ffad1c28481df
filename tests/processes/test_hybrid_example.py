"""The example with everything at once: 2 tp x 2 pp x 2 dp, the cast with the optimizer, gradients merged."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.comm import Channel
from shardwise.train import RunConfig, continuations, rank, read_config
from tests.processes.pool import Pool
from tests.train.runs import finished, without_times

NUM_RANKS = 8
EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid.toml"
FLOAT32 = 'precision.compute="float32"'
ALONE = ("mesh.tp=1", "mesh.pp=1", "mesh.dp_shard=1")


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    say_little(monkeypatch)


def say_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trained model goes on to write is of no interest here."""
    monkeypatch.setattr(continuations, "_DEFAULT_TOKENS", 1)


def shortened(output: Path, *overrides: str, num_processes: int = NUM_RANKS) -> RunConfig:
    """Two updates of half as many microbatches, and an evaluation at the end."""
    brief = ("train.steps=2", "train.warmup_steps=1", "train.log_every=1", "train.evaluate_batches=1")
    given = [f"train.output={output}", "train.global_batch=8", *brief, *overrides]
    return read_config(EXAMPLE, overrides=given, num_processes=num_processes)


SMALL = ("data.sequence_length=8", "model.config.num_hidden_layers=2")
"""What crosses between ranks is the same, and there is less of it."""


def run_here(channel: Channel, output: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        say_little(monkeypatch)
        rank.run(shortened(output, *SMALL), channel, Console(file=io.StringIO()))


def test_the_example_asks_for_all_at_once() -> None:
    plan = read_config(EXAMPLE, num_processes=NUM_RANKS).plan
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp_shard) == (2, 2, 2)
    assert (plan.sharding.stage, plan.precision.compute, plan.precision.master) == (1, "bfloat16", "float32")
    assert plan.merge.microbatches == 4


def test_eight_simulated_ranks_have_the_curves_of_one_process(tmp_path: Path) -> None:
    # The first update of Adam has the size of a sign: a gradient that is rounding alone would be +1 or -1.
    settings = (FLOAT32, "train.optimizer_options.eps=1e-5")
    alone = finished(shortened(tmp_path / "alone", *settings, *ALONE, num_processes=1))
    together = finished(shortened(tmp_path / "together", *settings))
    for name in ("loss", "grad_norm", "held_out_loss"):
        # Sums over tp and over data ranks are added in another order: some 1e-7 each, in 4 layers and 2 updates.
        assert together.curve(name) == pytest.approx(alone.curve(name), rel=1e-6), name


@pytest.mark.timeout(240)
def test_eight_processes_have_the_bits_of_eight_simulated_ranks(pool: Pool, tmp_path: Path) -> None:
    simulated = finished(shortened(tmp_path / "simulated", *SMALL))
    pool.run(NUM_RANKS, run_here, tmp_path / "real", patience_seconds=200)
    lines = (tmp_path / "real" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert without_times([json.loads(line) for line in lines]) == without_times(simulated.metrics)
