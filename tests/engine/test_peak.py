"""What a step allocates beside the buffers of the formula: at most one bucket, whatever travels in which dtype."""

import gc
from typing import Literal

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.silence import Silence
from tests.engine.channels import SilentDevice
from tests.engine.memory import peak_bytes

WIDTH, LAYERS = 64, 8
BUCKET_BYTES = 2 * WIDTH * WIDTH * 4


def reduce_and_publish(engine: sw.Engine) -> None:
    with torch.no_grad():
        engine._gradients.reduce()
        engine._buffers.publish(engine.counters)


def engine_over(channel: sw.Channel, *, compute: str, reduce: str, k: int, sums: str = "exact") -> sw.Engine:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=channel.size),
        sharding=sw.Sharding(bucket_bytes=BUCKET_BYTES),
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute=compute, reduce=reduce, sums=sums),  # type: ignore[arg-type]
    )
    return sw.parallelize(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda output, _: output.float().square().mean(),
        channel=channel,
    )


def peak_of_reduction(engine: sw.Engine, k: int) -> int:
    """Of the second step; the first has taken the arena."""
    engine.step({"input": torch.ones(4, WIDTH)})
    engine._gradients.begin(k)
    return peak_bytes(lambda: reduce_and_publish(engine))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_step_needs_at_most_one_bucket_beside_its_buffers(compute: str, reduce: str, k: int) -> None:
    engine = engine_over(Silence(rank=0, size=2, progresses_alone=False), compute=compute, reduce=reduce, k=k)
    peak, planned = peak_of_reduction(engine, k), engine.footprint().reducing_bytes
    assert planned <= BUCKET_BYTES
    assert planned <= peak <= planned + 1000
    # The narrower copy is the only one that is made.
    assert (planned > 0) == (reduce == "bfloat16" and (compute == "float32" or k > 1))


@pytest.mark.parametrize("sums", ["exact", "backend"])
@pytest.mark.parametrize(("reduce", "k"), [("float32", 1), ("float32", 4), ("bfloat16", 4)])
@pytest.mark.parametrize("size", [2, 3])
def test_what_devices_receive_is_that_of_two_buckets_at_most(size: int, reduce: str, k: int, sums: str) -> None:
    channel = SilentDevice(rank=0, size=size)
    engine = engine_over(channel, compute="bfloat16", reduce=reduce, k=k, sums=sums)
    bucket = engine._buffers.buckets[0].plan
    itemsize = 2 if k == 1 or reduce == "bfloat16" else 4  # of what travels
    is_copied = itemsize == 2 and k > 1
    own = bucket.counts[0] * itemsize
    sum_of_backend = own if itemsize == 2 else 0
    held = (size - 1) * own if sums == "exact" else sum_of_backend
    copied = bucket.num_elements * 2 if is_copied else 0
    assert engine.footprint().reducing_bytes == copied + (1 if is_copied else 2) * held
    # On the CPU, and on no accelerator, torch widens a whole term before it adds it.
    widened = 4 * bucket.counts[0] if sums == "exact" and itemsize == 2 else 0
    # What was received is in memory that the first step took.
    assert peak_of_reduction(engine, k) == pytest.approx(copied + widened, abs=1000)
    assert sum(map(len, channel.memory._free)) == (1 if is_copied else 2) * held


def test_the_measurement_sees_an_allocation() -> None:
    assert peak_bytes(lambda: torch.zeros(1000).shape) == 4000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_of_the_cpu_is_cut_before_it_moves_to_a_device(fake: str, stage: Literal[0, 1, 2, 3]) -> None:
    def put(channel: sw.Channel) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        gc.collect()
        torch.accelerator.reset_peak_memory_stats(channel.device)
        before = torch.accelerator.memory_allocated(channel.device)
        engine = sw.parallelize(
            model,
            sw.Plan(
                mesh=sw.Mesh(dp_shard=channel.size),
                sharding=sw.Sharding(stage=stage, bucket_bytes=2 * WIDTH * WIDTH * 4),
                precision=sw.Precision(compute="bfloat16"),
            ),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=lambda output, _: output.float().square().mean(),
            channel=channel,
        )
        held = engine.footprint()
        peak = torch.accelerator.max_memory_allocated(channel.device) - before
        return peak, held.working_bytes + held.master_bytes + held.gathered_bytes

    sw.simulate(2, put, device=fake)  # the trials of an optimizer take half a MiB, once for its settings
    for peak, held in sw.simulate(2, put, device=fake):
        assert 0 < peak <= held + 4  # and a 1 for the arithmetic of figures
