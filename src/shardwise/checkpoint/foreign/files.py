"""Reading parts of files that somebody else wrote: whatever fails is a `CheckpointError` that names the file."""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError

__all__ = ["OpenFile", "about", "read_whole"]


@contextlib.contextmanager
def about(place: str) -> Iterator[None]:
    """Put the place before every problem that is raised within."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(*(f"{place}: {problem}" for problem in error.problems)) from error


class OpenFile:
    """A file that is open for reading. Raises `CheckpointError`, naming it, when it is missing or cannot be read."""

    def __init__(self, store: Store, name: str) -> None:
        self._place = f"{store.location}/{name}"
        try:
            self._reader = store.open(name)
        except FileNotFoundError:
            raise CheckpointError(f"{self._place} is missing") from None
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error

    @property
    def place(self) -> str:
        """The address of the file, for messages."""
        return self._place

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._reader.size

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes from the file; `CheckpointError` when it ends before."""
        if start + num_bytes > self.size:
            raise CheckpointError(
                f"{self._place} has {self.size:,} bytes, but {num_bytes:,} from byte {start:,} on are needed: it is "
                "truncated"
            )
        buffer = bytearray(num_bytes)
        try:
            self._reader.read_into(memoryview(buffer), start)
        except (OSError, EOFError) as error:
            raise self._unreadable(error) from error
        return bytes(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def _unreadable(self, error: Exception) -> CheckpointError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return CheckpointError(f"{self._place} cannot be read: {reason}")


def read_whole(store: Store, name: str, *, max_bytes: int) -> bytes:
    """Return a whole file, which is metadata and no longer than `max_bytes`."""
    with OpenFile(store, name) as file:
        if file.size > max_bytes:
            raise CheckpointError(
                f"{file.place} has {file.size:,} bytes; of such a file at most {max_bytes:,} are read"
            )
        return file.read(0, file.size)
