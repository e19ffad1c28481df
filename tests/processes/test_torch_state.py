"""FSDP2 and DDP models with their optimizers are states by name: they train on from each other's values to the bit."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.checkpoint import TorchState
from shardwise.comm import Channel
from shardwise.space import Piece, check_cover
from tests.processes.pool import Pool


class Net(nn.Module):
    """Rows that two ranks do not divide, a parameter that only one of them has, a tie, a count of calls."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)
        self.again = nn.Linear(4, 5)
        self.again.weight = self.up.weight
        self.down = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1.0
        y: torch.Tensor = self.down(torch.tanh(self.up(x)) + self.again(x))
        return y.square().sum() * self.scale.sum()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def build(how: str, *, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if how == "fsdp2":
        fully_shard(model)
    elif how == "ddp":
        model = DistributedDataParallel(model)
    return model


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for at in numbers:
        optimizer.zero_grad()
        loss = model(torch.arange(8.0).view(2, 4) / (8 + at))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saved(state: TorchState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor whole, from what all ranks have, which covers it once but for replicas."""
    everyone: list[dict[Piece, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {piece: tensor.clone() for piece, tensor in state.state().items()})
    pieces = {piece: tensor for each in everyone for piece, tensor in each.items()}
    assert check_cover(pieces) == []
    tensors: dict[str, torch.Tensor] = {}
    for piece, tensor in pieces.items():
        whole = tensors.setdefault(piece.name, torch.zeros(piece.global_shape, dtype=tensor.dtype))
        whole[piece.box.slices()] = tensor
    return tensors, json.loads(json.dumps(state.settings()))


def load(state: TorchState, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> list[str]:
    """The names that were wanted."""
    stored = {
        name: Piece(name=name, dtype=str(each.dtype).removeprefix("torch."), global_shape=tuple(each.shape))
        for name, each in tensors.items()
    }
    restoration = state.restore(stored, settings)
    assert list(restoration.findings) == []
    for piece, target in restoration.wanted.items():
        target.copy_(tensors[piece.name][piece.box.slices()])
    restoration.finish()
    return sorted({piece.name for piece in restoration.wanted})


def round_trip(channel: Channel, source: str, target: str) -> dict[str, Any]:
    model = build(source, seed=0)
    optimizer = adamw(model)
    steps(model, optimizer, range(2))
    tensors, settings = saved(TorchState(model, optimizer))
    other = build(target, seed=1)
    its_optimizer = adamw(other)
    wanted = load(TorchState(other, its_optimizer), tensors, settings)
    for parameter in its_optimizer.param_groups[0]["params"]:
        state = its_optimizer.state[parameter]
        assert type(state["exp_avg"]) is type(parameter.data)
        assert type(state["step"]) is torch.Tensor
    again, its_settings = saved(TorchState(other, its_optimizer))
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert its_settings == settings
    losses = steps(model, optimizer, range(2, 4)), steps(other, its_optimizer, range(2, 4))
    return {"names": sorted(tensors), "wanted": wanted, "ties": settings["ties"], "losses": losses}


def test_models_under_fsdp2_and_ddp_take_over_each_others_state(pool: Pool) -> None:
    names = None
    for source, target in (("fsdp2", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "fsdp2"), ("ddp", "ddp")):
        results = pool.run(2, round_trip, source, target)
        names = names or results[0]["names"]
        for result in results:
            assert result["names"] == names
            assert result["ties"] == {"again.weight": "up.weight"}
            went_on, resumed = result["losses"]
            assert source != target or went_on == resumed
        assert set(results[0]["wanted"]) | set(results[1]["wanted"]) == set(names)


def full_of_dtensors(channel: Channel) -> bool:
    plain, cut = (build(how, seed=0).state_dict() for how in ("plain", "fsdp2"))
    full = dict(sw.full(cut, channel=channel))
    return full.keys() == plain.keys() and all(torch.equal(full[name], value) for name, value in plain.items())


def test_dtensors_of_fsdp2_are_given_as_whole_tensors(pool: Pool) -> None:
    assert pool.run(2, full_of_dtensors) == [True, True]
