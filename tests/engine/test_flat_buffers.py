"""Flat buffers: values that come later find their place, and what follows each other in memory is one run."""

from collections.abc import Iterator
from itertools import chain
from typing import Literal

import pytest
import torch

import shardwise as sw
from shardwise.engine.zero.flat_params import runs_of
from shardwise.plan import Bucket, Segment
from tests.engine.expected import adamw


def test_values_are_written_without_looking_through_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of n parameters comes with n writes: each looks its place up."""
    asked: list[str] = []
    segments = Bucket.segments

    def counted(bucket: Bucket, owner: int) -> Iterator[Segment]:
        asked.append(bucket.slots[0].name)
        return segments(bucket, owner)

    def run(channel: sw.Channel) -> list[torch.Tensor]:
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(8)))
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(bucket_bytes=32), precision=sw.Precision(compute="bfloat16")
        )
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=None, channel=channel)
        channel.exchange(b"", purpose="both are built")
        monkeypatch.setattr(Bucket, "segments", counted)
        buffers = engine._buffers
        for at, (name, parameter) in enumerate(model.named_parameters()):
            assert buffers.write(name, torch.full(parameter.shape, at + 0.5))
            assert parameter.flatten().tolist() == [at + 0.5] * parameter.numel()
        assert not buffers.write("another", torch.zeros(1))
        channel.exchange(b"", purpose="both have written")
        return [bucket.master for bucket in buffers.buckets]

    masters = sw.simulate(2, run)
    assert asked == []
    written = torch.cat([part for pair in zip(*masters, strict=True) for part in pair])
    assert written.sum() == sum((at + 0.5) * (2 if at % 2 else 4) for at in range(16))


@pytest.mark.parametrize("partition", ["slice", "whole"])
@pytest.mark.parametrize("which", ["all", "some"])
def test_runs_have_the_elements_that_count_and_no_padding(partition: Literal["slice", "whole"], which: str) -> None:
    def run(channel: sw.Channel) -> int:
        model = torch.nn.Sequential(*(torch.nn.Linear(16, size) for size in (16, 16, 5, 16, 16)))
        sharding = sw.Sharding(bucket_bytes=3000, partition=partition)
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=3), sharding=sharding)
        buffers = sw.parallelize(model, plan, optimizer=adamw, loss=None, channel=channel)._buffers

        def counts(name: str) -> bool:
            return which == "all" or "bias" in name

        places = {each.segment.name: each for each in buffers.owned}
        bucket_of = {slot.name: at for at, bucket in enumerate(buffers.ownership.buckets) for slot in bucket.slots}

        def elements(name: str, num_elements: int) -> list[tuple[int, int]]:
            start = places[name].segment.start
            return [(bucket_of[name], start + at) for at in range(num_elements)]

        found = runs_of(buffers.owned, buffers.ownership, counts=counts)
        fewer = 0
        for whether in (True, False):
            runs = [elements(name, size) for name, size, counted in found if counted == whether]
            owned = [(name, each.segment.run.num_elements) for name, each in places.items() if counts(name) == whether]
            wanted = [elements(*each) for each in owned]
            assert sorted(chain(*runs)) == sorted(chain(*wanted))
            ends = {(each[-1][0], each[-1][1] + 1) for each in runs}
            assert ends.isdisjoint(each[0] for each in runs), "two runs that are one"
            fewer += sum(map(bool, wanted)) - len(runs)
        return fewer

    assert any(sw.simulate(3, run)) or which == "some"
