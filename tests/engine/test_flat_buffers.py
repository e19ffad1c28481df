"""Flat buffers: values that come later find their place."""

from collections.abc import Iterator

import pytest
import torch

import shardwise as sw
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
