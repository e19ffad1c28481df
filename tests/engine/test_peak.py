"""What a step allocates beside the buffers of the formula: at most one bucket, whatever travels in which dtype."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.comm import Channel, Work, alone

WIDTH, LAYERS = 64, 8


class Silent:
    """Rank 0 of two that never hears of the other: its collectives cost no memory, so what is seen is the engine's."""

    rank, size, device, progresses_alone = 0, 2, torch.device("cpu"), False

    class Done:
        def wait(self) -> None:
            pass

    def over(self, ranks: Sequence[int]) -> Channel:
        return alone() if len(ranks) == 1 else self

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        return None

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        return [value] * 2

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        return self.Done()

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        output.copy_(input[: len(output)])
        return self.Done()

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        raise AssertionError(purpose)

    receive = send

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        pass


def peak_bytes(engine: sw.Engine) -> int:
    """The most that is allocated at one time by the reduction and the publication of a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, torch.no_grad():
        engine._gradients.reduce()
        engine._buffers.publish(engine.counters)
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_step_needs_at_most_one_bucket_beside_its_buffers(compute: str, reduce: str, k: int) -> None:
    bucket_bytes = 2 * WIDTH * WIDTH * 4
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(bucket_bytes=bucket_bytes),
        merge=sw.Merge(microbatches=k),
        precision=sw.Precision(compute=compute, reduce=reduce),
    )
    engine = sw.parallelize(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))),
        plan,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda output, _: output.float().square().mean(),
        channel=Silent(),
    )
    engine.step({"input": torch.ones(4, WIDTH)})
    engine._gradients.begin(k)
    wire_is_narrower = reduce == "bfloat16" and (compute == "float32" or k > 1)
    peak = peak_bytes(engine)
    assert peak <= bucket_bytes
    assert (peak > 1000) == wire_is_narrower  # the narrower copy is the only one that is made


def test_the_measurement_sees_an_allocation() -> None:
    class Wasteful:
        def reduce(self) -> None:
            torch.zeros(1000)

        def publish(self, _: object) -> None:
            pass

    class Engine:
        _gradients = _buffers = Wasteful()
        counters = None

    assert peak_bytes(Engine()) == 4000  # type: ignore[arg-type]
