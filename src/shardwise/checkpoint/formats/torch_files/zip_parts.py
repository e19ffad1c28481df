"""Zip archives without compression: where each part is, from the two ends of the file.

    PK 3 4 | name | its bytes | PK 3 4 | name | its bytes | ... | directory: name, place, size of each | end record
             ^ header, and what pads it                                                                  ^ last bytes

Python's `zipfile` reads the directory; nothing is unpacked. What a directory may say and no writer of torch says is
refused: compressed or encrypted parts, links, paths that lead out, names twice, parts that overlap each other or the
directory. So is a header that says otherwise than the directory.

Each part has a checksum (CRC-32) there. A file has one archive, or as data of torch.distributed.checkpoint several, one
behind the other. They are found from the last one on, without metadata:

    parts, directory, end record | parts, directory, end record | parts, directory, end record
                                 ^ first byte of the last archive, as its directory says
"""

import bisect
import io
import itertools
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from shardwise.errors import CheckpointError

SIGNATURE = b"PK\x03\x04"
"""The first bytes of an archive."""
_END_SIGNATURE = b"PK\x05\x06"
_END = struct.Struct("<4s4H2LH")
"""The end record: signature, two numbers of disks, twice the number of parts, and what `zipfile` reads."""

Read = Callable[[int, int], bytes]
"""Reads (first byte, number of bytes) of what is an archive."""

_EDGE_BYTES = 4096
"""All but the elements of one tensor is so near to one of the ends, where an archive has one tensor."""
_MAX_DIRECTORY_BYTES = 1 << 26
_MAX_NAME_BYTES = 512
_CHUNK_BYTES = 1 << 20
_MAX_FILL_BYTES = 63
_MAX_PART_BYTES = 1 << 28
"""Of a part that is read as a whole: a million tensors take less."""
_HEADER = struct.Struct("<4s5H3L2H")
_UNKNOWN = 0xFFFFFFFF
"""Stands for a number that is in an extra field, of eight bytes."""
_ENCRYPTED = 1 | 1 << 6 | 1 << 13
_SIZES_LATER = 1 << 3
"""The header was written before the sizes were known."""
_UTF8 = 1 << 11


class _Ranges(io.RawIOBase):
    """The bytes of an archive as a file. Its two ends are read at once.

    Two reads bring all that is needed of a small archive: each is a request of its own where files are far.
    """

    def __init__(self, read: Read, size: int) -> None:
        self._range, self._size, self._at = read, size, 0
        edge = min(size, _EDGE_BYTES)
        self._head = read(0, edge)
        self._tail = read(size - edge, edge) if size > edge else self._head

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (self._size if whence == io.SEEK_END else 0)
        if self._at < 0:
            raise OSError("before the first byte")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, num_bytes: int = -1) -> bytes:
        num_bytes = self._size - self._at if num_bytes < 0 else num_bytes
        if num_bytes > _MAX_DIRECTORY_BYTES:
            raise CheckpointError(f"its directory has {num_bytes:,} bytes; at most {_MAX_DIRECTORY_BYTES:,} are read")
        data = self.range(self._at, num_bytes)
        self._at += len(data)
        return data

    def range(self, start: int, num_bytes: int) -> bytes:
        """So many bytes, or fewer where the archive ends before."""
        num_bytes = max(0, min(num_bytes, self._size - start))
        if start + num_bytes <= len(self._head):
            return self._head[start : start + num_bytes]
        first = self._size - len(self._tail)
        if start >= first:
            return self._tail[start - first : start - first + num_bytes]
        return self._range(start, num_bytes)


class ZipParts:
    """The parts of an archive by name, without the folder that all of them are in.

    Raises `CheckpointError` for an archive that is damaged, or unlike those of torch.
    """

    def __init__(self, read: Read, size: int) -> None:
        """`size`: bytes of the archive, and of what is before it."""
        self._file = _Ranges(read, size)
        try:
            archive = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
            _damaged(str(error))
        listed = archive.infolist()
        end = self._file.range(size - _END.size - len(archive.comment), _END.size)
        signature, disk, first_disk, here, count, *_ = _END.unpack(end)
        if signature != _END_SIGNATURE or disk or first_disk or here != count or count not in (len(listed), 0xFFFF):
            _damaged("its end record does not fit the file")
        self._parts = {each.orig_filename.partition("/")[2]: each for each in listed}
        if len(self._parts) < len(listed):
            raise CheckpointError("it has two parts of one name")
        folders = {each.orig_filename.partition("/")[0] for each in listed}
        for each in listed:
            _check(each)
        if len(folders) > 1:
            raise CheckpointError(f"its parts are in {len(folders)} folders, where torch.save writes one")
        # In the order of the file, to find the part that follows.
        self._places = sorted((part.header_offset, name) for name, part in self._parts.items())
        self._directory = archive.start_dir
        places = [*self._places, (self._directory, "")]
        for (start, name), (following, _) in itertools.pairwise(places):
            if start + _HEADER.size + len(name) + self._parts[name].compress_size > following:
                raise CheckpointError(f"its part {name} overlaps what follows it")

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    @property
    def start(self) -> int:
        """The first byte of the archive."""
        return self._places[0][0] if self._places else self._directory

    def names(self) -> list[str]:
        """The names of all parts, in the order of the file."""
        return [name for _, name in self._places]

    def part(self, name: str) -> bytes:
        """All bytes of a part, compared with its checksum."""
        start, size = self.place(name)
        if size > _MAX_PART_BYTES:
            raise CheckpointError(f"its part {name} has {size:,} bytes, and at most {_MAX_PART_BYTES:,} are read")
        data = self._file.range(start, size)
        if self.is_sum_of(name, zlib.crc32(data)) is False:
            _damaged(f"its part {name} does not have its checksum")
        return data

    def is_sum_of(self, name: str, crc: int) -> bool | None:
        """Whether the bytes of a part have this checksum by the directory; None where it has none."""
        recorded = self._parts[name].CRC
        # Zero: torch.serialization.set_crc32_options(False) writes no checksums.
        return recorded == crc or (None if recorded == 0 else False)

    def place(self, name: str) -> tuple[int, int]:
        """The first byte of a part, and the number of its bytes."""
        if name not in self._parts:
            _damaged(f"it has no part {name}")
        part = self._parts[name]
        if part.compress_type or part.compress_size != part.file_size:
            # torch never compresses; a part that is would be read as elements byte by byte.
            raise CheckpointError(
                f"its part {name} is compressed, which torch.save never does; unpack it, and zip it again without "
                "compression (zip -0)"
            )
        # The directory does not say how long the header before the bytes is: torch pads it to align them.
        header = self._file.range(part.header_offset, _HEADER.size + _MAX_NAME_BYTES)
        try:
            signature, _, flags, method, _, _, _, packed, size, name_bytes, extra_bytes = _HEADER.unpack_from(header)
        except struct.error as error:
            _damaged(str(error))
        own = header[_HEADER.size : _HEADER.size + name_bytes]
        if signature != SIGNATURE or own != part.orig_filename.encode("utf-8" if part.flag_bits & _UTF8 else "cp437"):
            raise CheckpointError(f"its directory gives a wrong place for its part {name}")
        later = flags & _SIZES_LATER and packed == size == 0
        if method or flags & _ENCRYPTED or not (later or {packed, size} <= {part.file_size, _UNKNOWN}):
            raise CheckpointError(f"its directory and its header of part {name} say different things")
        start = part.header_offset + _HEADER.size + name_bytes + extra_bytes
        if start + part.file_size > self._next(part.header_offset):
            raise CheckpointError(f"its part {name} ends after the next one begins, or after it")
        return start, part.file_size

    def _next(self, header: int) -> int:
        """Where what follows a part begins."""
        at = bisect.bisect_right(self._places, (header, chr(0x10FFFF)))
        return self._places[at][0] if at < len(self._places) else self._directory


def _check(part: zipfile.ZipInfo) -> None:
    """Raise CheckpointError for a part as torch writes none."""
    path = part.orig_filename
    shown = ascii(path)[1:-1]
    if len(path) > _MAX_NAME_BYTES or "\0" in path:
        raise CheckpointError(f"it has a part with a name of {len(path)} bytes, as torch.save writes none")
    if path.startswith(("/", "\\")) or ".." in path.replace("\\", "/").split("/") or path[1:2] == ":":
        raise CheckpointError(f"its part {shown} is outside of it")
    # 3: Unix, whose modes these are.
    if part.create_system == 3 and stat.S_IFMT(part.external_attr >> 16) not in (0, stat.S_IFREG):
        raise CheckpointError(f"its part {shown} is a link or a device, and no file")
    if part.flag_bits & _ENCRYPTED:
        raise CheckpointError(f"its part {shown} is encrypted")


def _damaged(why: str) -> NoReturn:
    raise CheckpointError(f"torch.save did not write it, or it is damaged: {why}")


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
    begins = read(0, min(size, len(SIGNATURE))) == SIGNATURE
    return begins or (size >= _END.size and read(size - _END.size, len(_END_SIGNATURE)) == _END_SIGNATURE)


def check_archives(read: Read, size: int) -> Iterator[PartCheck]:
    """Read all parts of all archives of a file, from its last archive to its first.

    Raises CheckpointError for a directory that is damaged; what is before it cannot be found then.
    """
    stop = size
    while stop:
        # Archives that a conversion writes begin after a multiple of 64 bytes: zeros may fill up what is before.
        first = max(0, stop - _END.size - _MAX_FILL_BYTES)
        tail = read(first, stop - first)
        end = tail.rfind(_END_SIGNATURE) + _END.size
        if not _END.size <= end <= len(tail) or any(tail[end:]):
            raise CheckpointError(f"byte {stop:,} is not the end of an archive of torch.save")
        archive = ZipParts(read, first + end)
        for name in archive.names():
            start, num_bytes = archive.place(name)
            found = 0
            for at in range(start, start + num_bytes, _CHUNK_BYTES):
                found = zlib.crc32(read(at, min(_CHUNK_BYTES, start + num_bytes - at)), found)
            yield PartCheck(name, start, num_bytes, archive.is_sum_of(name, found))
        stop = archive.start
