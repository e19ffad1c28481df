"""Tensors cut into the pieces of several ranks, the save that they make of them, and its tensors as they are read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.space import Piece
from tests.checkpoint.small_states import share_of_state

Tensors = Mapping[str, torch.Tensor]
Cut = Literal["rows", "columns", "runs"]
Pieces = dict[Piece, torch.Tensor]


def save_pieces(path: Path, shares: Sequence[Pieces], **arguments: Any) -> None:
    """A save by as many ranks as there are shares."""
    sw.simulate(len(shares), lambda channel: sw.save(path, shares[channel.rank], channel=channel, **arguments))


def cut(name: str, tensor: torch.Tensor, how: Cut, size: int) -> list[Pieces]:
    """The tensor in as many pieces: rows, columns (of the last dim), or runs of elements."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    shares: list[Pieces] = []
    for rank in range(size):
        if how == "runs":
            start, stop = tensor.numel() * rank // size, tensor.numel() * (rank + 1) // size
            piece = Piece(name=name, dtype=dtype, global_shape=shape, run=(start, stop))
            shares.append({piece: tensor.reshape(-1)[start:stop]})
            continue
        dim = 0 if how == "rows" else tensor.dim() - 1
        start, stop = shape[dim] * rank // size, shape[dim] * (rank + 1) // size
        offset = [start if each == dim else 0 for each in range(len(shape))]
        box = [stop - start if each == dim else full for each, full in enumerate(shape)]
        piece = Piece(name=name, dtype=dtype, global_shape=shape, offset=offset, shape=box)
        shares.append({piece: tensor.narrow(dim, start, stop - start).contiguous()})
    return shares


def save_sharded(path: Path, state: Tensors, size: int = 3, **arguments: Any) -> Path:
    """Some in rows, some in runs, some on all ranks."""
    shares = [share_of_state(dict(state), rank, size) for rank in range(size)]
    sw.simulate(size, lambda channel: sw.save(path, shares[channel.rank], channel=channel, **arguments))
    return path


def tensors_of(path: checkpoint.Address) -> dict[str, torch.Tensor]:
    """Every tensor of the newest save, or of another format."""
    catalogue = checkpoint.open(path)
    return {name: catalogue.read(name) for name in catalogue.tensors}
