"""What torch.distributed.checkpoint wrote from several processes becomes a save of ours and Hugging Face files."""

from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from shardwise import checkpoint
from shardwise.checkpoint import convert, diff
from shardwise.comm import Channel
from tests.checkpoint.small_states import same
from tests.processes.pool import Pool

PLACED: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate(), "uneven": Shard(0)}


def whole() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(5)
    shapes = {"rows": (6, 5), "columns": (3, 8), "replicas": (4,), "uneven": (7, 2), "plain": (2, 3)}
    return {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}


def save_sharded(channel: Channel, path: Path) -> None:
    mesh = init_device_mesh("cpu", (channel.size,))
    state = whole()
    held = {name: distribute_tensor(state[name], mesh, [placement]) for name, placement in PLACED.items()}
    save({**held, "plain": state["plain"], "step": 12}, storage_writer=FileSystemWriter(path))
    dist.barrier()


def test_a_checkpoint_of_two_processes_of_torch_becomes_ours_and_hugging_faces(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_sharded, tmp_path / "dcp", poisons=True)
    convert(tmp_path / "dcp", tmp_path / "pieces", to="pieces")
    convert(tmp_path / "dcp", tmp_path / "whole", to="whole")
    convert(tmp_path / "pieces", tmp_path / "hf", to="hf")
    for name in ("pieces", "whole"):
        target = {key: torch.zeros_like(tensor) for key, tensor in whole().items()}
        assert checkpoint.load(tmp_path / name, target) == {"objects": {"step": 12}}
        assert same(target, whole())
        assert diff(tmp_path / "dcp", tmp_path / name).equal
        assert checkpoint.verify(tmp_path / name).good
    pieces = checkpoint.open(tmp_path / "pieces").contents
    assert len(pieces.file_sizes) == 2
    assert {str(each.piece) for each in pieces.tensors["columns"].pieces} == {"columns[0:3, 0:4]", "columns[0:3, 4:8]"}
    assert same(safetensors.torch.load_file(tmp_path / "hf/model.safetensors"), whole())
