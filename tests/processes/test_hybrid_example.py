"""The example with everything at once: 2 tp x 2 pp x 2 dp, the cast with the optimizer, gradients merged."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.comm import Channel
from shardwise.train import RunConfig, rank, read_config
from tests.processes.pool import Pool
from tests.train.runs import finished

NUM_RANKS = 8
EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid.toml"
ALONE = ("mesh.tp=1", "mesh.pp=1", "mesh.dp_shard=1")


def shortened(output: Path, *overrides: str, num_processes: int = NUM_RANKS) -> RunConfig:
    """Two updates of a few microbatches, in float32, and an evaluation at the end."""
    brief = (
        "train.steps=2",
        "train.warmup_steps=1",
        "train.log_every=1",
        "train.evaluate_batches=1",
        "generate.max_new_tokens=1",
    )
    small = ("data.sequence_length=8", "model.config.num_hidden_layers=2", "train.global_batch=8")
    # The first update of Adam has the size of a sign: a gradient that is rounding alone would be +1 or -1.
    close = ('precision.compute="float32"', "train.optimizer_options.eps=1e-5")
    given = [f"train.output={output}", *brief, *small, *close, *overrides]
    return read_config(EXAMPLE, overrides=given, num_processes=num_processes)


def run_here(channel: Channel, output: Path) -> None:
    rank.run(shortened(output), channel, Console(file=io.StringIO()))


@pytest.mark.timeout(300)
def test_eight_processes_have_the_curves_of_one(pool: Pool, tmp_path: Path) -> None:
    plan = read_config(EXAMPLE, num_processes=NUM_RANKS).plan
    assert (plan.mesh.tp, plan.mesh.pp, plan.mesh.dp_shard) == (2, 2, 2)
    assert (plan.sharding.stage, plan.precision.compute, plan.precision.master) == (1, "bfloat16", "float32")
    assert plan.merge.microbatches == 4
    alone = finished(shortened(tmp_path / "alone", *ALONE, num_processes=1))
    pool.run(NUM_RANKS, run_here, tmp_path / "real", patience_seconds=200)
    together = [json.loads(line) for line in (tmp_path / "real" / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "grad_norm", "held_out_loss"):
        # Sums over tp and over data ranks are added in another order: some 1e-7 each, in 2 layers and 2 updates.
        found = [each[name] for each in together if each[name] is not None]
        assert found == pytest.approx(alone.curve(name), rel=1e-6), name
