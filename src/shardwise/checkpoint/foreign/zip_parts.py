"""Zip archives without compression: where each part is, from the two ends of the file.

    PK 3 4 | name | its bytes | PK 3 4 | name | its bytes | ... | directory: name, place, size of each | end record
             ^ header, and what pads it                                                                  ^ last bytes

Nothing is unpacked. What a directory may say and no writer of torch says is refused: compressed or encrypted parts,
links, paths that lead out, names twice, parts that overlap each other or the directory. So is a header that says
otherwise than the directory. The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

import bisect
import itertools
import stat
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from shardwise.errors import CheckpointError

__all__ = ["END", "END_64", "LOCATOR", "SIGNATURE", "Read", "ZipParts"]

SIGNATURE = b"PK\x03\x04"
"""The first bytes of an archive."""

Read = Callable[[int, int], bytes]
"""Reads (first byte, number of bytes) of what is an archive."""

_EDGE_BYTES = 4096
"""All but the elements of one tensor is so near to one of the ends, where an archive has one tensor."""
_MAX_COMMENT_BYTES = (1 << 16) - 1
_MAX_DIRECTORY_BYTES = 1 << 26
_MAX_NAME_BYTES = 512
_MAX_PART_BYTES = 1 << 28
"""Of a part that is read as a whole: a million tensors take less."""

END = struct.Struct("<4s4H2LH")
"""The end record: its last fields are bytes and first byte of the directory, and bytes of a comment."""
END_64 = struct.Struct("<4sQ2H2L4Q")
"""The same with numbers of 64 bits, before it."""
LOCATOR = struct.Struct("<4sLQL")
"""Between the two: where the one of 64 bits is."""
_ENTRY = struct.Struct("<4s4B4HL2L5H2L")
_HEADER = struct.Struct("<4s5H3L2H")
_UNKNOWN = 0xFFFFFFFF
"""Stands for a number that is in an extra field, of eight bytes."""
_UNKNOWNS = (0xFFFF, _UNKNOWN, _UNKNOWN)
_ENCRYPTED = 1 | 1 << 6 | 1 << 13
_SIZES_LATER = 1 << 3
"""The header was written before the sizes were known."""


class _Part(NamedTuple):
    header: int
    """First byte of its header."""
    size: int
    packed: int
    """Bytes in the file."""
    crc: int
    compressed: bool


class ZipParts:
    """The parts of an archive by name, without the folder that all of them are in.

    Raises `CheckpointError` for an archive that is damaged, or unlike those of torch.
    """

    def __init__(self, read: Read, size: int) -> None:
        """`size`: bytes of the archive."""
        self._read = read
        self._size = size
        # Two reads for all that is needed of a small archive: each is a request of its own where files are far.
        edge = min(size, _EDGE_BYTES)
        self._head = read(0, edge)
        self._tail = read(size - edge, edge) if size > edge else self._head
        try:
            self._parts, self._directory = self._listed()
        except (struct.error, UnicodeDecodeError) as error:
            _damaged(str(error))
        # In the order of the file, to find the part that follows.
        self._places = sorted((part.header, name) for name, part in self._parts.items())
        self._check_places()

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def names(self) -> list[str]:
        """The names of all parts, in the order of the file."""
        return [name for _, name in self._places]

    def part(self, name: str) -> bytes:
        """All bytes of a part, compared with its checksum."""
        start, size = self.place(name)
        if size > _MAX_PART_BYTES:
            raise CheckpointError(f"its part {name} has {size:,} bytes, and at most {_MAX_PART_BYTES:,} are read")
        data = self._bytes(start, size)
        if self.is_sum_of(name, zlib.crc32(data)) is False:
            _damaged(f"its part {name} does not have its checksum")
        return data

    def is_sum_of(self, name: str, crc: int) -> bool | None:
        """Whether the bytes of a part have this checksum by the directory; None where it has none."""
        recorded = self._parts[name].crc
        # Zero: torch.serialization.set_crc32_options(False) writes no checksums.
        return recorded == crc or (None if recorded == 0 else False)

    def place(self, name: str) -> tuple[int, int]:
        """The first byte of a part, and the number of its bytes."""
        if name not in self._parts:
            _damaged(f"it has no part {name}")
        part = self._parts[name]
        if part.compressed:
            # torch never compresses; a part that is would be read as elements byte by byte.
            raise CheckpointError(
                f"its part {name} is compressed, which torch.save never does; unpack it, and zip it again without "
                "compression (zip -0)"
            )
        # The directory does not say how long the header before the bytes is: torch pads it to align them.
        header = self._bytes(part.header, _HEADER.size + _MAX_NAME_BYTES)
        try:
            signature, _, flags, method, _, _, _, packed, size, name_bytes, extra_bytes = _HEADER.unpack_from(header)
        except struct.error as error:
            _damaged(str(error))
        own = header[_HEADER.size : _HEADER.size + name_bytes]
        if signature != SIGNATURE or own.partition(b"/")[2] != name.encode():
            raise CheckpointError(f"its directory gives a wrong place for its part {name}")
        later = flags & _SIZES_LATER and packed == size == 0
        if method or flags & _ENCRYPTED or not (later or {packed, size} <= {part.size, _UNKNOWN}):
            raise CheckpointError(f"its directory and its header of part {name} say different things")
        start = part.header + _HEADER.size + name_bytes + extra_bytes
        if start + part.size > self._next(part.header):
            raise CheckpointError(f"its part {name} ends after the next one begins, or after it")
        return start, part.size

    def _next(self, header: int) -> int:
        """Where what follows a part begins."""
        at = bisect.bisect_right(self._places, (header, chr(0x10FFFF)))
        return self._places[at][0] if at < len(self._places) else self._directory

    def _check_places(self) -> None:
        places = [*self._places, (self._directory, "")]
        for (start, name), (following, _) in itertools.pairwise(places):
            if start + _HEADER.size + len(name.encode()) + self._parts[name].packed > following:
                raise CheckpointError(f"its part {name} overlaps what follows it")

    def _listed(self) -> tuple[dict[str, _Part], int]:
        """The parts by name, and where the directory begins."""
        count, num_bytes, start, end = self._end_record()
        if num_bytes > _MAX_DIRECTORY_BYTES:
            _damaged(f"its directory has {num_bytes:,} bytes, and at most {_MAX_DIRECTORY_BYTES:,} are read")
        if start + num_bytes != end or count * _ENTRY.size > num_bytes:
            _damaged(f"its directory of {count:,} parts is not where its end says")
        data = self._bytes(start, num_bytes)
        parts: dict[str, _Part] = {}
        folders = set()
        at = 0
        for _ in range(count):
            at, path, part = _entry(data, at)
            folder, _, name = path.partition("/")
            folders.add(folder)
            if name in parts:
                raise CheckpointError(f"it has two parts {name}")
            parts[name] = part
        if at != num_bytes:
            _damaged(f"its directory has more than the {count:,} parts that it announces")
        if len(folders) > 1:
            raise CheckpointError(f"its parts are in {len(folders)} folders, where torch.save writes one")
        return parts, start

    def _end_record(self) -> tuple[int, int, int, int]:
        """Of the directory: the number of parts, bytes, first byte, and the byte after its last."""
        at = self._tail.rfind(b"PK\x05\x06")
        tail = self._tail
        if at < 0:
            # After it there may be a comment, which torch writes none of.
            num_bytes = min(self._size, _MAX_COMMENT_BYTES + END.size)
            tail = self._bytes(self._size - num_bytes, num_bytes)
            at = tail.rfind(b"PK\x05\x06")
        if at < 0:
            _damaged("it has no directory at its end")
        _, disk, first_disk, here, count, num_bytes, start, comment_bytes = END.unpack_from(tail, at)
        end = self._size - len(tail) + at
        if at + END.size + comment_bytes != len(tail) or disk or first_disk or here != count:
            _damaged("its end record does not fit the file")
        # torch writes the record of 64 bits always, a long archive needs it.
        long = self._end_record_64(end)
        if long is None:
            return count, num_bytes, start, end
        if any(
            said not in (each, unknown)
            for said, each, unknown in zip((count, num_bytes, start), long, _UNKNOWNS, strict=False)
        ):
            _damaged("its two end records say different things")
        return long

    def _end_record_64(self, end: int) -> tuple[int, int, int, int] | None:
        at = end - LOCATOR.size
        if at < 0 or (locator := self._bytes(at, LOCATOR.size))[:4] != b"PK\x06\x07":
            return None
        _, _, record, disks = LOCATOR.unpack(locator)
        if disks > 1 or record + END_64.size > at:
            _damaged("its end record does not fit the file")
        fields = END_64.unpack(self._bytes(record, END_64.size))
        signature, _, _, _, disk, first_disk, here, count, num_bytes, start = fields
        if signature != b"PK\x06\x06" or disk or first_disk or here != count:
            _damaged("its end record does not fit the file")
        return count, num_bytes, start, record

    def _bytes(self, start: int, num_bytes: int) -> bytes:
        """So many bytes, or fewer where the archive ends before."""
        num_bytes = max(0, min(num_bytes, self._size - start))
        if start + num_bytes <= len(self._head):
            return self._head[start : start + num_bytes]
        first = self._size - len(self._tail)
        if start >= first:
            return self._tail[start - first : start - first + num_bytes]
        return self._read(start, num_bytes)


def _entry(data: bytes, at: int) -> tuple[int, str, _Part]:
    """An entry of the directory: where the next one begins, the path in it, and the part."""
    fields = _ENTRY.unpack_from(data, at)
    signature, system, flags, method = fields[0], fields[2], fields[5], fields[6]
    crc, packed, size, name_bytes, extra_bytes, comment_bytes, disk = fields[9:16]
    attributes, header = fields[17:]
    at += _ENTRY.size
    path = data[at : at + name_bytes].decode()
    extra = data[at + name_bytes : at + name_bytes + extra_bytes]
    at += name_bytes + extra_bytes + comment_bytes
    if signature != b"PK\x01\x02" or at > len(data):
        _damaged("its directory is cut off, or no directory")
    shown = ascii(path)[1:-1]
    if name_bytes > _MAX_NAME_BYTES or "\0" in path:
        raise CheckpointError(f"it has a part with a name of {name_bytes} bytes, as torch.save writes none")
    if path.startswith(("/", "\\")) or ".." in path.replace("\\", "/").split("/") or path[1:2] == ":":
        raise CheckpointError(f"its part {shown} is outside of it")
    if system == 3 and stat.S_IFMT(attributes >> 16) not in (0, stat.S_IFREG):  # 3: Unix, whose modes these are
        raise CheckpointError(f"its part {shown} is a link or a device, and no file")
    size, packed, header = _long_numbers(extra, (size, packed, header))
    if flags & _ENCRYPTED:
        raise CheckpointError(f"its part {shown} is encrypted")
    if disk:
        _damaged("its parts are in several files")
    return at, path, _Part(header, size, packed, crc, bool(method) or packed != size)


def _long_numbers(extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """The three numbers of an entry, those that need eight bytes from its extra field."""
    found = list(numbers)
    at = 0
    while _UNKNOWN in found and at + 4 <= len(extra):
        kind, num_bytes = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            longs = iter(struct.unpack_from(f"<{num_bytes // 8}Q", extra, at + 4))
            found = [next(longs, each) if each == _UNKNOWN else each for each in found]
            break
        at += 4 + num_bytes
    return found[0], found[1], found[2]


def _damaged(why: str) -> NoReturn:
    raise CheckpointError(f"torch.save did not write it, or it is damaged: {why}")
