"""What is found in files of other programs: the newest save, tensors by names of parameters, groups, notes."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.contents import StoredPiece, StoredTensor
from shardwise.checkpoint.formats.optimizer_settings import optimizer_settings
from shardwise.checkpoint.formats.strided import TensorPlace
from shardwise.checkpoint.formats.torch_files.saved_values import number_of
from shardwise.checkpoint.stores import OpenFile, Store, read_whole, value_name
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.names import split_state_name, state_name
from shardwise.plan.saved_settings import NUMBERED
from shardwise.space import Piece


@dataclass(slots=True, kw_only=True)
class FoundTensors:
    """What the contents are made of."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    value_sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of values that are in metadata alone: see `stores.value_name`."""
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    """The settings of each group of the optimizer."""
    trained: list[list[str]] = field(default_factory=list)
    """The parameters of each group."""
    loss_scale: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    numbered: list[dict[str, Any]] = field(default_factory=list)
    """See `saved_settings.NUMBERED`; of each file."""
    left_state: str = ""
    """See `Contents.left_state`."""

    def add(self, tensor: StoredTensor) -> None:
        """Add a tensor, unless another pipeline stage had it."""
        self.tensors.setdefault(tensor.name, tensor)

    def leave_state(self, why: str) -> None:
        """Note that the files have state of an optimizer, and these contents do not."""
        self.left_state = f"the optimizer is left out: {why}"
        self.notes.append(self.left_state)

    def add_step(self, parameter: str, value: float) -> None:
        """Add the number of updates of a parameter, as torch's optimizers count it."""
        file = value_name(struct.pack("<f", value))
        self.value_sizes[file] = 4
        name = state_name(parameter, "step")
        piece = Piece(name=name, dtype="float32", global_shape=())
        stored = StoredPiece(piece=piece, file=file, start=0, checksums=None)
        self.add(StoredTensor(name=name, dtype="float32", shape=(), pieces=(stored,)))

    def add_groups(self, groups: Sequence[Mapping[str, Any]], trained: Sequence[Sequence[str]]) -> None:
        """Add the groups of an optimizer; those of several pipeline stages are one optimizer."""
        if not self.groups:
            self.groups = list(groups)
            self.trained = [[] for _ in groups]
        if len(groups) != len(self.groups):
            self.notes.append("model-parallel ranks have different groups of the optimizer; their settings are left")
            return
        for mine, names in zip(self.trained, trained, strict=True):
            mine += [name for name in names if name not in mine]

    def take(self, shard: "FoundTensors", prefix: str) -> None:
        """Add all that a tensor-parallel rank has, with something before the names of parameters."""
        for name, tensor in shard.tensors.items():
            self.add(tensor.renamed(_prefixed(name, prefix)))
        self.aliases |= {prefix + alias: prefix + name for alias, name in shard.aliases.items()}
        self.value_sizes |= shard.value_sizes
        self.add_groups(shard.groups, [[prefix + name for name in names] for names in shard.trained])
        self.loss_scale = shard.loss_scale
        self.numbered += shard.numbered
        self.left_state = self.left_state or shard.left_state
        self.notes += [note for note in shard.notes if note not in self.notes]

    def ties(self) -> dict[str, str]:
        """Other names of tensors that are here."""
        return {
            alias: name
            for alias, name in self.aliases.items()
            if isinstance(alias, str) and name in self.tensors and alias not in self.tensors
        }

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Contents.settings`."""
        named = [optimizer_settings(self.groups, self.trained, config)] if self.groups else []
        # Files of several stages number their own parameters, which is no order that a target could share.
        numbered = {NUMBERED: self.numbered} if len(self.numbered) == 1 else {}
        return {"ties": self.ties(), "optimizers": named, **numbered, **self.loss_scale}


def _prefixed(name: str, prefix: str) -> str:
    parameter, key = split_state_name(name) or (name, None)
    return prefix + parameter if key is None else state_name(prefix + parameter, key)


_MAX_COUNT = 1 << 53
"""Floats count so far."""


def number_at(opened: OpenFile, value: object) -> float | None:
    """A count of updates that a file has, as a tensor or as a number; None for all else."""
    if isinstance(value, TensorPlace) and not value.shape:
        value = number_of(opened.read(value.start, itemsize_bytes(value.dtype)), value.dtype)
    return float(value) if isinstance(value, int | float) and abs(value) < _MAX_COUNT else None


def newest_save(
    store: Store, names: Sequence[str], latest: str, folder_of: Callable[[str], str] = lambda said: said
) -> str:
    """The folder of the save that the file `latest` names, with "/" at its end. names: of all files in the store.

    folder_of: the folder for what the file says. Raises CheckpointError for a save that is not there.
    """
    # The name of a folder, and whatever else is in a file that has this name by chance.
    said = read_whole(store, latest)[:4096].decode(errors="replace").strip()
    folder = f"{folder_of(said)}/"
    if not any(name.startswith(folder) for name in names):
        raise CheckpointError(
            f"{store.location}/{latest} names the save {said[:100]!r}, which is not there; name the folder of a save"
        )
    return folder
