"""Likeness: the form of a checkpoint, which another one takes when it is converted to files of Hugging Face.

of the original      what is written
names, shapes        the same, or it is refused
dtypes of floats     the same: cast, out of masters where the source has them
files                each tensor in a file of the same name; `config.json`, the tokenizer and their like as they are
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.model_files import folder_files
from shardwise.checkpoint.outputs import model_of
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.stores import Address, Store, store_of
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import COMPUTE_DTYPES
from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.sections import mismatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """The form of a model's checkpoint. Only metadata is read."""

    store: Store
    model: Contents
    """What of the checkpoint belongs to the model."""

    @classmethod
    def of(cls, original: Address) -> Self:
        """That of the checkpoint at `original`. Raises CheckpointError for what is none."""
        store = store_of(original)
        return cls(store=store, model=model_of(read_contents(store)))

    @property
    def files(self) -> dict[str, bytes]:
        """The configuration, the tokenizer and their like: name -> bytes."""
        return folder_files(self.store, self.model)

    @property
    def file_of(self) -> Mapping[str, tuple[str, int]]:
        """For each tensor the file that has it, and its place there; none where the original is cut in other ways."""
        tensors = self.model.tensors.values()
        if self.model.format != "safetensors":
            return {}
        return {each.name: (each.pieces[0].file, each.pieces[0].start) for each in tensors if each.pieces}

    def check(self, outputs: Contents) -> None:
        """Raise CheckpointError, with all that differs, where outputs have other names or shapes, or kinds of dtype."""
        made = {name: TensorMeta(each.shape, each.dtype) for name, each in outputs.tensors.items()}
        target = {
            name: TensorMeta(each.shape, self._dtype_for(name, made.get(name)))
            for name, each in self.model.tensors.items()
            # A tie is written once, also where the original has a copy for each name.
            if name not in outputs.aliases
        }
        problems = list(mismatches(made, (), self.model.aliases, target))
        if problems:
            raise CheckpointError(
                *problems, about=f"{outputs.location} cannot be written in the form of {self.model.location}"
            )

    def _dtype_for(self, name: str, made: TensorMeta | None) -> str:
        """The dtype that a tensor must have before casts, which turn floats into floats."""
        dtype = self.model.tensors[name].dtype
        return made.dtype if made is not None and made.dtype in COMPUTE_DTYPES and dtype in COMPUTE_DTYPES else dtype

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor."""
        return {name: each.dtype for name, each in self.model.tensors.items()}
