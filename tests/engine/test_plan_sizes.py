"""What travels, what is cast and what is held, counted: bytes equal the plan's, once per update whatever is merged."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import RecordedCall
from tests.covering import covering
from tests.engine.loops import begun, plan_of
from tests.engine.memory import counted_from_now, tensor_bytes_alive
from tests.oracle.batches import points, square_loss
from tests.oracle.program import adamw

WIDTHS = (4, 40, 9, 30, 1)
NUM_ELEMENTS = sum((one + 1) * two for one, two in pairwise(WIDTHS))
KEPT = (9 + 1) * 30


class Tower(nn.Module):
    """Four layers; the third may be kept in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(one, two) for one, two in pairwise(WIDTHS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float()


SHARDINGS: dict[str, dict[str, Any]] = {
    "slice": {"bucket_bytes": 500},
    "one bucket": {},
    "whole": {"bucket_bytes": 500, "partition": "whole"},
    "dp_shard": {"bucket_bytes": 500, "owners": "dp_shard"},
    "whole of dp_shard": {"bucket_bytes": 500, "owners": "dp_shard", "partition": "whole"},
}
PRECISIONS = {
    "fp32": sw.Precision(),
    "bf16": sw.Precision(compute="bfloat16"),
    "bf16-kept": sw.Precision(compute="bfloat16", keep=("layers.2",)),
    "bf16-narrow": sw.Precision(compute="bfloat16", accumulate="bfloat16"),
    "fp32-sent-bf16": sw.Precision(reduce="bfloat16"),
}


def engine_of(channel: sw.Channel, plan: sw.Plan) -> Any:
    return begun(channel, Tower, plan, optimizer=adamw, loss=square_loss)


def recorded(channel: sw.Channel, plan: sw.Plan, steps: int = 2) -> tuple[Any, list[list[RecordedCall]]]:
    """An engine after some updates, and the calls of each."""
    channel = sw.Recorded(channel)
    engine, calls = engine_of(channel, plan), []
    for seed in range(steps):
        channel.clear()
        engine.step(points(seed, plan.merge.microbatches))
        calls.append(list(channel.calls))
    return engine, calls


@pytest.mark.parametrize(
    ("mesh", "stage", "k", "sharding", "precision"),
    covering(
        ["dp_shard=2", "dp_shard=3", "dp_shard=8", "dp_replicate=2,dp_shard=3", "dp_replicate=3"],
        [0, 1],
        [1, 4],
        list(SHARDINGS),
        list(PRECISIONS),
        strength=2,
    ),
)
def test_bytes_sent_and_elements_cast_equal_the_plan(
    mesh: str, stage: int, k: int, sharding: str, precision: str
) -> None:
    """Each call is counted, and each owned element is cast once per update."""
    plan = plan_of(mesh, stage, k, sharding=SHARDINGS[sharding], precision=PRECISIONS[precision])

    def run(channel: sw.Channel) -> int:
        engine, (_, calls) = recorded(channel, plan)
        planned, counters = engine.traffic(), engine.counters
        gathered = [call for call in calls if call.operation == "all_gather" and call.purpose.startswith("parameters")]
        reduced = [call for call in calls if call.purpose.startswith("gradients")]
        assert sum(call.bytes_sent for call in gathered) == planned.gather_bytes
        assert sum(call.bytes_sent for call in reduced) == planned.reduce_bytes
        rest = [call for call in calls if call not in gathered and call not in reduced]
        assert [call.operation for call in rest] == ["exchange"] * 2
        operations = [call.operation for call in calls]
        assert 2 * operations.count("exchange") == counters.exchanges
        assert 2 * operations.count("all_gather") == counters.all_gathers
        assert 2 * operations.count("reduce_scatter") == counters.reduce_scatters
        assert counters.updates == 2
        return int(counters.cast_elements)

    cast = {"bf16-kept": NUM_ELEMENTS - KEPT, "bf16": NUM_ELEMENTS, "bf16-narrow": NUM_ELEMENTS}.get(precision, 0)
    copies = plan.mesh.size if stage == 0 else plan.mesh.dp_replicate if "dp_shard" in sharding else 1
    assert sum(sw.simulate(plan.mesh.size, run)) == 2 * cast * copies


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize(
    ("precision", "k", "bytes_of_gradient", "bytes_of_copy"),
    [("fp32", 1, 4, 4), ("fp32", 4, 4, 4), ("bf16", 1, 2, 2), ("bf16", 4, 4, 2), ("bf16-narrow", 4, 2, 2)],
)
def test_bytes_sent_are_those_of_the_formula(
    num_ranks: int, precision: str, k: int, bytes_of_gradient: int, bytes_of_copy: int
) -> None:
    plan = plan_of(f"dp_shard={num_ranks}", k=k, precision=PRECISIONS[precision])
    formula = (num_ranks - 1) * NUM_ELEMENTS / num_ranks
    padding = 8 * 16 + 16 * num_ranks  # slots and parts start at multiples of 16 elements
    for _, (_, calls) in sw.simulate(num_ranks, lambda channel: recorded(channel, plan)):
        for operation, num_bytes in (("reduce_scatter", bytes_of_gradient), ("all_gather", bytes_of_copy)):
            sent = sum(call.bytes_sent for call in calls if call.operation == operation)
            assert formula * num_bytes <= sent <= (formula + padding) * num_bytes


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(1, 8), (500, 6), (1 << 20, 1)])
def test_an_update_is_one_reduction_and_one_gathering_per_bucket_whatever_is_merged(
    k: int, bucket_bytes: int, num_buckets: int
) -> None:
    plan = plan_of("dp_shard=3", k=k, sharding={"bucket_bytes": bucket_bytes})
    for _, steps in sw.simulate(3, lambda channel: recorded(channel, plan)):
        for calls in steps:
            operations = sorted(call.operation for call in calls)
            assert operations == [*["all_gather"] * num_buckets, *["exchange"] * 2, *["reduce_scatter"] * num_buckets]


def test_the_number_of_microbatches_of_a_step_decides_its_bytes() -> None:
    def run(channel: sw.Channel) -> None:
        watched = sw.Recorded(channel)
        engine = engine_of(watched, plan_of("dp_shard=2", precision=PRECISIONS["bf16"]))
        for k in (1, 4, 1, 2):
            watched.clear()
            engine.step(points(0, 8), microbatches=k)
            assert watched.bytes_sent("reduce_scatter") == engine.traffic(microbatches=k).reduce_bytes
        assert engine.traffic(microbatches=4).reduce_bytes == 2 * engine.traffic().reduce_bytes

    sw.simulate(2, run)


def test_one_rank_sends_nothing() -> None:
    [(_, steps)] = sw.simulate(1, lambda channel: recorded(channel, plan_of(precision=PRECISIONS["bf16"])))
    assert [(call.operation, call.bytes_sent) for calls in steps for call in calls] == [("exchange", 0)] * 4


def test_a_skipped_update_is_counted_and_gathers_nothing() -> None:
    def run(channel: sw.Channel) -> None:
        watched = sw.Recorded(channel)
        engine = engine_of(watched, plan_of("dp_shard=2", precision=PRECISIONS["bf16"]))
        watched.clear()
        batch = points(0, 4)
        assert engine.step({**batch, "y": batch["y"] * torch.inf} if channel.rank else batch).skipped
        assert watched.bytes_sent("all_gather") == 0
        assert (engine.counters.skipped, engine.counters.updates, engine.counters.cast_elements) == (1, 0, 0)
        assert not engine.step(batch).skipped
        assert (engine.counters.skipped, engine.counters.updates) == (1, 1)

    sw.simulate(2, run)


@pytest.mark.parametrize(
    ("num_ranks", "stage", "k", "sharding", "precision"),
    covering([1, 2, 3], [0, 1], [1, 4], ["slice", "one bucket", "whole"], list(PRECISIONS), strength=2),
)
def test_memory_that_is_held_is_what_the_plan_says(
    num_ranks: int, stage: int, k: int, sharding: str, precision: str
) -> None:
    """All of it together: what AdamW keeps are two moments of what ranks own, and some numbers."""
    plan = plan_of(f"dp_shard={num_ranks}", stage, k, sharding=SHARDINGS[sharding], precision=PRECISIONS[precision])
    counted = counted_from_now()
    engines: dict[int, Any] = {}

    def run(channel: sw.Channel) -> Any:
        engines[channel.rank] = engine = engine_of(channel, plan)
        for seed in range(2):
            engine.step(points(seed, k))
        moments = [state["exp_avg"].numel() for state in engine.optimizer.state.values()]
        assert sum(moments) == engine.footprint().owned_elements
        assert all(parameter.grad is None for parameter in engine.model.parameters())
        return engine.footprint()

    planned = sw.simulate(num_ranks, run)
    buffers = sum(each.working_bytes + each.gradient_bytes + each.master_bytes for each in planned)
    moments = 2 * 4 * sum(each.owned_elements for each in planned)
    # And the state of a generator for each rank, which has 5,056 bytes.
    assert buffers + moments <= counted() <= buffers + moments + 5300 * num_ranks
    assert sum(each.owned_elements for each in planned) == NUM_ELEMENTS * (1 if stage else num_ranks)


def test_training_leaves_no_tensors_behind() -> None:
    engine = engine_of(sw.comm.alone(), plan_of(k=2, precision=PRECISIONS["bf16"]))
    batch = points(0, 4)
    engine.step(batch)
    before = tensor_bytes_alive()
    for _ in range(3):
        engine.step(batch)
        engine.evaluate(batch)
    assert tensor_bytes_alive() == before
