"""Format: how checkpoints of one format are recognised, read and written.

Each format here is one file or folder beside this one, with its `FORMAT`. Other packages have theirs: see `registry`.

    recognises(names)     -> whether a folder with files of these names is one     nothing is opened
    read(store)           -> Contents: each tensor with its pieces, and where each is     metadata alone
    targets["name"](outputs, request)   -> FolderPlan: the files, and who fills them with elements
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.safetensors_files import Sink
from shardwise.checkpoint.stores import Store, Writer
from shardwise.space import Piece


class Filling(Sink, Protocol):
    """Takes the bytes of a file's pieces, in order, and hands the file to a writer."""

    def flush(self) -> None:
        """Hand everything to the writer."""


class FilledFile(Protocol):
    """A file with pieces of the outputs."""

    @property
    def num_bytes(self) -> int:
        """Of the whole file, known before it is written."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """In the order of their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPlan:
    """What a folder will have."""

    files: Mapping[str, FilledFile]
    filling: Callable[[Any, Writer], Filling]
    """Begins to write one of the files."""
    last: Mapping[str, bytes]
    """Small files, which are written last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRequest:
    """What is asked of a folder."""

    max_file_bytes: int
    """Bytes of the tensors in one file."""
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """In which file each tensor is, and its place there, where that is asked for."""
    source: Store | None = None
    """Where the outputs are read: some formats need numbers of them. None: nothing is read, and it stays a plan."""


Planner: TypeAlias = Callable[[Outputs, FolderRequest], FolderPlan]
"""Plans a folder with the outputs of a conversion. Raises CheckpointError where it cannot be made."""


def _never(name: str) -> bool:
    return False


def _as_it_is(contents: Contents, store: Store) -> Contents:
    return contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of checkpoints."""

    name: str
    """What `Contents.format` and messages call it."""
    recognises: Callable[[Sequence[str]], bool]
    """Whether a folder with files of these names, at any depth, is a checkpoint of it."""
    read: Callable[[Store], Contents]
    """What a checkpoint holds. Raises CheckpointError, with all findings, for what is missing or damaged."""
    recognises_file: Callable[[str], bool] = _never
    """Whether one file of this name is a checkpoint of it. `read` gets an `OneFile` then."""
    completes: Callable[[Contents, Store], Contents] = _as_it_is
    """Adds what it has beside a checkpoint of any format, such as an optimizer beside a model, or refuses it."""
    targets: Mapping[str, Planner] = field(default_factory=dict)
    """What `convert` can make of it, by the name of the target (`to`)."""
