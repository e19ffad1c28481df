"""A model's files as its own `save_pretrained` lays them out, written tensor by tensor.

    [1] note     rank 0 calls it while the model has shapes alone (device "meta"): which tensors it hands to the writer
                 of safetensors files, under which names, and how they are made of the model's own
    [2] stream   the model's tensors come to rank 0 one after the other, in the order in which the files have them

    experts.gate_up_proj (2, 8, 4)     --views, transpositions-->     experts.0.gate_proj (4, 4), experts.0.up_proj ..

So ties, renamed layers, shards with an index, adapters and configurations are the library's own. Rank 0 holds one
tensor of the model at a time, or those from which one tensor of a file is made.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.checkpoint.contents import StoredTensor
from shardwise.checkpoint.formats.huggingface.writing import ShardFile, shards_of
from shardwise.checkpoint.safetensors_files import JoinedWrites
from shardwise.comm.local_tensors import dtype_name
from shardwise.engine import Engine
from shardwise.hf.borrowed_names import instead
from shardwise.hf.written_files import replacing, write_streamed

_WRITERS = (
    ("transformers.modeling_utils", "safe_save_file"),
    ("peft.peft_model", "safe_save_file"),
    ("safetensors.torch", "save_file"),
)
"""Where libraries have the function that writes a safetensors file."""

_READERS = ((torch.Tensor, "_reduce_ex_internal"), (torch._tensor_str, "_str"))
"""What gives the pickle and the text of a tensor, also of one without values."""


def save_model(engine: Engine[nn.Module], save: Callable[[], object]) -> None:
    """Call `save` on rank 0, with the engine's whole model in place; all ranks call this together.

    Where safetensors files are all that it writes of tensors, these are streamed. Else (quantised weights, a
    `save_pretrained` of the model's own that reads values) the model is whole in the memory of rank 0.
    Raises CheckpointError for what cannot be written.
    """
    notes = FileNotes()

    def note() -> list[str] | None:
        notes.take(engine.model, save)
        return notes.needed

    write_streamed(engine, "a model's files", note, notes.write, save, doing="saving the model", optimizer=False)


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor as a part of a storage."""

    storage: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorPart":
        """A tensor."""
        return cls(storage_of(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that has the storage."""
        return whole.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Made:
    """How a storage was filled: the output `at` of an operation."""

    operation: Callable[..., Any]
    inputs: Any
    """(args, kwargs) with a `TensorPart` for each tensor without values."""
    at: int
    output: "TensorPart"


def storage_of(tensor: torch.Tensor) -> int:
    """What is equal for tensors in one memory, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


class MetaOperations(TorchDispatchMode):
    """Notes what is computed of tensors without values."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Made] = {}
        self.written: set[int] = set()
        """Storages that an operation wrote into: nothing says any more what they hold."""
        self._kept: list[torch.Tensor] = []  # no other storage gets the address of one that is known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.is_meta]
        if outputs:
            inputs = {storage_of(each) for each in tree_leaves((args, kwargs)) if _has_no_values(each)}
            if func._schema.is_mutable:
                self.written |= inputs
            found = tree_map(lambda each: TensorPart.of(each) if _has_no_values(each) else each, (args, kwargs))
            for at, each in enumerate(outputs):
                if storage_of(each) not in inputs:
                    self.made[storage_of(each)] = Made(func, found, at, TensorPart.of(each))
            self._kept += outputs
        return result


def _has_no_values(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _refusing(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Called instead of the functions that give the pickle or the text of a tensor."""
    if _has_no_values(tensor):
        raise NotImplementedError("a tensor without values is written")
    return original(tensor, *args, **kwargs)


def _comes(tensor: torch.Tensor) -> bool:
    """Whether values have to come for it."""
    return tensor.is_meta and tensor.numel() > 0


@dataclass(frozen=True, slots=True)
class _NotedFile:
    """A file that is to come."""

    path: Path
    tensors: Mapping[str, torch.Tensor]
    shard: ShardFile


@dataclass(slots=True)
class FileNotes:
    """What a library hands to the writer of safetensors files while a model has shapes alone."""

    needed: list[str] | None = None
    """The model's tensors in the order in which the files need them; None: files cannot be made so."""
    _files: list[_NotedFile] = field(default_factory=list)
    _operations: MetaOperations = field(default_factory=MetaOperations)
    _models: dict[int, tuple[str, torch.dtype]] = field(default_factory=dict)
    """The model's own tensors, by storage: name and dtype."""
    _parts: dict[int, TensorPart] = field(default_factory=dict)
    """The same as parts of their storages."""
    _last: dict[str, tuple[int, int]] = field(default_factory=dict)
    """File and place in it that need a tensor of the model for the last time."""

    def take(self, model: nn.Module, save: Callable[[], object]) -> None:
        """Call `save`, and note. The model is on the device "meta"."""
        try:
            for name, each in [*model.named_parameters(), *model.named_buffers()]:
                self._models[storage_of(each)] = name, each.dtype
                self._parts[storage_of(each)] = TensorPart.of(each)
            writers = {(module, name): self._note for of, name in _WRITERS if (module := sys.modules.get(of))}
            with self._operations, instead({**writers, **dict.fromkeys(_READERS, _refusing)}):
                save()
            self.needed = self._order()
        except Exception:
            # It reads values (numpy raises a TypeError), or has tensors without one storage. What is wrong for another
            # reason is so again in the whole model, and raises there.
            self.needed = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """What files have, by name."""
        return {name: each for file in self._files for name, each in file.tensors.items()} if self.needed else {}

    def own(self, part: TensorPart) -> tuple[str, TensorPart] | None:
        """The model's own tensor in whose storage a part is, with its name."""
        return (self._models[part.storage][0], self._parts[part.storage]) if part.storage in self._models else None

    def made(self, part: TensorPart) -> Made | None:
        """How the storage of a part was filled; None where that is not known."""
        return None if part.storage in self._operations.written else self._operations.made.get(part.storage)

    def _note(
        self, _: Any, tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None
    ) -> None:
        stored = [
            StoredTensor(name=name, dtype=dtype_name(each.dtype), shape=tuple(each.shape), pieces=())
            for name, each in sorted(tensors.items())
        ]
        (shard,) = shards_of(stored, max_bytes=sys.maxsize, places={}, aliases={}, metadata=metadata or {})
        self._files.append(_NotedFile(Path(filename), dict(tensors), shard))

    def _order(self) -> list[str] | None:
        found: dict[str, None] = {}
        for number, file in enumerate(self._files):
            for at, piece in enumerate(file.shard.file.pieces):
                tensor = file.tensors[piece.name]
                names = self._sources(storage_of(tensor)) if _comes(tensor) else set()
                if names is None:
                    return None
                found |= dict.fromkeys(sorted(names))
                self._last |= dict.fromkeys(names, (number, at))
        return list(found)

    def _sources(self, storage: int) -> set[str] | None:
        """The model's tensors from which a storage is made; None where that is not known."""
        if storage in self._operations.written:
            return None
        if storage in self._models:
            return {self._models[storage][0]}
        made = self._operations.made.get(storage)
        parts = [each for each in tree_leaves(made.inputs) if isinstance(each, TensorPart)] if made is not None else []
        if not parts:  # filled without the model, with what it had no values for
            return None
        found: set[str] = set()
        for each in parts:
            names = self._sources(each.storage)
            if names is None:
                return None
            found |= names
        return found

    @torch.no_grad()
    def write(self, values: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the files. values: those `needed`, in this order. Raises OSError."""
        held: dict[str, torch.Tensor] = {}
        arrived = iter(self.needed or ())
        for number, file in enumerate(self._files):
            with replacing(file.path, num_bytes=file.shard.file.num_bytes) as writer:
                writes = JoinedWrites(writer)
                writes.write(memoryview(file.shard.file.header))
                for at, piece in enumerate(file.shard.file.pieces):
                    tensor = file.tensors[piece.name]
                    if _comes(tensor):
                        for name in sorted(self._sources(storage_of(tensor)) or ()):
                            while name not in held:
                                held[next(arrived)] = next(values)[1]
                        tensor = self._value(TensorPart.of(tensor), held)
                    if tensor.numel():
                        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                        writes.write(data.numpy().data)
                    for name in [name for name in held if self._last[name] == (number, at)]:
                        del held[name]
                writes.flush()

    def _value(self, part: TensorPart, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The part, of tensors with values."""
        if part.storage in self._models:
            name, dtype = self._models[part.storage]
            return part.within(held[name].to(dtype))
        made = self._operations.made[part.storage]
        args, kwargs = tree_map(
            lambda each: self._value(each, held) if isinstance(each, TensorPart) else each,
            made.inputs,
            is_leaf=lambda each: isinstance(each, TensorPart),
        )
        result = [each for each in tree_leaves(made.operation(*args, **kwargs)) if isinstance(each, torch.Tensor)]
        return part.within(result[made.at])
