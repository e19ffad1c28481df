"""Who saves and who loads: shardwise, plain files, and the peers."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import shardwise as sw
from benchmarks.checkpoint import peers
from benchmarks.checkpoint.states import Held, Layout, State, World, locals_of
from shardwise.checkpoint import Store
from shardwise.comm.local_tensors import bytes_of

__all__ = ["LOADERS", "SAVERS", "Loader", "Saver"]

# A side is given the layout that it names, and only loaders that count at the store are given a store.
Save = Callable[[World, Path, Any], object]
Load = Callable[[World, Any, Any], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Saver:
    """One way to save."""

    name: str
    about: str
    layout: Layout
    """In which the state is held."""
    save: Save
    rare: bool = False
    """Beside the question: measured with small states and few ranks only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """One way to load."""

    name: str
    about: str
    saved_by: str
    load: Load
    reads: Literal["store", "kernel", "mapped"] = "kernel"
    """Where the bytes that it reads can be counted."""


def _save_ours(world: World, path: Path, state: Held, *, layout: Literal["pieces", "whole"] = "pieces") -> None:
    sw.save(path, state, layout=layout, channel=world.channel)


def _load_ours(world: World, path: Path | Store, state: Held, *, verify: bool) -> None:
    sw.load(path, state, verify=verify, channel=world.channel)


def _save_ours_default(world: World, path: Path, state: Held) -> None:
    sw.save(path, state)


def _load_ours_default(world: World, path: Path | Store, state: Held, *, verify: bool = True) -> None:
    sw.load(path, state, verify=verify)


def _file(world: World, path: Path) -> Path:
    return path / f"rank{world.rank}"


def _save_plain(world: World, path: Path, state: State) -> None:
    descriptor = os.open(_file(world, path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    for tensor in locals_of(state):
        left = bytes_of(tensor.view(-1).view(torch.uint8))
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)
    os.close(descriptor)


def _load_plain(world: World, path: Path, state: State) -> None:
    descriptor = os.open(_file(world, path), os.O_RDONLY)
    for tensor in locals_of(state):
        left = bytes_of(tensor.view(-1).view(torch.uint8))
        while left:
            left = left[os.readv(descriptor, [left]) :]
    os.close(descriptor)


def _save_torch(world: World, path: Path, state: State) -> None:
    with _file(world, path).open("wb") as stream:
        torch.save(dict(zip(state, locals_of(state), strict=True)), stream)
        os.fsync(stream.fileno())


def _load_torch(world: World, path: Path, state: State) -> None:
    saved = torch.load(_file(world, path), weights_only=True)
    for name, tensor in zip(state, locals_of(state), strict=True):
        tensor.copy_(saved[name])


_SAVERS = [
    Saver(name="ours", about="`sw.save` of DTensors, one channel for all saves", layout="rows", save=_save_ours),
    Saver(name="ours-slices", about="`sw.save` of pieces: runs of flat buffers", layout="slices", save=_save_ours),
    Saver(
        name="ours-default",
        about="`sw.save` without a channel: every call connects the ranks anew",
        layout="rows",
        save=_save_ours_default,
        rare=True,
    ),
    Saver(
        name="ours-whole",
        about='`sw.save(layout="whole")`: every tensor whole in one file',
        layout="rows",
        save=partial(_save_ours, layout="whole"),
        rare=True,
    ),
    Saver(
        name="plain", about="`write` of each tensor into a file per rank, and `fsync`", layout="rows", save=_save_plain
    ),
    Saver(name="dcp", about="`dcp.save` of DTensors; `sync_files` is its default", layout="rows", save=peers.save_dcp),
    Saver(
        name="dcp-flat",
        about="`dcp.save` of the flat buffers as 1-d DTensors: DCP stores boxes, and knows no runs of n-d tensors",
        layout="flat",
        save=peers.save_dcp,
    ),
    Saver(name="hf", about="`HuggingFaceStorageWriter(save_distributed=True)`", layout="rows", save=peers.save_hf),
    Saver(
        name="hf-consolidated",
        about="the same with `enable_consolidation=True`; the consolidated file is not synced",
        layout="rows",
        save=partial(peers.save_hf, consolidated=True),
        rare=True,
    ),
    Saver(name="torch.save", about="`torch.save` of the local tensors, `fsync` added", layout="rows", save=_save_torch),
]
_TC_SAVER = Saver(
    name="torch_checkpointing",
    about="`CheckpointManager.save`, synchronous, without O_DIRECT and without a resharder, `fsync` added",
    layout="rows",
    save=peers.save_torch_checkpointing,
    rare=True,
)
_LOADERS = [
    Loader(
        name="ours",
        about="`sw.load` with one channel for all loads, every byte verified",
        saved_by="ours",
        load=partial(_load_ours, verify=True),
        reads="store",
    ),
    Loader(
        name="ours-default",
        about="`sw.load` without a channel: every call connects the ranks anew; verified",
        saved_by="ours",
        load=_load_ours_default,
        reads="store",
    ),
    Loader(
        name="ours-default-unverified",
        about="`sw.load(verify=False)` without a channel",
        saved_by="ours",
        load=partial(_load_ours_default, verify=False),
        reads="store",
    ),
    Loader(
        name="ours-of-hf-unverified",
        about="`sw.load(verify=False)` without a channel of what the peer saved in safetensors",
        saved_by="hf",
        load=partial(_load_ours_default, verify=False),
        reads="store",
    ),
    Loader(
        name="ours-unverified",
        about="`sw.load(verify=False)`",
        saved_by="ours",
        load=partial(_load_ours, verify=False),
        reads="store",
    ),
    Loader(
        name="ours-slices",
        about="`sw.load` of saved runs, verified",
        saved_by="ours-slices",
        load=partial(_load_ours, verify=True),
        reads="store",
    ),
    Loader(
        name="ours-slices-unverified",
        about="`sw.load(verify=False)` of saved runs",
        saved_by="ours-slices",
        load=partial(_load_ours, verify=False),
        reads="store",
    ),
    Loader(
        name="ours-slices-default",
        about="`sw.load` of saved runs without a channel, verified",
        saved_by="ours-slices",
        load=_load_ours_default,
        reads="store",
    ),
    Loader(
        name="ours-slices-default-unverified",
        about="`sw.load(verify=False)` of saved runs without a channel",
        saved_by="ours-slices",
        load=partial(_load_ours_default, verify=False),
        reads="store",
    ),
    Loader(
        name="ours-whole",
        about="`sw.load` of whole tensors, verified",
        saved_by="ours-whole",
        load=partial(_load_ours, verify=True),
        reads="store",
    ),
    Loader(name="plain", about="`readv` into each tensor", saved_by="plain", load=_load_plain),
    Loader(name="dcp", about="`dcp.load`", saved_by="dcp", load=peers.load_dcp),
    Loader(name="dcp-flat", about="`dcp.load` of flat buffers", saved_by="dcp-flat", load=peers.load_dcp),
    Loader(
        name="dcp-flat-cut",
        about="`dcp.load` of the whole flat buffers by every rank into memory that is there, and cutting its boxes out",
        saved_by="dcp-flat",
        load=peers.load_dcp_and_cut,
    ),
    Loader(name="hf", about="`HuggingFaceStorageReader`", saved_by="hf", load=peers.load_hf, reads="mapped"),
    Loader(
        name="hf-consolidated",
        about="`HuggingFaceStorageReader` of the consolidated file",
        saved_by="hf-consolidated",
        load=peers.load_hf,
        reads="mapped",
    ),
    Loader(name="torch.load", about="`torch.load` and a copy into the target", saved_by="torch.save", load=_load_torch),
]
_TC_LOADER = Loader(
    name="torch_checkpointing",
    about="`CheckpointManager.load` (mapped files)",
    saved_by="torch_checkpointing",
    load=peers.load_torch_checkpointing,
    reads="mapped",
)

SAVERS = {each.name: each for each in [*_SAVERS, *([_TC_SAVER] if peers.HAS_TORCH_CHECKPOINTING else [])]}
LOADERS = {each.name: each for each in [*_LOADERS, *([_TC_LOADER] if peers.HAS_TORCH_CHECKPOINTING else [])]}
