"""Archives: tensors as `torch.save` writes them, filled window by window.

An archive is a zip file without compression. Where everything in it is follows from shapes alone, apart from checksums:

    PK.. data.pkl | pickle | PK.. byteorder | little | PK.. version | 3 | PK.. data/0 | elements | crc | ... | directory
                      ^ names data/0                                                    ^ after a multiple of 64 bytes

One file may have several archives, one behind the other, as `torch.distributed.checkpoint` has its tensors. All numbers
are of 64 bits, in small archives too. The formats: torch/serialization.py, and APPNOTE.TXT of PKWARE on zip files.

Not by `zipfile`, which knows where a part is once it has written those before. Here each has its place, and the file
its size, before a byte is read. Nor does that write numbers of 64 bits everywhere, by which places follow from shapes.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.formats.torch_files.pickles import MadeObject, Named, Persistent, pickled
from shardwise.checkpoint.formats.torch_files.saved_values import STORAGES
from shardwise.checkpoint.safetensors_files import JoinedWrites
from shardwise.checkpoint.stores import Writer
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece
from shardwise.space.boxes import row_major_strides

_FOLDER = "archive/"
_ALIGNMENT = 64
"""Of elements in the file, as torch.save has them."""
_CHUNK_BYTES = 1 << 20
"""So much is summed and written at a time: it stays in the cache between the two."""
_UNKNOWN = 0xFFFFFFFF
"""Stands for a number of 64 bits that is elsewhere."""
_STORAGES = MappingProxyType({dtype: kind for kind, dtype in reversed([*STORAGES.items()])})
"""Newer dtypes have no class of storages: theirs are bytes."""
_ORDERED = Named("collections", "OrderedDict")


def ordered(pairs: Sequence[tuple[Any, Any]] = ()) -> MadeObject:
    """An OrderedDict, as a value to be pickled."""
    return MadeObject(of=_ORDERED, args=(), pairs=list(pairs))


def saved_tensor(number: int, piece: Piece) -> MadeObject:
    """A piece of an archive, as torch.save pickles a tensor: its storage is the archive's part of this number.

    The tensor has the shape of the piece's box, or is flat where that is a run.
    """
    count = piece.num_elements
    shape = piece.shape if piece.run is None else (count,)
    kind = _STORAGES.get(piece.dtype)
    holder = Named("torch", kind) if kind else Named("torch.storage", "UntypedStorage")
    size = count if kind else count * itemsize_bytes(piece.dtype)
    place = Persistent(("storage", holder, str(number), "cpu", size))
    args = (place, 0, shape, row_major_strides(shape), False, ordered())
    if kind:
        return MadeObject(of=Named("torch._utils", "_rebuild_tensor_v2"), args=args)
    return MadeObject(of=Named("torch._utils", "_rebuild_tensor_v3"), args=(*args, Named("torch", piece.dtype), None))


def pickled_tensor(piece: Piece) -> bytes:
    """The pickle of an archive that has one piece; see `saved_tensor`."""
    return _pickled_tensor(piece.dtype, piece.shape if piece.run is None else (piece.num_elements,))


@lru_cache(maxsize=4096)
def _pickled_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    # Models have few kinds of tensors, and many of each.
    return pickled(saved_tensor(0, Piece(name="", dtype=dtype, global_shape=shape)))


class Archive:
    """One archive: a pickle, and the elements of pieces that it names by their numbers."""

    __slots__ = ("_parts", "num_bytes", "pieces")

    def __init__(self, value: Any, pieces: Sequence[Piece] = ()) -> None:
        """value: see `pickled`, or its bytes; the piece of number n is in it as `saved_tensor(n, piece)`."""
        self.pieces = tuple(pieces)
        sizes = tuple(piece.num_elements * itemsize_bytes(piece.dtype) for piece in self.pieces)
        # Models have few kinds of tensors, and many of each; other values are as large as they are.
        known = _laid_out_alike(value, sizes) if isinstance(value, bytes) else _laid_out(pickled(value), sizes)
        self._parts, self.num_bytes = known
        """`num_bytes`: of the whole archive."""

    def frames(self, sums: Sequence[int]) -> Iterator[bytes]:
        """What is before each piece, and behind the last.

        sums: a list to which the checksum (CRC-32) of a piece has been added when what is behind it is asked for.
        """
        data = bytearray()
        known: list[int] = []
        for part in self._parts:
            if part.data is not None:
                known.append(zlib.crc32(part.data))
                data += part.header() + part.data + part.descriptor(known[-1])
                continue
            yield bytes(data + part.header())
            data = bytearray(part.descriptor(sums[-1]))
        sizes = len(self.pieces)
        yield bytes(data + _directory(self._parts, [*known, *(sums[-sizes:] if sizes else ())]))


def _laid_out(value: bytes, sizes: tuple[int, ...]) -> "tuple[list[_ArchivePart], int]":
    """The parts of an archive of a pickle and of pieces with so many bytes, and the bytes of all."""
    fixed = [("data.pkl", value), ("byteorder", b"little"), ("version", b"3\n")]
    at = 0
    parts: list[_ArchivePart] = []
    for name, data in fixed:
        parts.append(_ArchivePart(name, at, len(data), data))
        at = parts[-1].end
    for number, size in enumerate(sizes):
        parts.append(_ArchivePart(f"data/{number}", at, size, None))
        at = parts[-1].end
    return parts, at + len(_directory(parts, [0] * len(parts)))


_laid_out_alike = lru_cache(maxsize=4096)(_laid_out)


@dataclass(frozen=True, slots=True)
class _ArchivePart:
    """A part of an archive: header, bytes, and the descriptor with the checksum, which is known only then."""

    name: str
    start: int
    """First byte of its header."""
    size: int
    data: bytes | None
    """None: the elements of a piece."""

    @property
    def end(self) -> int:
        """The byte after its descriptor."""
        return self.start + len(self.header()) + self.size + _DESCRIPTOR.size

    def header(self) -> bytes:
        """What is before the bytes; it is as long as makes these aligned."""
        name = (_FOLDER + self.name).encode()
        long = struct.pack("<2H2Q", 1, 16, self.size, self.size)
        room = -(self.start + _HEADER.size + len(name) + len(long) + 4) % _ALIGNMENT
        # "FB" is what torch calls a field that only takes room.
        extra = long + struct.pack("<2H", 0x4246, room) + bytes(room)
        flags = 1 << 3  # sizes and checksum follow the bytes
        return _HEADER.pack(b"PK\3\4", 45, flags, 0, 0, 0, 0, _UNKNOWN, _UNKNOWN, len(name), len(extra)) + name + extra

    def descriptor(self, crc: int) -> bytes:
        """What is behind the bytes."""
        return _DESCRIPTOR.pack(b"PK\7\x08", crc, self.size, self.size)

    def entry(self, crc: int) -> bytes:
        """Its entry in the directory."""
        name = (_FOLDER + self.name).encode()
        extra = struct.pack("<2H3Q", 1, 24, self.size, self.size, self.start)
        counts = (len(name), len(extra), 0, 0, 0, 0, _UNKNOWN)
        return _ENTRY.pack(b"PK\1\2", 45, 45, 1 << 3, 0, 0, 0, crc, _UNKNOWN, _UNKNOWN, *counts) + name + extra


_HEADER = struct.Struct("<4s5H3L2H")
_DESCRIPTOR = struct.Struct("<4sL2Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")


def _directory(parts: Sequence[_ArchivePart], sums: Sequence[int]) -> bytes:
    entries = b"".join(part.entry(crc) for part, crc in zip(parts, sums, strict=True))
    start = parts[-1].end
    count = len(parts)
    long = _END_64.pack(b"PK\6\6", _END_64.size - 12, 45, 45, 0, 0, count, count, len(entries), start)
    locator = _LOCATOR.pack(b"PK\6\7", 0, start + len(entries), 1)
    end = _END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _UNKNOWN, _UNKNOWN, 0)
    return entries + long + locator + end


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A file of one or several archives."""

    archives: tuple[Archive, ...]

    @property
    def starts(self) -> list[int]:
        """First byte of each archive: multiples of 64, so that elements are aligned."""
        starts = []
        end = 0
        for each in self.archives:
            starts.append(end + -end % _ALIGNMENT)
            end = starts[-1] + each.num_bytes
        return starts

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return self.starts[-1] + self.archives[-1].num_bytes if self.archives else 0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """In the order of their bytes."""
        return tuple(piece for each in self.archives for piece in each.pieces)


class ArchiveFilling:
    """Fills a file of archives with the bytes of its pieces, in order, in chunks of any size."""

    def __init__(self, file: ArchiveFile, writer: Writer) -> None:
        self._writes = JoinedWrites(writer)
        self._sums: list[int] = []
        self._sum = 0
        self._sizes = iter([piece.num_elements * itemsize_bytes(piece.dtype) for piece in file.pieces])
        self._frames = self._framed(file)
        self._left = 0
        self._begin()

    def write(self, data: memoryview) -> None:
        """Append the next bytes."""
        start = 0
        while start < len(data):
            part = data[start : start + min(self._left, _CHUNK_BYTES)]
            self._sum = zlib.crc32(part, self._sum)
            self._writes.write(part)
            self._left -= len(part)
            start += len(part)
            if not self._left:
                self._sums.append(self._sum)
                self._begin()

    def flush(self) -> None:
        """Hand everything to the writer."""
        self._writes.flush()

    def _begin(self) -> None:
        """Write what is before the next piece that has elements, or behind the last piece."""
        self._writes.write(memoryview(next(self._frames)))
        self._sum = 0
        while (size := next(self._sizes, None)) == 0:
            self._sums.append(0)
            self._writes.write(memoryview(next(self._frames)))
        self._left = size or 0

    def _framed(self, file: ArchiveFile) -> Iterator[bytes]:
        data = b""
        end = 0
        for start, archive in zip(file.starts, file.archives, strict=True):
            data += bytes(start - end)
            frames = archive.frames(self._sums)
            for _ in archive.pieces:
                yield data + next(frames)
                data = b""
            data += next(frames)
            end = start + archive.num_bytes
        yield data
