"""Bytes held and sent under stages 2 and 3: the formulas, the recorded channel and the allocator agree."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.silence import Silence
from shardwise.comm import Work
from shardwise.engine.zero.grad_buffers import GradBuffer
from shardwise.engine.zero.grad_reduce import GradReduce
from tests.engine.expected import adamw
from tests.engine.memory import counted_from_now, distinct_bytes, peak_bytes
from tests.engine.models import word_loss
from tests.engine.oracle import share_of
from tests.engine.sharded_nets import BATCHES, Net, plan_of
from tests.engine.stages import gathering_of


def engine_of(channel: Any, plan: sw.Plan, kind: str = "") -> sw.Engine:
    torch.manual_seed(0)
    return sw.parallelize(Net(kind), plan, optimizer=adamw, loss=word_loss, channel=channel)


def sent_by(recorded: sw.Recorded) -> dict[str, int]:
    """Bytes sent, by what they are of; without those of the model's buffers."""
    return {
        what: sum(
            call.bytes_sent for call in recorded.calls if call.operation != "exchange" and call.purpose.startswith(what)
        )
        for what in ("parameters", "gradients")
    }


UNITS = ("blocks.*", "blocks.*.attention")


@pytest.mark.parametrize(
    ("kind", "ranks", "k", "stage", "settings"),
    [
        ("", 2, 1, 2, {}),
        ("", 4, 2, 3, {"partition": "whole"}),
        ("", 2, 4, 3, {"keep_gathered": True}),
        ("", 3, 2, 3, {"units": UNITS}),
        ("tied", 2, 4, 3, {}),
        ("tied", 3, 4, 2, {"partition": "whole"}),
        ("tied", 4, 2, 3, {"keep_gathered": True}),
        ("tied", 2, 1, 3, {"units": UNITS}),
        ("twice", 3, 1, 3, {}),
        ("twice", 2, 2, 2, {"partition": "whole"}),
        ("twice", 2, 2, 3, {"keep_gathered": True}),
        ("twice", 2, 4, 3, {"units": UNITS}),
        ("frozen", 3, 4, 2, {}),
        ("frozen", 2, 1, 3, {"partition": "whole"}),
        ("frozen", 3, 1, 3, {"keep_gathered": True}),
        ("frozen", 2, 2, 3, {"units": UNITS}),
    ],
)
def test_bytes_sent_equal_the_plan(kind: str, ranks: int, k: int, stage: int, settings: dict[str, Any]) -> None:
    """Every kind of model under every setting and in both stages."""
    precision = sw.Precision(compute="bfloat16", keep=("*norm*",))
    plan = plan_of(stage, ranks=ranks, k=k, precision=precision, **settings)

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = engine_of(recorded, plan, kind)
        share = share_of(BATCHES[0], channel.rank, channel.size)
        for _ in range(2):  # and the second like the first
            recorded.clear()
            engine.step(share)
            assert sent_by(recorded) == {
                "parameters": engine.traffic().gather_bytes,
                "gradients": engine.traffic().reduce_bytes,
            }

    sw.simulate(ranks, run)


@pytest.mark.parametrize(("replicate", "shard"), [(2, 2)])
@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_sent_over_replicas_equal_the_plan(replicate: int, shard: int, stage: int) -> None:
    plan = plan_of(stage, mesh=sw.Mesh(dp_replicate=replicate, dp_shard=shard), owners="dp_shard", k=3)

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = engine_of(recorded, plan)
        recorded.clear()
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        assert sent_by(recorded) == {
            "parameters": engine.traffic().gather_bytes,
            "gradients": engine.traffic().reduce_bytes,
        }

    sw.simulate(4, run)


@pytest.mark.parametrize("k", [1, 3])
def test_a_unit_is_gathered_twice_per_microbatch_less_what_is_kept(k: int) -> None:
    """Five units one after the other, and the model's own parameters, which stay all the while."""

    def run(channel: sw.Channel, keeps: bool) -> int:
        plan = plan_of(3, k=k, keep_gathered=keeps, bucket_bytes=1 << 20)
        recorded = sw.Recorded(channel)
        engine = engine_of(recorded, plan)
        recorded.clear()
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        assert engine.counters.all_gathers == sum(call.operation == "all_gather" for call in recorded.calls)
        return sum(call.purpose.startswith("parameters of unit") for call in recorded.calls)

    assert sw.simulate(2, lambda channel: run(channel, False)) == [1 + 2 * 5 * k - k - (k - 1)] * 2
    assert sw.simulate(2, lambda channel: run(channel, True)) == [1 + 5] * 2


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_masters_are_cast_once_per_update(stage: int, k: int) -> None:
    plan = plan_of(stage, k=k, precision=sw.Precision(compute="bfloat16", keep=("*norm*",)))

    def run(channel: sw.Channel) -> int:
        engine = engine_of(channel, plan, "frozen")
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        return engine.counters.cast_elements

    cast = sum(
        parameter.numel()
        for name, parameter in Net("frozen").named_parameters()
        if parameter.requires_grad and "norm" not in name
    )
    assert sum(sw.simulate(2, run)) == cast


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_live_buffers_take_what_the_plan_says(stage: int, k: int) -> None:
    plan = plan_of(stage, k=k, precision=sw.Precision(compute="bfloat16", keep=("*norm*",)))

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan)
        gradients, buffers = engine._gradients, engine._buffers
        assert isinstance(gradients, GradReduce)
        give, in_use = gradients.buffers.give, []

        def counted(bucket: int) -> GradBuffer:
            taken.add(buffer := give(bucket))
            in_use.append(sum(each.num_to_land > 0 for each in taken))
            return buffer

        gradients.buffers.give = counted  # type: ignore[method-assign]
        for _ in range(2):
            taken: set[GradBuffer] = set()
            in_use.clear()  # the first update cannot know that a module is not used, and waits for it
            engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        planned = engine.footprint()
        parts = [bucket.part for bucket in buffers.buckets]
        masters = [bucket.master for bucket in buffers.buckets]
        whole = [bucket.working for bucket in buffers.buckets]
        aliased = sum(
            part.nbytes for part, master in zip(parts, masters, strict=True) if part.data_ptr() == master.data_ptr()
        )
        # Runs that are cut follow each other in one memory, with padding between them.
        assert distinct_bytes(parts if stage == 3 else whole) == planned.working_bytes
        assert sum(master.nbytes for master in masters) - aliased == planned.master_bytes
        assert distinct_bytes([each.total for each in gradients._after]) == planned.gradient_bytes
        # More than two while the last gradients come: those of the model itself and of the embedding, in both dtypes.
        assert 2 <= max(in_use) <= 4
        assert distinct_bytes([*gradients.buffers.free, gradients.buffers.scratch_memory]) == planned.reducing_bytes

    sw.simulate(2, run)


def test_a_bucket_that_is_alone_has_one_buffer() -> None:
    """It is on its way from one microbatch when the next one fills it."""

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(2, k=4, bucket_bytes=1 << 20))
        gradients = engine._gradients
        assert isinstance(gradients, GradReduce)
        assert len(gradients._after) == 1
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        assert (
            distinct_bytes([*gradients.buffers.free, gradients.buffers.scratch_memory])
            == engine.footprint().reducing_bytes
        )

    sw.simulate(2, run)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_most_that_is_gathered_is_what_the_plan_says(keeps: bool) -> None:
    def run(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(16, 8), nn.Linear(8, 16, bias=False), nn.Linear(16, 16, bias=False)
        )  # without padding
        engine = sw.parallelize(
            model, plan_of(3, k=2, keep_gathered=keeps), optimizer=adamw, loss=word_loss, channel=channel
        )
        gathering = gathering_of(engine)
        fill = gathering._fill
        held = []

        def measured(unit: Any) -> None:
            fill(unit)
            held.append(distinct_bytes([bucket.working for bucket in engine._buffers.buckets]))

        gathering._fill = measured  # type: ignore[method-assign]
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        units = [4 * 16 * 8, 4 * 8 * 16, 4 * 16 * 16]
        assert max(held) == (sum(units) if keeps else max(units))  # one at a time, where nothing is gathered ahead
        assert engine.footprint().gathered_bytes == (sum(units) if keeps else units[1] + units[2])

    sw.simulate(2, run)


class Zeros(Silence):
    """`Silence` that gathers zeros, and what the rank has itself."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        given = counts or [output.numel() // self.size] * self.size
        for rank, part in enumerate(output.view(-1).split(list(given))):
            part.copy_(input.view(-1)) if rank == self.rank else part.zero_()
        return super().all_gather(output, torch.zeros(0), purpose=purpose, counts=[0] * self.size)


def peak_of_microbatches(engine: sw.Engine, batch: dict[str, torch.Tensor]) -> int:
    """The most that forwards and backwards of the second step allocate."""
    train = engine._computation.train
    peaks = []

    def measured(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        peaks.append(peak_bytes(lambda: results.append(train(*args, **kwargs))))
        return results[0]

    engine._computation.train = measured  # type: ignore[method-assign]
    for _ in range(2):
        assert not engine.step(batch).skipped
    return peaks[-1]


@pytest.mark.parametrize("k", [1, 2])
def test_the_peak_of_stage_3_is_what_rests_two_units_and_a_bucket(k: int) -> None:
    """Bytes alive between steps, and the most that forwards and backwards allocate.

    Activations, scratch of kernels and the gradient of one matrix come on top: less than a unit, of 24.
    """
    width, layers = 128, 24
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=3),
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute="bfloat16"),
    )
    bytes_alive = counted_from_now()
    engine = sw.parallelize(
        nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(layers))),
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        loss=lambda output, _: output.float().square().mean(),
        channel=Zeros(rank=0, size=2, progresses_alone=False),
    )
    peak = peak_of_microbatches(engine, {"input": torch.ones(k, width)})
    num_elements = layers * 2 * (width * width + width)
    unit_bytes = 2 * num_elements // layers
    at_rest = (2 + 12 + 4) * num_elements // 2
    expected = at_rest + 2 * unit_bytes + unit_bytes  # a unit is one bucket
    assert bytes_alive() + peak == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("k", "bucket_bytes"), [(4, 1 << 30), (4, 200_000), (1, 1 << 30)])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_rests_and_is_taken_in_a_step_is_the_footprint(stage: int, k: int, bucket_bytes: int) -> None:
    """Also where all parameters are one bucket, which a microbatch fills while that of the last one travels."""
    width, layers = 128, 4
    sharding = sw.Sharding(stage=stage, bucket_bytes=bucket_bytes, units=None if stage == 2 else (".",))
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sharding, merge=sw.Merge(microbatches=k))
    bytes_alive = counted_from_now()
    engine = sw.parallelize(
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        loss=lambda output, _: output.square().mean(),
        channel=Zeros(rank=0, size=2, progresses_alone=False),
    )
    peak = peak_of_microbatches(engine, {"input": torch.ones(k, width)})
    planned = engine.footprint()
    expected = planned.working_bytes + planned.gradient_bytes + planned.reducing_bytes + 8 * planned.owned_elements
    assert bytes_alive() == pytest.approx(expected, abs=4000)
    # Gradients of two matrices, where one makes room for the other only when it is there, and activations.
    assert peak <= planned.gathered_bytes + 2.2 * 4 * width * width
