"""Data files of a save: laid out before a byte is written, then filled from front to back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from shardwise.checkpoint.blocks import BlockSums
from shardwise.checkpoint.contents import StoredPiece
from shardwise.checkpoint.safetensors_files import header, unique_keys
from shardwise.checkpoint.stores import Writer
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece

__all__ = ["DataFile", "FileFilling", "Sink", "lay_out"]

_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""What readers of safetensors files look for."""

_CHUNK_BYTES = 1 << 20
"""So much is hashed and written at a time: it stays in the cache between the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """What a data file will be."""

    pieces: tuple[Piece, ...]
    """In the order of their bytes."""
    header: bytes
    starts: tuple[int, ...]
    """First byte of each piece in the file."""
    sizes: tuple[int, ...]
    """Bytes of each piece."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(self.sizes)

    def stored(self, name: str, checksums: Sequence[bytes]) -> list[StoredPiece]:
        """The pieces as they lie in the file, which is called `name`."""
        return [
            StoredPiece(piece=piece, file=name, start=start, checksums=sums)
            for piece, start, sums in zip(self.pieces, self.starts, checksums, strict=True)
        ]


def lay_out(pieces: Sequence[Piece], *, metadata: Mapping[str, str] = _METADATA, empty: bool = False) -> DataFile:
    """The safetensors file with these pieces: wide elements first, so that all are aligned, else in the order given.

    `metadata` goes into its header. Pieces without elements are left out, unless `empty` says that they stay.
    """
    held = [piece for piece in pieces if piece.num_elements or empty]
    held.sort(key=lambda each: -itemsize_bytes(each.dtype))
    keys = unique_keys([each.name if each.whole else str(each) for each in held])
    shapes = [each.shape if each.run is None else (each.num_elements,) for each in held]
    entries = [(key, each.dtype, shape) for key, each, shape in zip(keys, held, shapes, strict=True)]
    head, starts = header(entries, metadata)
    return DataFile(
        pieces=tuple(held),
        header=head,
        starts=tuple(starts),
        sizes=tuple(each.num_elements * itemsize_bytes(each.dtype) for each in held),
    )


class Sink(Protocol):
    """What takes the bytes of a file's pieces, from front to back."""

    def write(self, data: memoryview) -> None:
        """Append the next bytes; `data` may change as soon as this returns."""


class FileFilling:
    """Fills a data file with the bytes of its pieces, in order, in chunks of any size; takes their checksums."""

    def __init__(self, file: DataFile, writer: Writer, *, block_bytes: int) -> None:
        self.checksums: list[bytes] = []
        """Of the pieces that are complete."""
        self._writer = writer
        self._sums = BlockSums(block_bytes)
        self._sizes = iter(file.sizes)
        self._left = next(self._sizes, 0)  # bytes of the piece at hand that are still to come
        self._small = bytearray(file.header)  # what waits to be written together

    def write(self, data: memoryview) -> None:
        """Append the next bytes."""
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._hash(chunk)
            if len(self._small) + len(chunk) < _CHUNK_BYTES:
                self._small += chunk
            else:
                self.flush()
                self._writer.write(chunk)

    def flush(self) -> None:
        """Hand everything to the writer."""
        if self._small:
            self._writer.write(memoryview(bytes(self._small)))
            self._small.clear()

    def _hash(self, chunk: memoryview) -> None:
        start = 0
        while start < len(chunk):
            part = chunk[start : start + self._left]
            self._sums.add(part)
            self._left -= len(part)
            start += len(part)
            if not self._left:
                self.checksums.append(self._sums.finish())
                self._left = next(self._sizes, 0)
