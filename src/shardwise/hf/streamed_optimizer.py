"""An optimizer's state as `torch.save(optimizer.state_dict(), ...)` writes it, tensor by tensor.

    [1] rank 0    state_dict() of the whole optimizer, whose tensors have shapes alone; numbers have values
    [2] all       its tensors come to rank 0 one after the other, and go into the archive

So a run of the plain Trainer goes on from it, and no rank ever holds the state of all.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.full_tensors import full
from shardwise.checkpoint.torch_archives import Archive, ArchiveFile, ArchiveFilling, saved_tensor
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine import Engine
from shardwise.engine.packed_tensors import is_shell
from shardwise.engine.state_of_all import sources_of
from shardwise.hf.written_files import replacing, writing
from shardwise.plan.names import state_name
from shardwise.plan.nested_state import flat_state
from shardwise.space import Piece


def save_optimizer(engine: Engine[nn.Module], path: Path) -> None:
    """Write the state of the engine's one optimizer; all ranks call this together.

    State that is no plain tensor, number or text (packed tensors, objects in groups) is whole in the memory of rank 0.
    Raises CheckpointError for what cannot be written.
    """
    channel, optimizer = engine.channel, engine.optimizers[0]
    archive: _StateArchive | None = None
    names: list[str] | None = None
    has_packed = any(is_shell(each) for state in optimizer.state.values() for each in flat_state(state).values())
    # A rank may own nothing that is packed.
    if not any(channel.exchange(b"1" if has_packed else b"", purpose="packed state of optimizers")):
        archive, names = _named_archive(engine, optimizer)
    if names is None:
        with engine.whole(rank0_only=True), writing(channel, "optimizer.pt") as verdict:
            if channel.rank == 0:
                torch.save(optimizer.state_dict(), path)
        verdict.check()
        return
    pieces = sources_of(engine.hand_over(doing="saving the optimizer"))
    values = full(pieces, channel=channel, to=0, names=names, optimizer=True)
    with writing(channel, "optimizer.pt") as verdict:
        if archive is not None:
            archive.write(path, values)
    # All go through to the end: the others wait for a rank that does not.
    deque(values, maxlen=0)
    verdict.check()


def _named_archive(
    engine: Engine[nn.Module], optimizer: torch.optim.Optimizer
) -> "tuple[_StateArchive | None, list[str] | None]":
    """On rank 0 the archive; on all ranks the tensors that go into it, or None where it cannot be written so."""
    archive: _StateArchive | None = None
    with engine.whole(rank0_only=True, only=()), writing(engine.channel, "optimizer.pt") as verdict:
        if engine.channel.rank == 0:
            archive = _StateArchive(engine.model, optimizer)
    return archive, verdict.names(None if archive is None else archive.names)


class _StateArchive:
    """The archive of a state dict whose tensors have shapes alone, but for small ones."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        name_of = {id(each): name for name, each in model.named_parameters()}
        self._sources = {
            id(value): state_name(name_of[id(parameter)], key)
            for parameter, state in optimizer.state.items()
            if id(parameter) in name_of
            for key, value in flat_state(state).items()
        }
        self._tensors: list[torch.Tensor] = []
        self.names: list[str] | None = None
        """The engine's tensors that go into the archive, in this order; None: it cannot be written so."""
        try:
            value = self._plain(optimizer.state_dict())
            self._archive = Archive(value, [_piece(each) for each in self._tensors])
            self.names = [self._sources[id(each)] for each in self._tensors if each.is_meta and each.numel()]
        # Objects that archives do not have, tensors that are not the engine's, and a state dict that reads values.
        except (TypeError, KeyError, RuntimeError):
            return

    def _plain(self, value: Any) -> Any:
        """The value with marks for tensors. Raises TypeError for subclasses of tensors."""
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor:
                raise TypeError(type(value).__name__)
            self._tensors.append(value)
            return saved_tensor(len(self._tensors) - 1, _piece(value))
        if isinstance(value, dict):
            return {key: self._plain(each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._plain(each) for each in value)
        return value

    @torch.no_grad()
    def write(self, path: Path, values: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the file. values: those of `names`, in this order. Raises OSError."""
        file = ArchiveFile((self._archive,))
        with replacing(path, num_bytes=file.num_bytes) as writer:
            filling = ArchiveFilling(file, writer)
            for each in self._tensors:
                if each.numel():
                    tensor = next(values)[1] if each.is_meta else each.detach().cpu()
                    filling.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            filling.flush()


def _piece(tensor: torch.Tensor) -> Piece:
    return Piece(name="", dtype=dtype_name(tensor.dtype), global_shape=tuple(tensor.shape))
