"""Bytes on a device: what rests and the peak of a step equal the footprint and activations; what a step allocates.

Activations are those of a plain loop in one process on a device like it, which lets every gradient go as it comes.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import accelerators
from shardwise.engine.forward import batch_digests
from shardwise.plan import Footprint
from shardwise.testing.accelerator import counted
from tests.engine.loops import mean_square
from tests.fake_device.words import fused

WIDTH, LAYERS, ROWS = 72, 12, 16
"""Matrices are so large that their gradients do not wait for others (`GradCopies`: 64 KiB in all)."""

DIGEST_BYTES = 8 * batch_digests.ROW
"""Of the keys with which ranks digest batches, where several have the same one."""

PAIRS = 4
"""Of modules along tp, in `pairs`."""

OTHER_DEVICE = 7
"""Of the plain loop."""


class Layer(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(input))


def model(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(layers)))


def pairs() -> nn.Sequential:
    """Linear modules by themselves, which tp cuts."""
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(2 * PAIRS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """The most that a call has allocated in addition to what is there before it."""
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    call()
    return torch.accelerator.max_memory_allocated(device) - before


def activations(fake: str, dtype: torch.dtype, *, num_stages: int = 1, stage: int = 0, num_alive: int = 1) -> int:
    """The peak of a stage's forwards of microbatches, and of their backwards then, in a plain loop."""
    device = torch.device(fake, OTHER_DEVICE)
    plain = model(LAYERS // num_stages).to(device, dtype)
    rows = torch.ones(ROWS, WIDTH, device=device)
    for parameter in plain.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))

    def run() -> None:
        # Inputs of a later stage have come from another rank; those of the first are the batch, or casts of it.
        outputs = [
            plain(rows.to(dtype, copy=True).requires_grad_() if stage else rows.to(dtype)) for _ in range(num_alive)
        ]
        while outputs:
            output = outputs.pop(0)
            if stage == num_stages - 1:
                mean_square(output).backward()
            else:
                output.backward(torch.ones_like(output))

    run()
    return peak_of(run, device)


def engine_of(channel: sw.Channel, plan: sw.Plan, made: Callable[[], nn.Module] = model) -> sw.Engine:
    return sw.parallelize(made(), plan, optimizer=fused, loss=mean_square, channel=channel)


def rest_and_peak(channel: sw.Channel, plan: sw.Plan) -> tuple[int, int, Footprint]:
    """Bytes on this rank's device between steps without the batch, the peak of a step, and the footprint."""
    gc.collect()
    before = torch.accelerator.memory_allocated(channel.device)  # of other tests in this process
    channel.exchange(b"", purpose="all have counted")
    engine = engine_of(channel, plan)
    batch = {"input": torch.ones(ROWS * plan.merge.microbatches, WIDTH, device=channel.device)}
    for _ in range(3):
        engine.step(batch)
    channel.exchange(b"", purpose="all rest")
    peak = peak_of(lambda: engine.step(batch), channel.device)
    rest = torch.accelerator.memory_allocated(channel.device) - before - batch["input"].nbytes
    return rest, peak, engine.footprint()


def plan_of(stage: int, k: int, compute: str, **axes: int) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(**axes),
        sharding=sw.Sharding(stage=stage, bucket_bytes=4 * WIDTH * WIDTH),
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute=compute),
    )


def at_rest(planned: Footprint) -> int:
    """Bytes of the buffers and of AdamW's two moments."""
    held = planned.working_bytes + planned.gradient_bytes + planned.master_bytes + planned.reducing_bytes
    return held + 8 * planned.owned_elements


def mostly_stress(chosen: Sequence[tuple[Any, ...]], *values: Sequence[Any]) -> list[Any]:
    """All choices of these values; those that are not chosen for `make stress`."""
    return [each if each in chosen else pytest.param(*each, marks=pytest.mark.stress) for each in product(*values)]


@pytest.mark.parametrize(
    ("stage", "k", "compute"),
    mostly_stress(
        [(0, 4, "bfloat16"), (1, 1, "float32"), (2, 4, "float32"), (3, 1, "bfloat16")],
        *((0, 1, 2, 3), (1, 4), ("float32", "bfloat16")),
    ),
)
def test_rest_and_peak_are_the_footprint_and_activations(fake: str, stage: int, k: int, compute: str) -> None:
    dtype = getattr(torch, compute)
    expected = activations(fake, dtype)
    ranks = sw.simulate(2, lambda channel: rest_and_peak(channel, plan_of(stage, k, compute, dp_shard=2)), device=fake)
    for rest, peak, planned in ranks:
        # Channels may have kept a bucket less, where those of two sizes take turns; a few numbers are on the device.
        assert at_rest(planned) - 4 * WIDTH * WIDTH < rest < at_rest(planned) + 1000
        assert rest + peak == pytest.approx(at_rest(planned) + planned.gathered_bytes + expected, rel=0.02)


@pytest.mark.parametrize(
    ("stage", "k", "compute"),
    [(1, 4, "bfloat16"), pytest.param(3, 1, "float32", marks=pytest.mark.stress)],
)
def test_stages_of_a_pipeline_hold_the_activations_of_their_microbatches(
    fake: str, stage: int, k: int, compute: str
) -> None:
    dtype = getattr(torch, compute)
    plan = plan_of(stage, k, compute, pp=2, dp_shard=2)
    for rank, (rest, peak, planned) in enumerate(
        sw.simulate(4, lambda channel: rest_and_peak(channel, plan), device=fake)
    ):
        at = rank // 2
        expected = activations(fake, dtype, num_stages=2, stage=at, num_alive=min(2 - at, k))
        # Buckets of biases take turns with those of matrices: less than two of the larger ones may be kept.
        assert 0.97 * at_rest(planned) < rest - DIGEST_BYTES < at_rest(planned) + 1000
        total = at_rest(planned) + DIGEST_BYTES + planned.gathered_bytes + expected
        # A message that the other rank has taken at once is not kept.
        message = ROWS * WIDTH * dtype.itemsize
        assert 0.98 * total - message < rest + peak < 1.02 * total


def allocations_of_a_step(channel: sw.Channel, plan: sw.Plan, made: Callable[[], nn.Module] = model) -> tuple[int, int]:
    """Those of a steady step on this rank's device, and how often it gathered."""
    engine = engine_of(channel, plan, made)
    batch = {"input": torch.ones(ROWS * plan.merge.microbatches, WIDTH, device=channel.device)}
    for _ in range(3):
        engine.step(batch)
    channel.exchange(b"", purpose="all rest")
    gathers = engine.counters.all_gathers
    with counted("allocation") as counts:
        engine.step(batch)
        channel.exchange(b"", purpose="all rest")
    return counts[channel.device.index].allocations, engine.counters.all_gathers - gathers


@cache
def allocations_of_forwards_and_backwards(
    fake: str, k: int, compute: str, made: Callable[[], nn.Module] = model
) -> int:
    """In a plain loop, the gradients of the first microbatch apart: they stay."""
    device, dtype = torch.device(fake, OTHER_DEVICE), getattr(torch, compute)
    plain = made().to(device, dtype)
    batch = torch.ones(ROWS * k, WIDTH, device=device)
    with counted() as counts:
        for part in batch.chunk(k):
            mean_square(plain(part.to(dtype))).backward()
    return counts[OTHER_DEVICE].allocations


@pytest.mark.parametrize(
    ("stage", "k", "compute", "clip"),
    mostly_stress(
        [(0, 1, "float32", None), (1, 4, "bfloat16", 1.0), (2, 1, "bfloat16", None), (3, 4, "float32", 1.0)],
        *((0, 1, 2, 3), (1, 4), ("float32", "bfloat16"), (None, 1.0)),
    ),
)
def test_a_steady_step_allocates_what_forwards_and_backwards_do(
    fake: str, stage: int, k: int, compute: str, clip: float | None
) -> None:
    """And a number for each norm, which torch puts nowhere else; under stage 3 gathered units, which autograd saves.

    Reductions, sums, figures, clip, optimizer and publications use memory again.
    """
    plain = allocations_of_forwards_and_backwards(fake, k, compute)
    plan = replace(plan_of(stage, k, compute, dp_shard=2), clip_grad_norm=clip)
    ranks = sw.simulate(2, lambda channel: allocations_of_a_step(channel, plan), device=fake)
    norms = sum(found - plain - (gathers if stage == 3 else 0) for found, gathers in ranks)
    # Each rank takes the norms of what it owns: of parts of all parameters, or of whole ones, of which one may be cut.
    assert norms - 2 * LAYERS * (2 if stage == 3 else 1) in (0, 1)
    assert plain > 6 * k * LAYERS


@pytest.mark.parametrize("k", [1, 4])
def test_a_steady_step_of_one_rank_allocates_what_forwards_and_backwards_do(fake: str, k: int) -> None:
    """And a number for the norm of each parameter, as torch's own clip does: its norm has the bits of that."""
    plan = plan_of(1, k, "float32")
    plain = allocations_of_forwards_and_backwards(fake, k, "float32")
    ((found, *_),) = sw.simulate(1, lambda channel: allocations_of_a_step(channel, plan), device=fake)
    assert found == plain + 2 * LAYERS


@pytest.mark.parametrize("axis", ["pp", "tp"])
def test_digests_of_a_batch_add_nothing_to_the_peak_of_a_step(axis: str, fake: str) -> None:
    """Whatever its size: rank 0 holds no more than two microbatches of it at a time."""

    rules = sw.Tensor(rules={"0": "column", "2": "row"} if axis == "tp" else None, prove=False)

    def run(channel: sw.Channel) -> list[int]:
        found = []
        for k in (4, 16):
            plan = sw.Plan(mesh=sw.Mesh.parse(f"{axis}=2"), merge=sw.Merge(microbatches=k), tensor=rules)
            made = (pairs if axis == "tp" else model)().to(channel.device)
            engine = sw.parallelize(made, plan, optimizer=fused, loss=mean_square, channel=channel)
            batch = {"input": torch.ones(128 * k, WIDTH, device=channel.device)}
            engine.step(batch)
            found.append(peak_of(lambda engine=engine, batch=batch: engine.step(batch), channel.device))  # type: ignore[misc]
        return found

    for few, many in sw.simulate(2, run, device=fake):
        assert many <= few + 8 * 16 * 64  # a few numbers for each microbatch


@pytest.mark.parametrize("of_module", [False, True])
def test_a_device_whose_allocator_keeps_no_statistics_trains_and_reports_none(
    of_module: bool, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mps before torch 2.13: there `torch.accelerator` has the functions, and each call of them raises."""

    def refuse(*_: object) -> None:
        raise RuntimeError("another text in every version")

    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", refuse)
    module = torch.get_device_module(fake)
    if of_module:
        monkeypatch.setattr(module, "max_memory_allocated", lambda device=None: 1 << 20)
    emptied: list[bool] = []
    monkeypatch.setattr(module, "empty_cache", lambda: emptied.append(True), raising=False)
    accelerators.peak_counter.cache_clear()

    def run(channel: sw.Channel) -> int:
        engine = sw.parallelize(model(1), sw.Plan(), optimizer=fused, loss=mean_square, channel=channel)
        engine.step({"input": torch.ones(2, WIDTH)})
        accelerators.empty_cache(channel.device)
        return accelerators.peak_memory(channel.device)

    try:
        assert sw.simulate(1, run, device=fake) == [of_module << 20]
    finally:
        accelerators.peak_counter.cache_clear()
    assert emptied
