"""The one protocol through which checkpoints touch storage. Implementations: `LocalStore`, `FsspecStore`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

__all__ = ["Reader", "Store", "Writer"]


class Reader(Protocol):
    """One file, open for reading at any place. Safe to call from several threads."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start` on; raises EOFError when the file ends before."""

    def close(self) -> None:
        """Give the file back."""


class Writer(Protocol):
    """A new file, written from front to back. Leaving its context without an error makes it durable."""

    def write(self, data: memoryview) -> None:
        """Append; `data` may change as soon as this returns."""


class Store(Protocol):
    """A folder of files under names such as "save-00000001/manifest.json".

    Folders exist while they hold a file: they need no making, and go with their last file. All failures are OSError
    (FileNotFoundError, FileExistsError, PermissionError, ... with `strerror`) or EOFError. Names that could lead out of
    the folder raise ValueError.
    """

    @property
    def location(self) -> str:
        """The path or address of the folder, for messages."""

    @property
    def parallel_reads(self) -> int:
        """How many reads are best under way at a time; 1 where they cost no waiting."""

    def names(self, folder: str = "") -> Iterator[str]:
        """Names of all files at any depth below `folder` ("" is the whole store), sorted; none if there is nothing."""

    def open(self, name: str) -> Reader:
        """Open a file for reading; raises FileNotFoundError."""

    def write(self, name: str, *, num_bytes: int) -> AbstractContextManager[Writer]:
        """Begin a new file of `num_bytes` bytes under a name that is not in use; it is durable when the context ends.

        Raises FileExistsError for a name in use, and ValueError when other than `num_bytes` bytes were written. When
        the context ends by an error the file may stay, in parts.
        """

    def create(self, name: str, data: bytes) -> None:
        """Make a whole, durable file in one atomic act; raises FileExistsError, and changes nothing, if there is one.

        Of several that create one name at a time, exactly one succeeds. Nobody ever sees the file in parts.
        """

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens when it is not there. It is durable before any later delete is."""
