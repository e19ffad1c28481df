"""Buffers that a forward resizes, brings or takes away: per-channel observers of quantisation-aware training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

import shardwise as sw
from shardwise.errors import CheckpointError
from tests.engine.expected import adamw
from tests.engine.oracle import share_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:.*reduce_range")

PLANS = {
    "one rank": sw.Plan(),
    "two data ranks": sw.Plan(mesh=sw.Mesh(dp_shard=2)),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "checkpoint": sw.Plan(activations=sw.Activations(checkpoint=("0",))),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"0": 0, "2": 1})),
}


class Observed(nn.Module):
    """An observer of one's own: its buffer is empty until the first forward."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.qconfig = get_default_qat_qconfig(qconfig)
    prepared: nn.Module = prepare_qat(model.train())
    return prepared


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"input": torch.randn(8, 4), "y": torch.randn(8, 2)}


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch["y"])


def plain(model: nn.Module, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = adamw(list(model.parameters()))
    losses = []
    for seed in range(steps):
        batch = batch_of(seed)
        value = loss(model(batch["input"]), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("qconfig", ["fbgemm", "qnnpack"])
def test_quantisation_aware_training_has_the_bits_of_one_process_also_after_a_load(
    plan: str, qconfig: str, tmp_path: Path
) -> None:
    made = PLANS[plan]

    def run(channel: sw.Channel, *, loads: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        engine = sw.parallelize(quantised(qconfig), made, optimizer=adamw, loss=loss, channel=channel)
        if loads:
            sw.load(tmp_path, engine)
        # All data ranks get all rows, so that the model has the statistics of one process.
        losses = [engine.step(batch_of(seed)).loss for seed in ((2, 3) if loads else (0, 1))]
        if not loads:
            sw.save(tmp_path, engine)
        return losses, sw.full_state_dict(engine)

    losses, state = plain(quantised(qconfig), 4)
    (begun, _), *_ = sw.simulate(made.mesh.size, lambda channel: run(channel, loads=False))
    (ended, got), *_ = sw.simulate(made.mesh.size, lambda channel: run(channel, loads=True))
    assert begun + ended == losses
    for name, each in got.items():
        assert torch.equal(each, state[name]), name


@pytest.mark.parametrize(
    ("mesh", "rules"), [(sw.Mesh(dp_shard=2), {}), (sw.Mesh(tp=2), {"map": "colwise_gather_output"})]
)
def test_an_observer_of_ones_own_is_right_and_its_memory_can_always_be_resized(
    mesh: sw.Mesh, rules: dict[str, str], tmp_path: Path
) -> None:
    def run(channel: sw.Channel) -> tuple[list[float], torch.Tensor]:
        model = Observed()
        plan = sw.Plan(mesh=mesh, tensor=sw.Tensor(rules=rules))
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=loss, channel=channel)
        losses = []
        for seed in range(3):
            losses.append(engine.step(batch_of(seed)).loss)
            sw.save(tmp_path, engine)
            sw.full_state_dict(engine)
            with engine.whole():
                pass
            assert model.largest.untyped_storage().resizable()
        sw.load(tmp_path, engine)
        assert model.largest.untyped_storage().resizable()
        return losses, model.largest.clone()

    losses, state = plain(Observed(), 3)
    for got, largest in sw.simulate(2, run):
        assert got == pytest.approx(losses, rel=1e-6)  # tp adds partial sums in another order
        assert torch.allclose(largest, state["largest"])


def test_a_plain_module_keeps_its_shapes_in_a_load(tmp_path: Path) -> None:
    """As `load_state_dict` does, which asks the module: only one that resizes its buffers takes another shape."""

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(Observed(), sw.Plan(), optimizer=adamw, loss=loss, channel=channel)
        engine.step(batch_of(0))
        sw.save(tmp_path, engine)
        with pytest.raises(CheckpointError, match=r"largest: shape \[0\] in the target, \[8\] in"):
            sw.load(tmp_path, sw.parallelize(Observed(), sw.Plan(), optimizer=adamw, loss=loss, channel=channel))

    sw.simulate(1, run)


class Changing(nn.Module):
    """Buffers whose shape, dtype and presence depend on the rows of a rank."""

    rows: torch.Tensor
    kind: torch.Tensor
    late: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
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
        model = nn.Sequential(Changing(), nn.Linear(2, 2))
        plan = sw.Plan(mesh=mesh, pipeline=pipeline)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=loss, channel=channel)
        found = []
        for seed in range(4):
            num_rows = 6 + seed  # 6 and 9 rows go up evenly
            batch = {name: torch.cat([each, each])[:num_rows] for name, each in batch_of(seed).items()}
            engine.step(share_of(batch, mesh.data_rank(channel.rank), 3))
            found.append({name: each.clone() for name, each in model.named_buffers() if not each.is_meta})
        return found

    first, *others = sw.simulate(mesh.size, run)
    assert {"0.late" in each for each in first} == {True, False}
    for each in (each for each in others if each[0]):
        for got, expected in zip(each, first, strict=True):
            assert got.keys() == expected.keys()
            assert all(torch.equal(got[name], expected[name]) for name in got)
