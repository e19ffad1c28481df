"""Archive sums: bytes of archives of `torch.save`, compared with the CRC-32 of each part in their directories.

A file has one archive, or as data of torch.distributed.checkpoint several, one behind the other:

    parts, directory, end record | parts, directory, end record | parts, directory, end record
                                 ^ first byte of the last archive, as its directory says

So archives are found from the last one on, without metadata.
"""

import zlib
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.checkpoint.formats.torch_files.zip_parts import END, END_SIGNATURE, SIGNATURE, Read, ZipParts
from shardwise.errors import CheckpointError

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
    return read(0, min(size, len(SIGNATURE))) == SIGNATURE or _ends(read, size)


def check_archives(read: Read, size: int) -> Iterator[PartCheck]:
    """Read all parts of all archives of a file, from its last archive to its first.

    Raises CheckpointError for a directory that is damaged; what is before it cannot be found then.
    """
    end = size
    while end:
        if not _ends(read, end):
            raise CheckpointError(f"byte {end:,} is not the end of an archive of torch.save")
        archive = ZipParts(read, end)
        for name in archive.names():
            start, num_bytes = archive.place(name)
            found = 0
            for at in range(start, start + num_bytes, _CHUNK_BYTES):
                found = zlib.crc32(read(at, min(_CHUNK_BYTES, start + num_bytes - at)), found)
            yield PartCheck(name, start, num_bytes, archive.is_sum_of(name, found))
        end = archive.start


def _ends(read: Read, end: int) -> bool:
    """Whether an archive ends before the byte `end`."""
    return end >= END.size and read(end - END.size, len(END_SIGNATURE)) == END_SIGNATURE
