"""Buffers that a forward writes, resizes, brings or takes away, as observers of quantisation-aware training do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError
from tests.engine.formed import formed, linear
from tests.engine.loops import begun, mean_square, rows, share
from tests.engine.loops import plan_of as short_plan_of
from tests.oracle.places import data_share
from tests.oracle.program import adamw, plan_of
from tests.oracle.programs import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:.*reduce_range")


@pytest.mark.parametrize(
    ("name", "mesh", "stage"),
    [
        *[("observed", "single", 1), ("observed", "dp_shard=2", 3), ("quantised while it trains", "dp_shard=2", 1)],
        *[("quantised while it trains", "pp=2", 1), ("quantised while it trains", "dp_shard=2", 3)],
    ],
)
def test_they_come_out_of_a_save_and_their_memory_can_always_be_resized(
    name: str, mesh: str, stage: int, tmp_path: Path
) -> None:
    """A load into a module that has not run asks for its shapes, unless its buffers have them from the beginning."""
    program = PROGRAMS[name]
    plan = plan_of(program, mesh, stage=stage)

    def run(channel: sw.Channel) -> None:
        engine, other = (program.engine(plan, channel) for _ in range(2))
        first, second = (data_share(each, plan.mesh, channel.rank) for each in program.batches)
        engine.step(first)
        sw.save(tmp_path, engine)
        if name == "observed":
            with pytest.raises(CheckpointError, match=r"largest: shape \[0\] in the target, \[8\] in"):
                sw.load(tmp_path, other)
        other.step(second)
        sw.load(tmp_path, other)
        assert other.step(second).loss == engine.step(second).loss
        states = [sw.full_state_dict(each, rank0_only=False) for each in (engine, other)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
        buffers = [each for each in other.model.buffers() if not each.is_meta]
        assert all(each.untyped_storage().resizable() for each in buffers)

    sw.simulate(plan.mesh.size, run)


class Changing(nn.Module):
    """Buffers whose shape, dtype and presence depend on the rows of a rank."""

    rows: torch.Tensor
    kind: torch.Tensor
    late: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 2)
        self.register_buffer("rows", torch.zeros(0, 4))
        self.register_buffer("kind", torch.zeros(2))
        self.register_buffer("late", torch.zeros(1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.rows.resize_(len(input), 4).copy_(input)
            self.kind = torch.full((2,), len(input), dtype=torch.int64 if len(input) % 2 else torch.complex64)
            self.late = None if len(input) % 2 else torch.full((len(input),), True)
        y: torch.Tensor = self.map(input)
        return y


@pytest.mark.parametrize("mesh", [sw.Mesh(dp_shard=3), sw.Mesh(dp_shard=3, pp=2)], ids=str)
def test_ranks_that_have_other_shapes_take_those_of_data_rank_zero(mesh: sw.Mesh) -> None:
    pipeline = sw.Pipeline(stages={"0": 0, "1": 1}) if mesh.pp > 1 else sw.Pipeline()

    def run(channel: sw.Channel) -> list[dict[str, torch.Tensor]]:
        make = lambda: nn.Sequential(Changing(), nn.Linear(2, 2))  # noqa: E731
        engine: Any = begun(channel, make, sw.Plan(mesh=mesh, pipeline=pipeline), optimizer=adamw, loss=mean_square)
        found = []
        for count in range(6, 10):  # 6 and 9 rows go up evenly
            engine.step(share(engine, {"input": torch.arange(4.0 * count).view(count, 4)}))
            found.append({name: each.clone() for name, each in engine.model.named_buffers() if not each.is_meta})
        return found

    first, *others = sw.simulate(mesh.size, run)
    assert {"0.late" in each for each in first} == {True, False}
    for each in (each for each in others if each[0]):
        for got, expected in zip(each, first, strict=True):
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[name], expected[name]) for name in got)


def in_place(net: Any, x: torch.Tensor) -> Any:
    net.mean.mul_(0.9).add_(x.detach().mean(0))
    net.seen.add_(len(x))
    return net.map(x)


def replaced(net: Any, x: torch.Tensor) -> Any:
    net.seen = net.seen + len(x)
    return net.map(x)


def unchanged(net: Any, x: torch.Tensor) -> Any:
    return net.map(x)


def put_buffers(net: Any) -> None:
    net.register_buffer("mean", torch.zeros(4))
    net.register_buffer("seen", torch.tensor(0))
    net.also_mean = nn.Module()
    net.also_mean.register_buffer("mean", net.mean)


@pytest.mark.parametrize(("write", "num_bytes"), [(unchanged, []), (in_place, [4 * 4 + 8] * 2), (replaced, [8] * 2)])
def test_only_buffers_that_changed_are_sent_in_one_call_per_update(write: Any, num_bytes: list[int]) -> None:
    def run(channel: sw.Channel) -> list[int]:
        recorded = sw.Recorded(channel)
        engine = begun(recorded, formed(write, put_buffers, map=linear(4, 1)), short_plan_of("dp_shard=2"))
        for seed in range(2):
            engine.step(rows(seed + channel.rank))
        return [call.bytes_sent for call in recorded.calls if call.purpose == "buffers of the model"]

    assert sw.simulate(2, run)[0] == num_bytes
