"""The example with everything at once: 2 tp x 2 pp x 2 dp, the cast with the optimizer, gradients merged."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardwise.comm import Channel
from shardwise.train import RunConfig, read_config
from shardwise.train.rank import run
from tests.processes.pool import Pool
from tests.train.runs import finished, without_times

EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid.toml"
FLOAT32 = 'precision.compute="float32"'
ALONE = ("mesh.tp=1", "mesh.pp=1", "mesh.dp_shard=1")


def shortened(output: str, *overrides: str) -> RunConfig:
    """Three updates, and an evaluation at the end."""
    brief = ("train.steps=3", "train.warmup_steps=1", "train.log_every=1", "train.evaluate_batches=1")
    num_processes = 1 if overrides[-3:] == ALONE else 8
    return read_config(EXAMPLE, overrides=[f"train.output={output}", *brief, *overrides], num_processes=num_processes)


def on_a_rank(channel: Channel, output: str) -> None:
    run(shortened(output), channel, Console(file=io.StringIO()))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As many as the processes have: the same kernels, the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_example_asks_for_all_at_once() -> None:
    plan = shortened("unused").plan
    assert {axis: getattr(plan.mesh, axis) for axis in ("tp", "pp", "dp_shard")} == dict.fromkeys(
        ("tp", "pp", "dp_shard"), 2
    )
    assert (plan.sharding.stage, plan.precision.compute, plan.precision.master) == (1, "bfloat16", "float32")
    assert plan.merge.microbatches == 4


def test_eight_simulated_ranks_have_the_curves_of_one_process(tmp_path: Path) -> None:
    alone = finished(shortened(str(tmp_path / "alone"), FLOAT32, *ALONE))
    together = finished(shortened(str(tmp_path / "together"), FLOAT32))
    for name in ("loss", "grad_norm", "held_out_loss"):
        # Sums over tp and over data ranks are added in another order: some 1e-7 each, in 3 updates of 4 layers.
        assert together.curve(name) == pytest.approx(alone.curve(name), rel=1e-5), name


def test_eight_processes_have_the_bits_of_eight_simulated_ranks(pool: Pool, tmp_path: Path) -> None:
    simulated = finished(shortened(str(tmp_path / "simulated")))
    pool.run(8, on_a_rank, str(tmp_path / "real"))
    real = [json.loads(line) for line in (tmp_path / "real" / "metrics.jsonl").read_text().splitlines()]
    assert len(real) == 3
    assert without_times(real) == without_times(simulated.metrics)
