"""Addresses: where a checkpoint is, as users write it."""

import errno
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.remote import FsspecStore
from shardwise.checkpoint.stores import Reader, Store, Writer
from shardwise.errors import CheckpointError

__all__ = ["Address", "store_of"]

Address: TypeAlias = str | os.PathLike[str] | Store
"""A folder, an address of fsspec ("s3://bucket/run"), or a store."""


def store_of(where: Address) -> Store:
    """The store of a path ("runs/a") or an address ("s3://bucket/runs/a"); a store is returned as it is."""
    if isinstance(where, str) and "://" in where:
        return FsspecStore(where)
    if not isinstance(where, str | os.PathLike):
        if not hasattr(where, "names"):
            raise CheckpointError(f"{where!r} is a {type(where).__name__}; give a path, an address, or a Store")
        return where
    if isinstance(os.fspath(where), bytes) or "\0" in os.fspath(where):
        raise CheckpointError(f"{where!r} is no path; give one as text, without a zero byte")
    if not os.fspath(where):
        raise CheckpointError('an empty path was given; "." is the current folder')
    folder, name = os.path.split(os.path.abspath(where))
    return OneFile(LocalStore(folder), name) if os.path.isfile(where) else LocalStore(where)


class OneFile:
    """A store in which one file of another is to be seen, and nothing can be changed."""

    __slots__ = ("_name", "_store")

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def name(self) -> str:
        """The name of the file."""
        return self._name

    @property
    def location(self) -> str:
        """The folder of the file."""
        return self._store.location

    @property
    def parallel_reads(self) -> int:
        """See `Store.parallel_reads`."""
        return self._store.parallel_reads

    def names(self, folder: str = "") -> Iterator[str]:
        """See `Store.names`."""
        return iter([] if folder else [self._name])

    def open(self, name: str) -> Reader:
        """See `Store.open`."""
        if name != self._name:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return self._store.open(name)

    def write(self, name: str, *, num_bytes: int) -> AbstractContextManager[Writer]:
        """Refused: the address is a file."""
        raise self._refusal(name)

    def create(self, name: str, data: bytes) -> None:
        """Refused: the address is a file."""
        raise self._refusal(name)

    def delete(self, name: str) -> None:
        """Refused: the address is a file."""
        raise self._refusal(name)

    def _refusal(self, name: str) -> OSError:
        text = f"{self._name} is a file; name a folder to save to"
        return NotADirectoryError(errno.ENOTDIR, text, name)
