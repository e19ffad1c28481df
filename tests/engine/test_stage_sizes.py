"""Bytes held and sent under stages 2 and 3: the formulas, the recorded channel and the allocator agree."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.comm import Work
from shardwise.engine.zero.grad_per_microbatch import GradBuffer, GradPerMicrobatch
from tests.engine.models import word_loss
from tests.engine.oracle import share_of
from tests.engine.test_footprint import tensor_bytes_alive
from tests.engine.test_peak import Silent
from tests.engine.test_stages import BATCHES, Net, adamw, gathering_of, plan_of


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


@pytest.mark.parametrize(
    ("ranks", "k", "stage", "settings"),
    [
        (2, 1, 2, {}),
        (3, 4, 2, {"partition": "whole"}),
        (2, 1, 3, {}),
        (2, 4, 3, {}),
        (4, 2, 3, {"keep_gathered": True}),
        (8, 2, 3, {"partition": "whole"}),
        (3, 2, 3, {"units": ("blocks.*", "blocks.*.attention")}),
    ],
)
@pytest.mark.parametrize("kind", ["", "tied", "twice", "frozen"])
def test_bytes_sent_equal_the_plan(ranks: int, k: int, stage: int, settings: dict[str, Any], kind: str) -> None:
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


def bytes_of(tensors: list[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_live_buffers_take_what_the_plan_says(stage: int, k: int) -> None:
    plan = plan_of(stage, k=k, precision=sw.Precision(compute="bfloat16", keep=("*norm*",)))

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan)
        gradients, buffers = engine._gradients, engine._buffers
        assert isinstance(gradients, GradPerMicrobatch)
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
        working = sum(part.nbytes for part in parts) if stage == 3 else bytes_of(whole)
        assert working == planned.working_bytes
        assert sum(master.nbytes for master in masters) - aliased == planned.master_bytes
        assert bytes_of(gradients._runs) == planned.gradient_bytes
        # More than two while the last gradients come: those of the model itself and of the embedding, in both dtypes.
        assert 2 <= max(in_use) <= 4
        assert bytes_of([*gradients.buffers.free, gradients._scratch]) == planned.reducing_bytes

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
            held.append(bytes_of([bucket.working for bucket in engine._buffers.buckets]))

        gathering._fill = measured  # type: ignore[method-assign]
        engine.step(share_of(BATCHES[0], channel.rank, channel.size))
        units = [4 * 16 * 8, 4 * 8 * 16, 4 * 16 * 16]
        assert max(held) == (sum(units) if keeps else max(units))  # one at a time, where nothing is gathered ahead
        assert engine.footprint().gathered_bytes == (sum(units) if keeps else units[1] + units[2])

    sw.simulate(2, run)


class Zeros(Silent):
    """`Silent` that gathers zeros."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        output.zero_()
        return self.Done()


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
    alive_before = tensor_bytes_alive()
    engine = sw.parallelize(
        nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(layers))),
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        loss=lambda output, _: output.float().square().mean(),
        channel=Zeros(),
    )
    train = engine._computation.train
    peaks = []

    def measured(*args: Any, **kwargs: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = train(*args, **kwargs)
        held = peak = 0
        for event in seen.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        peaks.append(peak)
        return result

    engine._computation.train = measured  # type: ignore[method-assign]
    batch = {"input": torch.ones(k, width)}
    for _ in range(2):
        assert not engine.step(batch).skipped
    num_elements = layers * 2 * (width * width + width)
    unit_bytes = 2 * num_elements // layers
    at_rest = (2 + 12 + 4) * num_elements // 2
    expected = at_rest + 2 * unit_bytes + unit_bytes  # a unit is one bucket
    assert tensor_bytes_alive() - alive_before + peaks[-1] == pytest.approx(expected, rel=0.03)
