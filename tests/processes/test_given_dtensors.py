"""Models that the user has made tensor parallel with torch's own means, trained as they come."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.comm.local_tensors import is_dtensor
from shardwise.errors import ModelError, PlanError
from tests.processes.pool import Pool


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6), nn.LayerNorm(6), nn.Linear(6, 4, bias=False))


def given(mesh: Any) -> nn.Module:
    """The model with its first block cut by torch; the rest stays as it is on every rank."""
    return parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def mean_square(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = (output - batch["y"]).square().mean()
    return loss


def batch_of(rank: int, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows = {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 4, generator=generator)}
    return {key: value.chunk(count)[rank] for key, value in rows.items()}


def trained(channel: Any, model: nn.Module, plan: sw.Plan) -> tuple[sw.Engine, list[tuple[float, float]]]:
    engine = sw.parallelize(
        model, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=0.05), loss=mean_square, channel=channel
    )
    batch = batch_of(plan.mesh.coordinates(channel.rank)["dp_shard"], plan.mesh.dp_shard)
    reports = [engine.step(batch) for _ in range(3)]
    return engine, [(report.loss, report.grad_norm) for report in reports]


def alone(plan: sw.Plan) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    def run(channel: sw.Channel) -> Any:
        engine, numbers = trained(channel, net(), plan)
        return {piece.name: tensor.clone() for piece, tensor in engine.state().items()}, numbers

    result: tuple[dict[str, torch.Tensor], list[tuple[float, float]]] = sw.simulate(1, run)[0]
    return result


def train_given(channel: Any, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2, tp=2), clip_grad_norm=0.5)
    model = given(mesh["tp"])
    engine, numbers = trained(channel, model, plan)
    kinds = {name: is_dtensor(parameter) for name, parameter in model.named_parameters()}
    pieces = {
        (piece.name, piece.offset, piece.shape, None if piece.run is None else tuple(piece.run))
        for piece in engine.state()
        if piece.name.startswith("0.weight")
    }
    sw.save(folder, engine, channel=channel)
    full = dict(sw.full(engine, channel=channel, optimizer=True))
    with pytest.raises(
        ModelError, match=r"4 parameters are DTensors, among them '0\.weight', and their modules expect"
    ):
        sw.relayout(engine, sw.Plan(mesh=sw.Mesh(dp_shard=4)))
    with pytest.raises(PlanError, match="leave the rules out"):
        trained(channel, given(mesh["tp"]), sw.Plan(mesh=plan.mesh, tensor=sw.Tensor(rules={"0": "column"})))
    with pytest.raises(ModelError, match="stage 3 frees parameters"):
        trained(channel, given(mesh["tp"]), sw.Plan(mesh=plan.mesh, sharding=sw.Sharding(stage=3)))
    with pytest.raises(ModelError, match=r"is on the ranks \[0, 1\], but those of this rank along tp are"):
        trained(channel, given(mesh["tp"]), sw.Plan(mesh=sw.Mesh(dp_replicate=2, dp_shard=2)))
    with pytest.raises(PlanError, match="no parameter is a DTensor"):
        trained(channel, net(), plan)
    return numbers, kinds, pieces, full


def test_a_model_of_dtensors_trains_as_it_comes_and_is_saved_in_portions(pool: Pool, tmp_path: Path) -> None:
    expected, numbers = alone(sw.Plan(clip_grad_norm=0.5))
    results = pool.run(4, train_given, tmp_path)
    held = set()
    for found, kinds, pieces, full in results:
        # Products are summed over two ranks, gradients over two more: float32 rounding, of values of order 1.
        assert np.array(found) == pytest.approx(np.array(numbers), rel=2e-6)
        assert kinds == {name: name[0] in "02" for name in kinds}
        assert full.keys() == expected.keys()
        for name, tensor in full.items():
            torch.testing.assert_close(tensor, expected[name], rtol=2e-4, atol=2e-6)
        held |= pieces
    # Ten rows over two ranks along tp: nobody gathers to save.
    assert {piece[1:3] for piece in held} == {((0, 0), (5, 6)), ((5, 0), (5, 6))}

    def resumed(channel: sw.Channel) -> dict[str, torch.Tensor]:
        engine = sw.parallelize(
            net(), sw.Plan(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.05), loss=mean_square, channel=channel
        )
        sw.load(tmp_path, engine, channel=channel)
        return {piece.name: tensor.clone() for piece, tensor in engine.state().items()}

    loaded = sw.simulate(1, resumed)[0]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in results[0][3].items())
