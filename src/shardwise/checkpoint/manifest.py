"""The manifest: what a save of ours holds, as JSON. docs/reference/checkpoint-format.md describes it for other readers.

    manifest.json              the head: what was saved, when, by which layout; the files with sizes and checksums
      files[0]                 5e1f09ab-rank00000.safetensors      checksum of its header
      tables[0]                5e1f09ab-tensors-00000.json         checksum of all its bytes
        {"name": "w", ..., "pieces": [{"file": 0, "start": 4096, "xxh3": one checksum per block}]}

So the checksum of the head covers every byte of a save, over one step or two. What is read is checked as if an enemy
had written it: a checksum shows damage, and not that a writer meant well.

The end of the file has the extra values: what a user saves besides tensors, as JSON that comes back as it was given.
JSON has objects with strings as keys only. Other dicts are written as {"shardwise": "Counter", "items": [[3, 1], [5,
2]]}, such as the `milestones` of a MultiStepLR (a Counter of whole numbers).
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NotRequired, Self, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from typing_extensions import TypedDict

from shardwise.checkpoint.contents import CHECKSUM_BYTES, MAX_INDEX, Contents, StoredPiece, StoredTensor, can_exist
from shardwise.comm.digests import checksum
from shardwise.errors import CheckpointError, PlanError, in_words
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.plan.saved_settings import NUMBERED
from shardwise.space import Piece

FORMAT: Final = "shardwise-checkpoint"
VERSION: Final = 1
MANIFEST = "manifest.json"
"""Name of the head in the folder of a save. It is created last: a folder without it holds no save."""

TENSORS_PER_TABLE = 20_000
"""Tensors in one table: a save with more has several, so that none grows without bound."""

MAX_BLOCK_BYTES = 1 << 26
"""One block at least is read at a time."""

_SUM = re.compile(rb'"checksum": "xxh3_64:([0-9a-f]{16})"')
_NO_SUM = "xxh3_64:" + "0" * 16


class _ManifestEntry(BaseModel):
    # strict: "1" is no 1 here. extra="forbid": a key that we do not know means that we do not know the file.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FileEntry(_ManifestEntry):
    """A file of the save."""

    name: str
    """In the folder of the save."""
    bytes: int = Field(ge=0, le=MAX_INDEX)
    """Size of the file."""
    head_bytes: int = Field(ge=0)
    """So many bytes from its start have `checksum`: the header of a data file, the whole of a table."""
    checksum: str = Field(pattern="^[0-9a-f]{16}$")
    """xxh3_64 of them, in hexadecimal digits."""

    @field_validator("name")
    @classmethod
    def _is_in_folder(cls, name: str) -> str:
        if not is_file_name(name):
            raise ValueError(f"{name!r} names no file of the save's folder")
        return name

    @model_validator(mode="after")
    def _is_within_file(self) -> Self:
        if self.head_bytes > self.bytes:
            raise ValueError(f"{self.head_bytes} bytes of a file of {self.bytes} are said to have a checksum")
        return self


class Head(_ManifestEntry):
    """What `manifest.json` says."""

    format: Literal["shardwise-checkpoint"] = FORMAT
    version: Literal[1] = VERSION
    # Before everything that a user gives: the first match of `_SUM` in the file is this one, whatever extra says.
    checksum: str = _NO_SUM
    """xxh3_64 of the file itself, its own sixteen digits being zeros."""
    id: str
    """Tells this attempt to save from others; the names of its files begin with it."""
    written_at: str
    """Date and time of the commit (ISO 8601, UTC)."""
    step: int | None
    layout: str
    """The layout that wrote it, in words."""
    world_size: int = Field(ge=1)
    """Number of ranks that wrote."""
    file_layout: Literal["pieces", "whole"]
    block_bytes: int = Field(ge=16, le=MAX_BLOCK_BYTES, multiple_of=16)
    """A multiple of the bytes of every element."""
    num_tensors: int = Field(ge=0)
    num_bytes: int = Field(ge=0)
    """Bytes of all tensors."""
    files: list[FileEntry]
    """The data files; pieces name them by position in this list."""
    tables: list[FileEntry]
    aliases: dict[str, str]
    extra: dict[str, Any]
    settings: dict[str, Any]

    def pack(self) -> bytes:
        """As the bytes of `manifest.json`."""
        text = json.dumps(self.model_dump(), indent=1).encode()
        digits = checksum(text).hex().encode()
        # As many digits as there were zeros, so no byte moves. The
        # first match is the field itself: it is dumped first.
        return text.replace(_NO_SUM.encode(), b"xxh3_64:" + digits, 1)

    @classmethod
    def unpack(cls, data: bytes, *, location: str) -> "Head":
        """From the bytes of `manifest.json`, after its own checksum. Raises CheckpointError, which names `location`."""
        found = _SUM.search(data)
        if found is None:
            raise _damaged(location, "it does not hold its own checksum")
        zeroed = data[: found.start(1)] + b"0" * 16 + data[found.end(1) :]
        if checksum(zeroed).hex().encode() != found.group(1):
            raise _damaged(location, "its bytes do not have the checksum that it states")
        try:
            values = json.loads(data)
            # Before the fields are looked at, which are others in another version: "damaged" would be the wrong word.
            if isinstance(values, dict) and values.get("format") == FORMAT and values.get("version") != VERSION:
                raise CheckpointError(
                    f"{location} has format version {values.get('version')!r}, and this shardwise reads version "
                    f"{VERSION}; read it with a newer shardwise"
                )
            return cls.model_validate(values)
        except (ValueError, RecursionError) as error:  # pydantic and json raise kinds of these
            raise _damaged(location, str(error)) from error


_Index: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INDEX)]
_Indices: TypeAlias = list[_Index]


class _PieceRow(TypedDict):
    file: _Index
    start: _Index
    xxh3: NotRequired[str]
    offset: NotRequired[_Indices]
    shape: NotRequired[_Indices]
    run: NotRequired[tuple[_Index, _Index]]


class _TensorRow(TypedDict):
    name: str
    dtype: str
    shape: _Indices
    pieces: list[_PieceRow]


_TABLE = TypeAdapter(list[_TensorRow])


def pack_tables(tensors: Sequence[StoredTensor], files: Sequence[str]) -> list[bytes]:
    """The tables of `tensors`, whose pieces are in `files`; an empty table when there are none."""
    number_of = {name: number for number, name in enumerate(files)}
    rows = [_tensor_row(tensor, number_of) for tensor in tensors]
    starts = range(0, max(1, len(rows)), TENSORS_PER_TABLE)
    return [_lines(rows[start : start + TENSORS_PER_TABLE]) for start in starts]


def _lines(rows: Sequence[_TensorRow]) -> bytes:
    """One tensor a line: it can be read by eye, and compared by line."""
    return ("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n").encode()


def _tensor_row(tensor: StoredTensor, number_of: Mapping[str, int]) -> _TensorRow:
    pieces = [_piece_row(each, number_of) for each in tensor.pieces]
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "pieces": pieces}


def _piece_row(stored: StoredPiece, number_of: Mapping[str, int]) -> _PieceRow:
    piece = stored.piece
    row: _PieceRow = {"file": number_of[stored.file], "start": stored.start}
    if stored.checksums is not None:
        row["xxh3"] = stored.checksums.hex()
    # Left out where it says nothing: a million pieces make 200 MB of tables as it is.
    if piece.shape != piece.global_shape:
        row |= {"offset": list(piece.offset), "shape": list(piece.shape)}
    if piece.run is not None:
        row["run"] = (piece.run.start, piece.run.stop)
    return row


def unpack_tables(tables: Iterable[bytes], files: Sequence[str], *, block_bytes: int) -> dict[str, StoredTensor]:
    """The tensors of tables, by name. Raises errors of many kinds for what is no table."""
    tensors: dict[str, StoredTensor] = {}
    for table in tables:
        for row in _TABLE.validate_json(table):
            if row["name"] in tensors:
                raise ValueError(f"{row['name']} is listed twice")
            tensors[row["name"]] = _stored_tensor(row, files, block_bytes)
    return tensors


def contents_of(head: Head, tables: Sequence[bytes], *, folder: str, location: str) -> Contents:
    """What a save holds, from its head and its tables, which have been verified. Raises CheckpointError.

    `folder` is put before the names of files, so that they are names in the store.
    """
    sizes = {folder + entry.name: entry.bytes for entry in head.files}
    try:
        tensors = unpack_tables(tables, [folder + entry.name for entry in head.files], block_bytes=head.block_bytes)
        if len(tensors) != head.num_tensors:
            raise ValueError(f"{head.num_tensors} tensors are announced and {len(tensors)} listed")
        _check_places(tensors.values(), sizes)
    # A row may name a file or a dtype that there is not, or a box outside its tensor.
    except (ValidationError, PlanError, IndexError, KeyError, ValueError) as error:
        raise _damaged(location, in_words(error)) from error
    return Contents(
        format="shardwise",
        location=location,
        tensors=tensors,
        file_sizes=sizes,
        file_heads={folder + entry.name: (entry.head_bytes, bytes.fromhex(entry.checksum)) for entry in head.files},
        block_bytes=head.block_bytes,
        # An alias of nothing names nothing.
        aliases={alias: name for alias, name in head.aliases.items() if name in tensors and alias not in tensors},
        settings=head.settings,
        extra=head.extra,
        step=head.step,
        layout=head.layout,
        # What is said of optimizers whose parameters are numbered.
        notes=tuple(str(each.get("note", "")) for each in head.settings.get(NUMBERED, ())),
        manifest=folder + MANIFEST,
    )


def is_file_name(name: str) -> bool:
    """Whether a name that stands in a file can be the name of another file in its folder."""
    try:
        # A lone surrogate, which JSON can hold, is no file name that an operating system takes.
        name.encode()
    except UnicodeEncodeError:
        return False
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _check_places(tensors: Iterable[StoredTensor], sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless every piece has checksums and is within its file, with room for the other pieces there.

    So tensors never take more memory than the files have bytes.
    """
    # Readers make room for what a table announces, so the sum
    # counts: a hundred pieces may not share the bytes of one.
    left = dict(sizes)
    for tensor in tensors:
        for stored in tensor.pieces:
            if stored.checksums is None:
                raise ValueError(f"{tensor.name} has a piece without checksums")
            num_bytes = stored.num_bytes
            left[stored.file] -= num_bytes
            if stored.start + num_bytes > sizes[stored.file] or left[stored.file] < 0:
                raise ValueError(
                    f"{stored.piece} has {num_bytes} bytes from byte {stored.start} of {stored.file} by the manifest; "
                    f"with the other pieces this exceeds the {sizes[stored.file]} bytes of the file"
                )


def _stored_tensor(row: _TensorRow, files: Sequence[str], block_bytes: int) -> StoredTensor:
    name, dtype, shape = row["name"], row["dtype"], tuple(row["shape"])
    itemsize = ITEMSIZE_BYTES[dtype]
    if not can_exist(shape, itemsize):
        raise ValueError(f"{name} has a shape of {len(shape)} dims that no tensor has")
    pieces = []
    for each in row["pieces"]:
        piece = Piece(
            name=name,
            dtype=dtype,
            global_shape=shape,
            offset=each.get("offset"),
            shape=each.get("shape"),
            run=each.get("run"),
        )
        sums = bytes.fromhex(each["xxh3"]) if "xxh3" in each else None
        # Rounded up: the last block of a piece is shorter.
        if sums is not None and len(sums) != CHECKSUM_BYTES * -(-piece.num_elements * itemsize // block_bytes):
            raise ValueError(f"{piece} has {len(sums) // CHECKSUM_BYTES} checksums, which does not fit its size")
        pieces.append(StoredPiece(piece=piece, file=files[each["file"]], start=each["start"], checksums=sums))
    return StoredTensor(name=name, dtype=dtype, shape=shape, pieces=tuple(pieces))


def _damaged(location: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the manifest of {location} is damaged: {why}; nothing was read from it. Take an older save (step=..., "
        "--step), or get a good copy"
    )


_KIND, _ITEMS = "shardwise", "items"

_KINDS: Mapping[str, type[dict[Any, Any]]] = MappingProxyType({"dict": dict, "Counter": Counter})

_SCALARS = (str, int, float, bool, type(None))


def packed(value: Any, what: str) -> Any:
    """`value` as JSON values. Raises CheckpointError, which names every place, for what would not come back as it is.

    Tuples come back as lists, and dicts of other kinds than Counter as dicts.
    """
    problems: list[str] = []
    try:
        result = _packed(value, what, problems)
        if not problems:
            # Some values fail here only, such as whole numbers of more than 4,300 digits.
            json.dumps(result)
    except (RecursionError, TypeError, ValueError) as error:
        problems = [f"{what} cannot be written as JSON: {error}"]
    if problems:
        raise CheckpointError(*problems)
    return result


def unpacked(value: Any) -> Any:
    """What `packed` was given. Raises CheckpointError for what it has never given."""
    try:
        return _unpacked(value)
    # json reads deeper than Python calls go.
    except RecursionError as error:
        raise CheckpointError(f"extra is nested too deeply: {error}") from error


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    # Contents of other formats come this way too, so an object with these keys need not be ours.
    if value.keys() == {_KIND, _ITEMS} and _are_items(value):
        items = {key: _unpacked(each) for key, each in value[_ITEMS]}
        # The kind comes from a table, and never from the name in the file.
        return items if value[_KIND] == "dict" else _KINDS[value[_KIND]](items)
    return {key: _unpacked(each) for key, each in value.items()}


def _are_items(value: Mapping[str, Any]) -> bool:
    """Whether an object is a dict that `packed` has written, and not one that another program gave these keys."""
    kind, items = value[_KIND], value[_ITEMS]
    return (
        isinstance(kind, str)
        and kind in _KINDS
        and isinstance(items, list)
        and all(isinstance(each, list) and len(each) == 2 and isinstance(each[0], _SCALARS) for each in items)
    )


def _packed(value: Any, place: str, problems: list[str]) -> Any:
    # A number of numpy comes back as the number of Python that it is equal to, if there is one.
    if isinstance(value, np.generic) and type(plain := value.item()) in _SCALARS:
        return plain
    if isinstance(value, list | tuple):
        return [_packed(each, f"{place}[{at}]", problems) for at, each in enumerate(value)]
    if isinstance(value, dict):
        # The exact type: an enum or a number of numpy would come back as the plain kind that it derives from.
        if strange := [key for key in value if type(key) not in _SCALARS]:
            problems += [
                f"{place} has the key {key!r}, a {type(key).__name__}; give keys that are strings, numbers or None"
                for key in strange
            ]
        items = [[key, _packed(each, f"{place}[{key!r}]", problems)] for key, each in value.items()]
        kind = "Counter" if isinstance(value, Counter) else "dict"
        # A dict of the user with just our two keys is packed too: else it would come back as something else.
        plain = kind == "dict" and value.keys() != {_KIND, _ITEMS} and all(isinstance(key, str) for key in value)
        return dict(items) if plain else {_KIND: kind, _ITEMS: items}
    if type(value) not in _SCALARS:
        hint = "give JSON values"
        if isinstance(value, torch.Tensor):
            hint = "save tensors as part of the state" + (", or give the number: item()" if value.dim() == 0 else "")
        elif isinstance(value, np.ndarray):
            hint = "give a list: tolist()"
        numpys = " of numpy" if isinstance(value, np.generic) else ""
        problems.append(f"{place} is a {type(value).__name__}{numpys}, which JSON cannot hold; {hint}")
    return value
