"""An optimizer's state as `torch.save(optimizer.state_dict(), ...)` writes it, tensor by tensor.

    [1] rank 0    state_dict() of the whole optimizer, whose tensors have shapes alone; numbers have values
    [2] all       its tensors come to rank 0 one after the other, and go into the archive

So a run of the plain Trainer goes on from it, and no rank ever holds the state of all.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.formats.torch_files.archive_writer import Archive, ArchiveFile, ArchiveFilling, saved_tensor
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine import Engine
from shardwise.engine.parameter_kinds import is_shell
from shardwise.hf.written_files import replacing, write_streamed
from shardwise.plan.names import state_name
from shardwise.plan.optimizer_entries import flat_state
from shardwise.space import Piece


def save_optimizer(engine: Engine[nn.Module], path: Path) -> None:
    """Write the state of the engine's one optimizer; all ranks call this together.

    State that is no plain tensor, number or text (packed tensors, objects in groups) is whole in the memory of rank 0.
    Raises CheckpointError for what cannot be written.
    """
    optimizer = engine.optimizers[0]
    archives: list[_StateArchive] = []

    def note() -> list[str] | None:
        archives.append(_StateArchive(engine.model, optimizer))
        return archives[0].names

    has_packed = any(is_shell(each) for state in optimizer.state.values() for each in flat_state(state).values())
    # A rank may own nothing that is packed.
    is_whole = any(engine.channel.exchange(b"1" if has_packed else b"", purpose="packed state of optimizers"))
    write_streamed(
        engine,
        "optimizer.pt",
        None if is_whole else note,
        lambda values: archives[0].write(path, values),
        lambda: torch.save(optimizer.state_dict(), path),
        doing="saving the optimizer",
        optimizer=True,
    )


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
