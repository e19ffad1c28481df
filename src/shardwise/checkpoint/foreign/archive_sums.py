"""Archive sums: bytes of archives of `torch.save`, compared with the CRC-32 of each part in their directories.

A file has one archive, or as data of torch.distributed.checkpoint several, one behind the other:

    parts, directory, end record | parts, directory, end record | parts, directory, end record
                                 ^ first byte of the last archive, as its end record says

So archives are found from the last one on, without metadata.
"""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.checkpoint.foreign.zip_parts import END, END_64, LOCATOR, SIGNATURE, Read, ZipParts
from shardwise.errors import CheckpointError

__all__ = ["PartCheck", "check_archives", "has_archives"]

_CHUNK_BYTES = 1 << 20


class PartCheck(NamedTuple):
    """A part of an archive, all of whose bytes were read."""

    name: str
    """In its archive: "data/0" is the storage of a tensor."""
    start: int
    """First byte in the file."""
    num_bytes: int
    good: bool | None
    """Whether it has its checksum; None: it has none (`torch.serialization.set_crc32_options(False)`)."""


def has_archives(read: Read, size: int) -> bool:
    """Whether a file of `size` bytes begins or ends as archives do."""
    return read(0, min(size, len(SIGNATURE))) == SIGNATURE or _start_of_last(read, size) is not None


def check_archives(read: Read, size: int) -> Iterator[PartCheck]:
    """Read all parts of all archives of a file, from its last archive to its first.

    Raises CheckpointError for a directory that is damaged; what is before it cannot be found then.
    """
    end = size
    while end:
        start = _start_of_last(read, end)
        if start is None:
            raise CheckpointError(f"byte {end:,} is not the end of an archive of torch.save")
        yield from _check_archive(read, start, end)
        end = start


def _check_archive(read: Read, begin: int, end: int) -> Iterator[PartCheck]:
    archive = ZipParts(lambda at, num_bytes: read(begin + at, num_bytes), end - begin)
    for name in archive.names():
        start, num_bytes = archive.place(name)
        found = 0
        for at in range(start, start + num_bytes, _CHUNK_BYTES):
            found = zlib.crc32(read(begin + at, min(_CHUNK_BYTES, start + num_bytes - at)), found)
        good = archive.is_sum_of(name, found)
        yield PartCheck(name, begin + start, num_bytes, good)


def _start_of_last(read: Read, end: int) -> int | None:
    """The first byte of the archive that ends before the byte `end`; None where none does."""
    tail = read(max(0, end - END.size), min(end, END.size))
    if len(tail) < END.size or tail[:4] != b"PK\x05\x06":
        return None
    *_, num_bytes, start, _ = END.unpack(tail)
    behind = end - END.size
    # torch writes the record of 64 bits always, right before its locator.
    long = LOCATOR.size + END_64.size
    if behind >= long and read(behind - LOCATOR.size, 4) == b"PK\x06\x07":
        behind -= long
        signature, *_, num_bytes, start = END_64.unpack(read(behind, END_64.size))
        if signature != b"PK\x06\x06":
            return None
    begin = behind - num_bytes - start
    return begin if 0 <= begin < end else None
