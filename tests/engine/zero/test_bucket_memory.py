"""Bytes that rest and that a step takes under stages 2 and 3: the footprint, and what the allocator saw."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.silence import Silence
from shardwise.comm import Work
from tests.engine.memory import counted_from_now, peak_bytes


class Zeros(Silence):
    """`Silence` that gathers zeros, and what the rank has itself."""

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        given = counts or [output.numel() // self.size] * self.size
        for rank, part in enumerate(output.view(-1).split(list(given))):
            part.copy_(input.view(-1)) if rank == self.rank else part.zero_()
        return super().all_gather(output, torch.zeros(0), purpose=purpose, counts=[0] * self.size)


def engine_of(model: nn.Module, plan: sw.Plan) -> sw.Engine:
    return sw.parallelize(
        model,
        plan,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        loss=lambda output, _: output.float().square().mean(),
        channel=Zeros(rank=0, size=2, progresses_alone=False),
    )


def peak_of_microbatches(engine: sw.Engine, batch: dict[str, torch.Tensor]) -> int:
    """The most that forwards and backwards of the second step allocate."""
    # A private name: the scratch of the norm, later in the step, is larger than these models.
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
    blocks = (nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(layers))
    engine = engine_of(nn.Sequential(*blocks), plan)
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
    engine = engine_of(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))), plan)
    peak = peak_of_microbatches(engine, {"input": torch.ones(k, width)})
    planned = engine.footprint()
    expected = planned.working_bytes + planned.gradient_bytes + planned.reducing_bytes + 8 * planned.owned_elements
    assert bytes_alive() == pytest.approx(expected, abs=4000)
    # Gradients of two matrices, where one makes room for the other only when it is there, and activations.
    assert peak <= planned.gathered_bytes + 2.2 * 4 * width * width
