"""What travels and what is cast, counted: bytes equal the plan's, once per update whatever is merged."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import RecordedCall
from shardwise.engine.reports import Counters
from tests.covering import covering
from tests.engine.expected import adamw, points, seeded, square_loss

WIDTHS = (4, 40, 9, 30, 1)
NUM_ELEMENTS = sum((one + 1) * two for one, two in pairwise(WIDTHS))


class Tower(nn.Module):
    """Four layers; the third may be kept in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(one, two) for one, two in pairwise(WIDTHS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float()


class Run:
    """Some updates on one rank, and what was recorded."""

    def __init__(self, channel: sw.Channel, plan: sw.Plan, *, steps: int = 2) -> None:
        recorded = sw.Recorded(channel)
        self.engine = sw.parallelize(seeded(Tower)(), plan, optimizer=adamw, loss=square_loss, channel=recorded)
        recorded.clear()
        self.calls: list[list[RecordedCall]] = []
        for seed in range(steps):
            self.engine.step(points(seed, plan.merge.microbatches))
            self.calls.append(list(recorded.calls))
            recorded.clear()
        self.num_buckets = len(self.engine._buffers.ownership.buckets)

    def bytes_sent(self, step: int) -> dict[str, int]:
        """Bytes per operation in one step."""
        sent: dict[str, int] = {}
        for call in self.calls[step]:
            sent[call.operation] = sent.get(call.operation, 0) + call.bytes_sent
        return sent


SHARDINGS = {
    "slice": sw.Sharding(bucket_bytes=500),
    "slice-one-bucket": sw.Sharding(),
    "whole": sw.Sharding(bucket_bytes=500, partition="whole"),
    "stage0": sw.Sharding(bucket_bytes=500, stage=0),
}
PRECISIONS = {
    "fp32": sw.Precision(),
    "bf16": sw.Precision(compute="bfloat16"),
    "bf16-kept": sw.Precision(compute="bfloat16", keep=("layers.2",)),
    "bf16-narrow": sw.Precision(compute="bfloat16", accumulate="bfloat16"),
    "fp32-sent-bf16": sw.Precision(reduce="bfloat16"),
}


def assert_bytes_equal_the_plan(plan: sw.Plan) -> None:
    def run(channel: sw.Channel) -> None:
        found = Run(channel, plan, steps=1)
        planned = found.engine.traffic()
        for calls in found.calls:
            gathered = [call for call in calls if call.operation == "all_gather" and call.purpose[:10] == "parameters"]
            reduced = [call for call in calls if call.purpose[:9] == "gradients"]
            assert sum(call.bytes_sent for call in gathered) == planned.gather_bytes
            assert sum(call.bytes_sent for call in reduced) == planned.reduce_bytes
            rest = [call for call in calls if call not in gathered and call not in reduced]
            assert all(call.operation == "exchange" for call in rest)
            assert len(rest) == 2

    sw.simulate(plan.mesh.size, run)


@pytest.mark.parametrize(
    ("num_ranks", "k", "sharding", "precision"),
    covering((2, 3, 4, 8), (1, 4), list(SHARDINGS), list(PRECISIONS), strength=2),
)
def test_bytes_sent_equal_the_plan(num_ranks: int, k: int, sharding: str, precision: str) -> None:
    assert_bytes_equal_the_plan(
        sw.Plan(
            mesh=sw.Mesh(dp_shard=num_ranks),
            sharding=SHARDINGS[sharding],
            precision=PRECISIONS[precision],
            merge=sw.Merge(microbatches=k),
        )
    )


@pytest.mark.parametrize(
    ("mesh", "owners", "partition", "k", "precision"),
    covering(
        ("dp_replicate=2,dp_shard=2", "dp_replicate=2,dp_shard=3", "dp_replicate=3"),
        ("all", "dp_shard"),
        ("slice", "whole"),
        (1, 4),
        ("fp32", "bf16-kept", "fp32-sent-bf16"),
    ),
)
def test_bytes_sent_over_replicas_equal_the_plan(
    mesh: str, owners: str, partition: str, k: int, precision: str
) -> None:
    assert_bytes_equal_the_plan(
        sw.Plan(
            mesh=sw.Mesh.parse(mesh),
            sharding=sw.Sharding(bucket_bytes=500, owners=owners, partition=partition),  # type: ignore[arg-type]
            precision=PRECISIONS[precision],
            merge=sw.Merge(microbatches=k),
        )
    )


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("precision", "k", "bytes_of_gradient", "bytes_of_copy"),
    [("fp32", 1, 4, 4), ("fp32", 4, 4, 4), ("bf16", 1, 2, 2), ("bf16", 4, 4, 2), ("bf16-narrow", 4, 2, 2)],
)
def test_bytes_sent_are_those_of_the_formula(
    num_ranks: int, precision: str, k: int, bytes_of_gradient: int, bytes_of_copy: int
) -> None:
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=num_ranks), precision=PRECISIONS[precision], merge=sw.Merge(microbatches=k))
    for found in sw.simulate(num_ranks, lambda channel: Run(channel, plan)):
        sent = found.bytes_sent(1)
        formula = (num_ranks - 1) * NUM_ELEMENTS / num_ranks
        padding = 8 * 16 + 16 * num_ranks  # slots and parts start at multiples of 16 elements
        assert formula * bytes_of_gradient <= sent["reduce_scatter"] <= (formula + padding) * bytes_of_gradient
        assert formula * bytes_of_copy <= sent["all_gather"] <= (formula + padding) * bytes_of_copy


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("bucket_bytes", [1, 500, 1 << 20])
def test_an_update_is_one_reduction_and_one_gathering_per_bucket_whatever_is_merged(k: int, bucket_bytes: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=3), sharding=sw.Sharding(bucket_bytes=bucket_bytes), merge=sw.Merge(microbatches=k)
    )
    for found in sw.simulate(3, lambda channel: Run(channel, plan)):
        assert found.num_buckets == {1: 8, 500: 6, 1 << 20: 1}[bucket_bytes]
        for calls in found.calls:
            operations = [call.operation for call in calls]
            assert operations.count("reduce_scatter") == operations.count("all_gather") == found.num_buckets
            assert operations.count("exchange") == 2
            assert len(operations) == 2 * found.num_buckets + 2


def test_the_bytes_of_a_step_do_not_depend_on_how_much_is_merged() -> None:
    sent = []
    for k in (2, 7):
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), merge=sw.Merge(microbatches=k), precision=PRECISIONS["bf16"])
        found = sw.simulate(2, partial(Run, plan=plan))
        sent.append([{key: run.bytes_sent(1)[key] for key in ("reduce_scatter", "all_gather")} for run in found])
    assert sent[0] == sent[1]


def test_the_number_of_microbatches_of_a_step_decides_its_bytes() -> None:
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=PRECISIONS["bf16"])

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = sw.parallelize(seeded(Tower)(), plan, optimizer=adamw, loss=square_loss, channel=recorded)
        for k in (1, 4, 1, 2):
            recorded.clear()
            engine.step(points(0, 8), microbatches=k)
            assert recorded.bytes_sent("reduce_scatter") == engine.traffic(microbatches=k).reduce_bytes
        assert engine.traffic(microbatches=4).reduce_bytes == 2 * engine.traffic().reduce_bytes

    sw.simulate(2, run)


def counters_of(plan: sw.Plan, *, steps: int = 3) -> list[Counters]:
    return [found.engine.counters for found in sw.simulate(plan.mesh.size, lambda ch: Run(ch, plan, steps=steps))]


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("partition", ["slice", "whole"])
def test_every_owned_element_is_cast_once_per_update(k: int, partition: str) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=3),
        sharding=sw.Sharding(bucket_bytes=500, partition=partition),  # type: ignore[arg-type]
        merge=sw.Merge(microbatches=k),
        precision=PRECISIONS["bf16-kept"],
    )
    kept = (9 + 1) * 30
    found = counters_of(plan)
    assert sum(counters.cast_elements for counters in found) == 3 * (NUM_ELEMENTS - kept)
    assert all(counters.updates == 3 for counters in found)


def test_nothing_is_cast_where_masters_are_the_working_copies() -> None:
    assert [each.cast_elements for each in counters_of(sw.Plan(mesh=sw.Mesh(dp_shard=2)))] == [0, 0]


def test_the_counters_count_the_calls_that_were_made() -> None:
    plan = sw.Plan(mesh=sw.Mesh(dp_replicate=2, dp_shard=2), sharding=sw.Sharding(owners="dp_shard", bucket_bytes=500))

    def run(channel: sw.Channel) -> None:
        found = Run(channel, plan, steps=3)
        operations = [call.operation for calls in found.calls for call in calls]
        counters = found.engine.counters
        assert counters.reduce_scatters == operations.count("reduce_scatter") > 0
        assert counters.all_gathers == operations.count("all_gather") > 0
        assert counters.exchanges == operations.count("exchange") > 0

    sw.simulate(4, run)


def test_one_rank_sends_nothing() -> None:
    (found,) = sw.simulate(1, lambda channel: Run(channel, sw.Plan(precision=PRECISIONS["bf16"])))
    assert [call.operation for call in found.calls[0]] == ["exchange", "exchange"]
    assert set(found.bytes_sent(0).values()) == {0}


def not_finite(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "y": batch["y"] * torch.inf}


def test_a_skipped_update_is_counted_and_gathers_nothing() -> None:
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=PRECISIONS["bf16"])

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = sw.parallelize(seeded(Tower)(), plan, optimizer=adamw, loss=square_loss, channel=recorded)
        recorded.clear()
        batch = points(0, 4)
        assert engine.step(not_finite(batch) if channel.rank else batch).skipped
        assert recorded.bytes_sent("all_gather") == 0
        assert (engine.counters.skipped, engine.counters.updates, engine.counters.cast_elements) == (1, 0, 0)
        assert not engine.step(batch).skipped
        assert (engine.counters.skipped, engine.counters.updates) == (1, 1)

    sw.simulate(2, run)
