"""A file that takes the place of another in one act: whoever reads sees the old one or the new one, whole."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.stores import Writer


@contextlib.contextmanager
def replacing(path: Path, *, num_bytes: int) -> Iterator[Writer]:
    """Takes the bytes of a file, which has its name when all are there and durable. Raises OSError."""
    hidden = f".{path.name}.new"
    with contextlib.suppress(FileNotFoundError):  # of a process that was killed
        os.unlink(path.parent / hidden)
    with LocalStore(path.parent).write(hidden, num_bytes=num_bytes) as writer:
        yield writer
    os.replace(path.parent / hidden, path)
