"""Packed contents: what a checkpoint holds, in the bytes by which one rank tells the others.

    head       as JSON: all but the tensors
    names      of the tensors and the files, as JSON
    columns    numbers of all tensors, then of all pieces: each column in as few bytes as its largest number needs
    sums       of all pieces, one behind the other

A million pieces with a checksum each are some 20 MB. A rank makes the pieces of a tensor when it asks for them.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from struct import Struct
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shardwise.checkpoint.contents import CHECKSUM_BYTES, Contents, StoredPiece, StoredTensor
from shardwise.comm.digests import checksum
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.space import Piece, Run
from shardwise.space.pieces import known_part

_LENGTH = Struct("<Q")
"""Of each part, which follows."""

_IS_BOX, _IS_RUN, _HAS_SUMS = 1, 2, 4

_DTYPES = sorted(ITEMSIZE_BYTES)

_KINDS = "|u1", "<u2", "<u4", "<u8"
"""Numbers of columns, as numpy calls them."""

_Column = npt.NDArray[np.unsignedinteger[Any]]


def pack_contents(contents: Contents) -> bytes:
    """Contents as bytes, for ranks that do not read them themselves."""
    tensors = list(contents.tensors.values())
    stored = [each for tensor in tensors for each in tensor.pieces]
    boxes = [each.piece for each in stored if each.piece.shape != each.piece.global_shape]
    files = list(dict.fromkeys([*contents.file_sizes, *(each.file for each in stored)]))
    number_of = {name: number for number, name in enumerate(files)}
    head = {
        "format": contents.format,
        "location": contents.location,
        "file_sizes": dict(contents.file_sizes),
        "file_heads": {name: (size, sums.hex()) for name, (size, sums) in contents.file_heads.items()},
        "block_bytes": contents.block_bytes,
        "aliases": dict(contents.aliases),
        "settings": dict(contents.settings),
        "extra": dict(contents.extra),
        "step": contents.step,
        "layout": contents.layout,
        "notes": list(contents.notes),
        "left_state": contents.left_state,
        "manifest": contents.manifest,
    }
    columns = [
        [_DTYPES.index(each.dtype) for each in tensors],
        [len(each.shape) for each in tensors],
        [len(each.pieces) for each in tensors],
        list(chain.from_iterable(each.shape for each in tensors)),
        [number_of[each.file] for each in stored],
        [each.start for each in stored],
        [
            _IS_BOX * (each.piece.shape != each.piece.global_shape)
            + _IS_RUN * (each.piece.run is not None)
            + _HAS_SUMS * (each.checksums is not None)
            for each in stored
        ],
        [len(each.checksums or b"") // CHECKSUM_BYTES for each in stored],
        list(chain.from_iterable((*piece.offset, *piece.shape) for piece in boxes)),
        list(chain.from_iterable(each.piece.run for each in stored if each.piece.run is not None)),
    ]
    names = [[each.name for each in tensors], files]
    sums = b"".join(each.checksums or b"" for each in stored)
    parts = [json.dumps(head).encode(), _pressed(json.dumps(names).encode()), *map(_packed, columns), sums]
    text = b"".join(chain.from_iterable((_LENGTH.pack(len(part)), part) for part in parts))
    return checksum(text) + text


def unpack_contents(data: bytes) -> Contents:
    """What `pack_contents` was given. Raises ValueError for other bytes."""
    if checksum(memoryview(data)[CHECKSUM_BYTES:]) != data[:CHECKSUM_BYTES]:
        raise ValueError("they do not have their checksum")
    head_text, names_text, *packed, sums = _parts_of(memoryview(data)[CHECKSUM_BYTES:])
    head = json.loads(bytes(head_text))
    head["notes"] = tuple(head["notes"])
    head["file_heads"] = {name: (size, bytes.fromhex(sums)) for name, (size, sums) in head["file_heads"].items()}
    names, files = json.loads(_unpressed(names_text))
    dtypes, dims, counts, sizes, *columns = map(_unpacked, packed)
    table = _Table.of(columns, np.repeat(dims, counts), files, sums)
    tensors = {}
    first = dim = 0
    shape_of = sizes.tolist()
    for name, dtype, num_dims, count in zip(names, dtypes.tolist(), dims.tolist(), counts.tolist(), strict=True):
        shape = tuple(shape_of[dim : dim + num_dims])
        whole = Piece(name=name, dtype=_DTYPES[dtype], global_shape=shape)
        pieces = _TabledPieces(table, whole, range(first, first + count))
        tensors[name] = StoredTensor(name=name, dtype=whole.dtype, shape=shape, pieces=pieces)
        first, dim = first + count, dim + num_dims
    return Contents(**head, tensors=tensors)


def _pressed(data: bytes) -> bytes:
    return zlib.compress(data, 1)


def _unpressed(data: memoryview) -> bytes:
    try:
        return zlib.decompress(data)
    except zlib.error as error:  # no kind of ValueError
        raise ValueError(str(error)) from error


def _packed(numbers: Sequence[int]) -> bytes:
    kind = np.min_scalar_type(max(numbers, default=0))
    return kind.str.encode() + _pressed(np.array(numbers, dtype=kind).tobytes())


def _unpacked(column: memoryview) -> _Column:
    kind = bytes(column[:3]).decode()
    if kind not in _KINDS:
        raise ValueError(f"a column of {kind!r}")
    return np.frombuffer(_unpressed(column[3:]), dtype=np.dtype(kind))


def _parts_of(data: memoryview) -> Iterator[memoryview]:
    while data:
        (length,) = _LENGTH.unpack_from(data)
        data = data[_LENGTH.size :]
        yield data[:length]
        data = data[length:]


@dataclass(frozen=True, slots=True)
class _Table:
    """Numbers of all pieces, in the order of the tensors."""

    columns: Sequence[_Column]
    """The number of the file, the first byte in it, what there is besides, and how many checksums, by piece."""
    boxes: _Column
    runs: _Column
    places: Sequence[_Column]
    """By piece where its numbers begin in `boxes`, in `runs` and in `sums`."""
    files: Sequence[str]
    sums: memoryview

    @classmethod
    def of(cls, columns: Sequence[_Column], dims: _Column, files: Sequence[str], sums: memoryview) -> "_Table":
        """dims: how many dims the tensor of each piece has."""
        *of_pieces, boxes, runs = columns
        kinds, num_sums = of_pieces[2], of_pieces[3]
        widths = (
            np.where(kinds & _IS_BOX, 2 * dims.astype(np.int64), 0),
            np.where(kinds & _IS_RUN, 2, 0),
            CHECKSUM_BYTES * num_sums.astype(np.int64),
        )
        return cls(of_pieces, boxes, runs, [np.cumsum(each) - each for each in widths], files, sums)

    def pieces(self, whole: Piece, rows: range) -> Iterator[StoredPiece]:
        """The pieces of a tensor, which are in these rows."""
        num_dims = len(whole.global_shape)
        span = slice(rows.start, rows.stop)
        for file, start, kind, num_sums, box_at, run_at, sums_at in zip(
            *(column[span].tolist() for column in (*self.columns, *self.places)), strict=True
        ):
            box, run = whole.global_shape, None
            offset = whole.offset
            if kind & _IS_BOX:
                numbers = self.boxes[box_at : box_at + 2 * num_dims].tolist()
                offset, box = tuple(numbers[:num_dims]), tuple(numbers[num_dims:])
            if kind & _IS_RUN:
                run = Run(*self.runs[run_at : run_at + 2].tolist())
            sums = bytes(self.sums[sums_at : sums_at + CHECKSUM_BYTES * num_sums]) if kind & _HAS_SUMS else None
            piece = known_part(whole, offset, box, run)
            yield StoredPiece(piece=piece, file=self.files[file], start=start, checksums=sums)


class _TabledPieces(Sequence[StoredPiece]):
    """The pieces of a tensor, made when somebody asks for the first time."""

    __slots__ = ("_found", "_rows", "_table", "_whole")

    def __init__(self, table: _Table, whole: Piece, rows: range) -> None:
        self._table, self._whole, self._rows = table, whole, rows
        self._found: tuple[StoredPiece, ...] | None = None

    def _all(self) -> tuple[StoredPiece, ...]:
        if self._found is None:
            self._found = tuple(self._table.pieces(self._whole, self._rows))
        return self._found

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[StoredPiece]:
        return iter(self._all())

    @overload
    def __getitem__(self, at: int) -> StoredPiece: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[StoredPiece]: ...
    def __getitem__(self, at: int | slice) -> StoredPiece | Sequence[StoredPiece]:
        return self._all()[at]
