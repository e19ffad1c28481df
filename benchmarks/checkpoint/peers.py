"""How the peers save and load, as their documentation says, with `fsync` where it is not their default."""

import importlib
import importlib.util
import os
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint.states import GROUPS, Held, State, World, local, part

HAS_TORCH_CHECKPOINTING = importlib.util.find_spec("torch_checkpointing") is not None


def save_dcp(world: World, path: Path, state: State) -> None:
    """As it comes: a FileSystemWriter, whose `sync_files` is True."""
    save(dict(state), checkpoint_id=path)


def begin_save_dcp(path: Path, state: Held, group: dist.ProcessGroup) -> "Future[Any]":
    """As it comes: in a thread, from a copy of the state. The thread needs a group that nobody else uses meanwhile."""
    begun = async_save({str(name): tensor for name, tensor in state.items()}, checkpoint_id=path, process_group=group)
    assert isinstance(begun, Future)
    return begun


def load_dcp(world: World, path: Path, state: State) -> None:
    """In place."""
    load(dict(state), checkpoint_id=path)


def load_dcp_and_cut(world: World, path: Path, state: State) -> None:
    """Each rank loads whole flat buffers, as DCP cannot be told which boxes lie in them, and takes what it holds."""
    for group in GROUPS:
        mine = {name: tensor for name, tensor in state.items() if name.startswith(f"{group}.")}
        buffer = torch.empty(sum(tensor.numel() for tensor in mine.values()))
        load({group: buffer}, checkpoint_id=path)
        start = 0
        for tensor in mine.values():
            assert isinstance(tensor, DTensor)
            dim = tensor.placements[0].dim  # type: ignore[attr-defined]
            held = part(tensor.shape[dim], world.rank, world.size)
            whole = buffer[start : start + tensor.numel()].view(tensor.shape)
            local(tensor).copy_(whole.narrow(dim, held.start, len(held)))
            start += tensor.numel()


def save_hf(world: World, path: Path, state: State, *, consolidated: bool = False) -> None:
    """Every rank its shards, as safetensors; `consolidated`: then rank 0 puts them together in one more file."""
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=consolidated)
    save(dict(state), storage_writer=writer)


def load_hf(world: World, path: Path, state: State) -> None:
    """In place, out of mapped files."""
    load(dict(state), storage_reader=HuggingFaceStorageReader(str(path)))


def save_torch_checkpointing(world: World, path: Path, state: State) -> None:
    """Every rank its file; then, because the library does not, `fsync` of that file."""
    _manager().save(str(path / "saved"), {"state": dict(state)})
    dist.barrier()  # rank 0 may rename the folder after the others have returned
    descriptor = os.open(path / "saved" / f"state_{world.rank}.pt", os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_torch_checkpointing(world: World, path: Path, state: State) -> None:
    """In place, out of mapped files."""
    _manager().load(str(path / "saved"), into={"state": dict(state)}, strict=True)


@cache
def _manager() -> Any:
    """One for the process: the barriers of a second one would meet the keys of the first in the group's store.

    Synchronous, as its asynchronous staging wants CUDA; without O_DIRECT, which ext4 refuses for its writes.

    No resharder either: with one, `save` gathers metadata over ranks in tensors with device="cuda".
    """
    library = importlib.import_module("torch_checkpointing")
    files = importlib.import_module("torch_checkpointing.storage.filesystem")
    return library.CheckpointManager(
        library.CheckpointManager.Config(
            save=library.SyncCheckpointSaverConfig(),
            storage_config=files.LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
