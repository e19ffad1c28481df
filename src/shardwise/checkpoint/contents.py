"""Contents: what a checkpoint of any format holds, known from its metadata alone, and which names are the model's.

Readers of all formats make the same three values, so that load, diff and convert know no format. For example:

    Contents        shardwise, step 10, blocks of 256 KiB
    StoredTensor    w  float32 [4, 65536]
    StoredPiece     w[0:2]  5e1f09ab-rank00000.safetensors  bytes 4096 to 528384    2 blocks, 2 checksums
    StoredPiece     w[2:4]  5e1f09ab-rank00001.safetensors  bytes 4096 to 528384    2 blocks, 2 checksums

Whoever wants a piece of a tensor asks for its `places`: of the tensor itself here, and of others where a rewrite has
made it of them (`RewrittenContents`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from shardwise.errors import CheckpointError, few_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.plan.names import MASTER, is_beside_name, is_state_name, split_state_name
from shardwise.rewrite import Checked, Fragment
from shardwise.rewrite.strided_views import Scales, fill_of, scales_of
from shardwise.space import Piece

MAX_INDEX = 2**63 - 1
"""Torch counts elements and bytes with so many bits."""

_MAX_DIMS = 1024
"""Operations of torch know far fewer."""

BLOCK_BYTES = 1 << 18
"""Bytes under one checksum, where nothing else is said: they fit the cache of a core, which reads them twice."""

CHECKSUM_BYTES = 8
"""Bytes of one checksum (xxh3_64, in its canonical form)."""


def can_exist(shape: Sequence[int], itemsize: int) -> bool:
    """Whether torch can have a tensor of this shape, whose elements are of so many bytes; with elements or without."""
    # Sizes of 0 count as 1: torch multiplies strides, and refuses [0, 2**33, 2**33] though it has no elements.
    return len(shape) <= _MAX_DIMS and math.prod(size or 1 for size in shape) * itemsize <= MAX_INDEX


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """Where the elements of a piece are: row-major, little-endian, one after the other."""

    piece: Piece
    """Which elements; its dtype is the one they are stored in."""
    file: str
    """Name of the data file in the store."""
    start: int
    """First byte in the file."""
    checksums: bytes | None
    """One checksum per block of `block_bytes` bytes, the first block starting at `start`; None: the format has none."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the piece takes in the file."""
        return self.piece.num_elements * itemsize_bytes(self.piece.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and the pieces that make it up."""

    name: str
    """As it was saved; other names of it are in `aliases` of the contents."""
    dtype: str
    """The dtype in which it is stored, by torch's name for it: "float32"."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    pieces: Sequence[StoredPiece]
    """Disjoint; pieces without elements are left out."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * itemsize_bytes(self.dtype)

    @property
    def checksums(self) -> Mapping[object, bytes | None]:
        """Those of every piece. Tensors with equal ones, per blocks of equal size, have equal bytes."""
        # Keyed by the elements of the piece: two saves may have the same pieces in other files or another order.
        return {(each.piece.offset, each.piece.shape, each.piece.run): each.checksums for each in self.pieces}

    @property
    def whole(self) -> Piece:
        """The tensor as one piece."""
        return Piece(name=self.name, dtype=self.dtype, global_shape=self.shape)

    def renamed(self, name: str) -> "StoredTensor":
        """The same under another name."""
        if name == self.name:
            return self
        pieces = tuple(replace(each, piece=replace(each.piece, name=name)) for each in self.pieces)
        return replace(self, name=name, pieces=pieces)


class Place(NamedTuple):
    """A piece with elements of another piece, and where they are in the tensor of that one.

    Of a checkpoint that a rewrite renames, it is a stored piece of a wanted one; of a state, a written piece of a held
    one.
    """

    piece: Piece
    """In the dtype that it has on its own side."""
    dtypes: tuple[str, ...]
    """What a value passes through from the source to the target, both included."""
    fragment: Fragment | None = None
    """The elements in a block of the other piece; None: its tensor holds this one as it is."""
    origin: tuple[int, ...] = ()
    """Where in its tensor the block begins."""
    block: tuple[int, tuple[int, ...]] | None = None
    """Of the flat tensor of a run: the element with which the block begins, and its shape; None: the whole tensor."""

    @property
    def fill(self) -> str | None:
        """What all elements are that are in no tensor, as text; None: there is a tensor of them."""
        return fill_of(self.piece.name)

    @property
    def scales(self) -> Scales | None:
        """By what elements are multiplied when they are read."""
        return scales_of(self.dtypes)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it is read from: that of the piece and that of its scales; none of padding."""
        of_piece = () if self.fill is not None else (self.piece.name,)
        return of_piece if self.scales is None else (*of_piece, self.scales.source)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in the tensor that holds them, in the shape of the piece (flat, where that is a run)."""
        if self.fragment is None:
            return tensor
        if self.block is not None:
            start, shape = self.block
            tensor = tensor[start : start + math.prod(shape)].view(shape)
        strides = tensor.stride()
        first = int(tensor.storage_offset()) + self.fragment.view_start(strides, self.origin)
        # A rewrite keeps elements apart and moves none: whatever it does to indices is strides and a start.
        return tensor.as_strided(self.fragment.shape, self.fragment.view_strides(strides), first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What a rewrite did to contents besides giving their tensors names; nothing where there was none."""

    checked: Checked | None = None
    """The rewrite itself."""
    dropped: frozenset[str] = frozenset()
    """What it has left out (`a -> _`)."""
    added: frozenset[str] = frozenset()
    """What keeps the values that it has where it is loaded (`_ -> b`)."""
    joined: Sequence[Sequence[str]] = ()
    """Groups of stored numbers that it makes one, so that they have to be equal."""
    unfit: Sequence[str] = ()
    """What of the settings cannot be carried over."""
    notes: Sequence[str] = ()
    """What may be why something does not fit."""

    def keeps(self, name: str) -> bool:
        """Whether a wanted tensor is not read: it, or the parameter whose state it is, keeps the value that it has."""
        split = split_state_name(name)
        return name in self.added or (split is not None and split[0] in self.added)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds. Formats without a feature leave its field at the default."""

    format: str
    """"shardwise", "safetensors", "dcp", "deepspeed", "megatron", "torch", "gguf", or that of another package."""
    location: str
    """What to call it in messages: the path or address of the save."""
    tensors: Mapping[str, StoredTensor]
    """By name, in the order in which they were saved."""
    file_sizes: Mapping[str, int]
    """Bytes that each data file must have."""
    file_heads: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)
    """For data files with a checksum of their first bytes: how many bytes, and the checksum."""
    block_bytes: int = BLOCK_BYTES
    """Bytes under one checksum."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of tensors (ties): alias -> name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """JSON values of the saved object besides its tensors: groups of optimizers, its plan."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the user saved besides tensors, as JSON values: see `manifest.packed`."""
    step: int | None = None
    """The step at which it was saved."""
    layout: str = ""
    """The layout that wrote it, in words."""
    notes: tuple[str, ...] = ()
    """What of the files is not in these contents, or not under a name of the model, in words."""
    left_state: str = ""
    """Why state of optimizers that the files have is not in these contents, or not all of it; "" where it is."""
    manifest: str = ""
    """Name in the store of the file whose removal removes the save; "" where other formats have none."""

    @property
    def stored(self) -> "Contents":
        """The checkpoint whose files have the elements: these contents, unless a rewrite has made them."""
        return self

    @property
    def effects(self) -> Effects:
        """What a rewrite did besides giving tensors names."""
        return Effects()

    def places(self, piece: Piece, name: str) -> Sequence[Place]:
        """The pieces of `stored`, and the padding, that make up a piece of the tensor `name`, of whatever dtype."""
        return [Place(piece if piece.name == name else replace(piece, name=name), (piece.dtype,))]

    @property
    def verifiable(self) -> bool:
        """Whether all blocks have checksums, which every read compares."""
        # Of other formats archives of torch.save have some, of whole storages: `verify` alone reads these.
        return self.format == "shardwise"

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def joined(self, other: "Contents", *, where: str) -> "Contents":
        """These and others of one checkpoint. where: in words, where a tensor is that both have; that is refused."""
        if twice := self.tensors.keys() & other.tensors.keys():
            raise CheckpointError(f"{self.location}: {few_of(sorted(twice))} is {where}")
        extra = dict(self.extra)
        for key, more in other.extra.items():
            mine = extra.get(key, ())
            extra[key] = {**more, **dict(mine)} if isinstance(more, dict) else [*mine, *more]
        return replace(
            self,
            tensors={**self.tensors, **other.tensors},
            aliases={**self.aliases, **other.aliases},
            file_sizes={**self.file_sizes, **other.file_sizes},
            settings={**self.settings, **other.settings},
            extra=extra,
            step=self.step if other.step is None else other.step,
            notes=(*self.notes, *other.notes),
            left_state=self.left_state or other.left_state,
        )

    def check_tensors(self, tensors: Collection[str]) -> None:
        """Raise CheckpointError where nothing is left of what has tensors, or of what others saved as a model."""
        # A save of ours may hold values alone. What others wrote has tensors, which could not be read then.
        if not tensors and (self.tensors or self.format != "shardwise"):
            raise CheckpointError(f"{self.location} has no tensor that is read or was asked for", *self.notes)


_DCP_STATE = ("optimizer.", "optim.", "optimizers.")
"""What the examples of torch.distributed.checkpoint call the optimizer; its keys are joined by dots."""


def is_model_name(name: str, format_: str) -> bool:
    """Whether a tensor of a checkpoint in this format (`Contents.format`) belongs to the model.

    >>> is_model_name("optimizer/w/exp_avg", "shardwise"), is_model_name("w", "shardwise")
    (False, True)
    """
    # Plain dcp checkpoints have no rule for names; this is what its documentation and examples use.
    if is_state_name(name) or is_beside_name(name):
        return False
    return not (format_ == "dcp" and name.startswith(_DCP_STATE))


def model_name_of_master(name: str) -> str | None:
    """The parameter whose master this is; None for every other tensor.

    >>> model_name_of_master("optimizer/w/master")
    'w'
    """
    split = split_state_name(name)
    return split[0] if split is not None and split[1] == MASTER else None


def without_followers(names: Collection[str]) -> tuple[str, ...]:
    """The names, sorted, without optimizer state whose parameter is among them."""
    split = {name: split_state_name(name) for name in names}
    return tuple(sorted(name for name, parts in split.items() if parts is None or parts[0] not in names))


def unwritable(name: str) -> str:
    """Why no save can have a tensor of this name, in words; "" where one can."""
    if name.isascii() or name.encode(errors="replace").decode() == name:
        return ""
    return f"{name!r} holds half of a surrogate pair, which no file can hold; rename it"


def printable(name: str) -> str:
    """The name as one line of a table can hold it: what no terminal shows is escaped.

    >>> print(printable("a name"), printable("two\\nlines"))
    a name two\\nlines
    """
    # Names come from files that others wrote: an escape sequence in one would rule the terminal.
    return name if name.isprintable() else ascii(name)[1:-1]
