"""Checksums over blocks of bytes: a reader verifies what it needs without reading a whole piece."""

from collections.abc import Iterator

import xxhash

from shardwise.checkpoint.contents import CHECKSUM_BYTES
from shardwise.comm.digests import checksum


class BlockSums:
    """The checksums of a stream of bytes that comes in chunks of any size."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._done = bytearray()
        self._open = xxhash.xxh3_64()
        self._num_open_bytes = 0

    def add(self, data: memoryview) -> None:
        """Go on with the next bytes of the stream."""
        for part in _cut(data, self._block_bytes - self._num_open_bytes, self._block_bytes):
            # A whole block at once is hashed without the state of a stream, which is how large tensors come.
            if self._num_open_bytes == 0 and len(part) == self._block_bytes:
                self._done += checksum(part)
                continue
            self._open.update(part)
            self._num_open_bytes += len(part)
            if self._num_open_bytes == self._block_bytes:
                self._close()

    def finish(self) -> bytes:
        """The checksums of all blocks; the next stream may begin."""
        if self._num_open_bytes:
            self._close()
        sums = bytes(self._done)
        self._done.clear()
        return sums

    def _close(self) -> None:
        self._done += self._open.digest()
        self._open.reset()
        self._num_open_bytes = 0


def damaged_blocks(data: memoryview, checksums: bytes, *, first_block: int, block_bytes: int) -> list[int]:
    """The blocks of `data`, which begins with block `first_block`, whose checksum differs from the recorded one."""
    damaged = []
    for at, part in enumerate(_cut(data, block_bytes, block_bytes), first_block):
        if checksum(part) != checksums[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES]:
            damaged.append(at)
    return damaged


def _cut(data: memoryview, first: int, following: int) -> Iterator[memoryview]:
    """`data` in parts of `following` bytes, but the first has `first`."""
    start = 0
    stop = first
    while start < len(data):
        yield data[start:stop]
        start, stop = stop, stop + following
