"""Pieces of the DTensors that FSDP2 and tensor parallel make in real processes."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.comm import Channel
from shardwise.comm.local_tensors import is_dtensor, local_pieces
from shardwise.space import Piece, check_cover
from tests.contracts.format_cases import check_tensors
from tests.processes.pool import Pool


class Net(torch.nn.Module):
    """Rows that no world size divides, a parameter with fewer rows than ranks, a scalar-like one."""

    def __init__(self, hidden: int, out: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, hidden)
        self.down = torch.nn.Linear(hidden, out)
        self.scale = torch.nn.Parameter(torch.full((1, 3), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return y.sum() * self.scale.sum()


def checked(name: str, tensor: torch.Tensor) -> list[Piece]:
    """The pieces of this rank, once their values are those of the whole tensor."""
    assert is_dtensor(tensor)
    full = tensor.full_tensor()
    held = local_pieces(name, tensor)
    for piece, part in held:
        assert torch.equal(part, full[piece.box.slices()])
    return [piece for piece, _ in held]


def trained(model: Net) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(8.0).view(2, 4) / 8).backward()
    optimizer.step()
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state |= {f"optimizer/{name}/{key}": value for key, value in optimizer.state[parameter].items() if value.ndim}
    return state


def pieces_of_all(model: Net) -> tuple[list[Piece], str]:
    """The distinct pieces of all ranks, and the placements in words."""
    state = trained(model)
    mine = [piece for name, tensor in state.items() for piece in checked(name, tensor)]
    everyone: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    placements = {name: tensor.placements for name, tensor in state.items() if isinstance(tensor, DTensor)}
    return list(dict.fromkeys(piece for each in everyone for piece in each)), str(placements)


def saved_by_dcp(channel: Channel, folder: str) -> dict[str, object]:
    """Save FSDP2's own state dicts, read what was saved, and compare every value with the whole tensors."""
    torch.manual_seed(0)
    model = Net(hidden=5, out=3)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(8.0).view(2, 4) / 8).backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_model_state_dict(model) | get_optimizer_state_dict(model, optimizer, options=options)
    state["everywhere"] = torch.arange(3.0)
    save(dict(state), checkpoint_id=folder)
    contents = sw.checkpoint.open(folder).contents
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    whole = {name: value.full_tensor() if is_dtensor(value) else value for name, value in tensors.items()}
    check_tensors(Path(folder), whole)
    assert any(len(stored.pieces) == 2 for stored in contents.tensors.values())
    assert len(contents.file_sizes) == 2
    plain = {name: value for name, value in state.items() if name not in tensors}
    assert contents.extra["objects"] == json.loads(json.dumps(plain))
    return {name: list(tensor.shape) for name, tensor in whole.items()}


def under_fsdp2_over_tensor_parallel(channel: Channel) -> tuple[list[Piece], str]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(hidden=12, out=3)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return pieces_of_all(model)


def full_of_dtensors(channel: Channel) -> bool:
    """Whether they are given as whole tensors, with the values of before."""
    torch.manual_seed(0)
    model = Net(hidden=5, out=3)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model)
    full = dict(sw.full(model.state_dict(), channel=channel))
    return full.keys() == plain.keys() and all(torch.equal(full[name], value) for name, value in plain.items())


def test_dtensors_of_fsdp2_are_given_as_whole_tensors(pool: Pool) -> None:
    assert pool.run(2, full_of_dtensors) == [True, True]


def test_what_dcp_saves_of_fsdp2_is_read_exactly(pool: Pool, tmp_path: Path) -> None:
    for shapes in pool.run(2, saved_by_dcp, str(tmp_path / "saved")):
        assert {"up.weight", "everywhere", "state.down.bias.exp_avg", "state.scale.step"} <= shapes.keys()
        assert shapes["state.up.weight.exp_avg_sq"] == [5, 4]


def test_the_ranks_of_fsdp2_over_tensor_parallel_hold_every_element_once(pool: Pool) -> None:
    for pieces, placements in pool.run(4, under_fsdp2_over_tensor_parallel):
        assert "_StridedShard" in placements
        assert check_cover(pieces) == []
        assert sum(piece.num_elements for piece in pieces) == 3 * sum(
            each.numel() for each in Net(hidden=12, out=3).parameters()
        )
