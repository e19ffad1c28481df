"""Buffers that a forward resizes, brings or takes away: per-channel observers of quantisation-aware training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

import shardwise as sw
from shardwise.errors import CheckpointError
from tests.engine.loops import share
from tests.engine.tower import DATA, on_ranks
from tests.oracle.one_process import train_in_one_process
from tests.oracle.program import adamw, seeded

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:.*reduce_range")


class Observed(nn.Module):
    """An observer of one's own: its buffer is empty until the first forward."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 8)
        self.out = nn.Linear(8, 2)
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        h = self.map(input)
        with torch.no_grad():
            if not self.largest.numel():
                self.largest.resize_(8).zero_()
            self.largest.copy_(torch.maximum(self.largest, h.abs().amax(0)))
        y: torch.Tensor = self.out(h / (1 + self.largest))
        return y


def quantised(qconfig: str) -> nn.Module:
    if qconfig == "own":
        return seeded(Observed)()
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))()
    model.qconfig = get_default_qat_qconfig(qconfig)
    prepared: nn.Module = prepare_qat(model.train())
    return prepared


def batch_of(seed: int, rows: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, width, generator=generator) for name, width in (("input", 4), ("y", 2))}


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch["y"])


PLANS = {
    "one rank": sw.Plan(),
    "two data ranks": sw.Plan(mesh=DATA),
    "stage 3": sw.Plan(mesh=DATA, sharding=sw.Sharding(stage=3)),
    "checkpoint": sw.Plan(activations=sw.Activations(checkpoint=("0",))),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"0": 0, "2": 1})),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"map": "colwise_gather_output"})),
}
CASES = [(name, qconfig) for name in PLANS for qconfig in ("fbgemm", "qnnpack") if name != "tp"]


@pytest.mark.parametrize(("name", "qconfig"), [*CASES, ("one rank", "own"), ("two data ranks", "own"), ("tp", "own")])
def test_observers_have_the_bits_of_one_process_also_after_a_load(name: str, qconfig: str, tmp_path: Path) -> None:
    """Their memory can always be resized; a load into a plain module that has not run asks for its shapes."""

    def run(channel: sw.Channel, *, loads: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = sw.parallelize(quantised(qconfig), PLANS[name], optimizer=adamw, loss=loss, channel=channel)
        if loads and qconfig == "own":
            with pytest.raises(CheckpointError, match=r"largest: shape \[0\] in the target, \[8\] in"):
                sw.load(tmp_path, engine)
            engine.step(batch_of(9))
        if loads:
            sw.load(tmp_path, engine)
        # All data ranks get all rows, so that the model has the statistics of one process.
        losses = [engine.step(batch_of(seed)).loss for seed in ((2, 3) if loads else (0, 1))]
        if not loads:
            sw.save(tmp_path, engine)
        state = sw.full_state_dict(engine)
        with engine.whole():
            pass
        assert all(each.untyped_storage().resizable() for each in engine.model.buffers() if not each.is_meta)
        return losses, state

    model = quantised(qconfig)
    batches = [batch_of(seed) for seed in range(4)]
    losses = train_in_one_process(model, adamw(list(model.parameters())), batches, loss=loss).losses
    (begun, _), *_ = on_ranks(PLANS[name], lambda channel: run(channel, loads=False))
    (ended, got), *_ = on_ranks(PLANS[name], lambda channel: run(channel, loads=True))
    # tp adds partial sums in another order.
    assert begun + ended == (pytest.approx(losses, rel=1e-6) if name == "tp" else losses)
    for key, each in got.items():
        torch.testing.assert_close(each, model.state_dict()[key], rtol=0, atol=1e-5 if name == "tp" else 0)


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
            self.kind = self.kind.to(torch.int64 if len(input) % 2 else torch.float64) + 1
            self.late = None if len(input) % 2 else torch.full((len(input),), 3.0)
        y: torch.Tensor = self.map(input)
        return y


@pytest.mark.parametrize("mesh", [sw.Mesh(dp_shard=3), sw.Mesh(dp_replicate=3), sw.Mesh(dp_shard=3, pp=2)])
def test_ranks_that_have_other_shapes_take_those_of_data_rank_zero(mesh: sw.Mesh) -> None:
    pipeline = sw.Pipeline(stages={"0": 0, "1": 1}) if mesh.pp > 1 else sw.Pipeline()

    def run(channel: sw.Channel) -> list[dict[str, torch.Tensor]]:
        model = seeded(lambda: nn.Sequential(Changing(), nn.Linear(2, 2)))()
        plan = sw.Plan(mesh=mesh, pipeline=pipeline)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=loss, channel=channel)
        found = []
        for seed in range(4):
            engine.step(share(engine, batch_of(seed, 6 + seed)))  # 6 and 9 rows go up evenly
            found.append({name: each.clone() for name, each in model.named_buffers() if not each.is_meta})
        return found

    first, *others = sw.simulate(mesh.size, run)
    assert {"0.late" in each for each in first} == {True, False}
    for each in (each for each in others if each[0]):
        for got, expected in zip(each, first, strict=True):
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[name], expected[name]) for name in got)
