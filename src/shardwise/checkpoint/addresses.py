"""Addresses: where a checkpoint is, as users write it."""

import os
from typing import TypeAlias

from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.remote import FsspecStore
from shardwise.checkpoint.stores import Store
from shardwise.errors import CheckpointError

__all__ = ["Address", "store_of"]

Address: TypeAlias = str | os.PathLike[str] | Store
"""A folder, an address of fsspec ("s3://bucket/run"), or a store."""


def store_of(where: Address) -> Store:
    """The store of a path ("runs/a") or an address ("s3://bucket/runs/a"); a store is returned as it is."""
    if isinstance(where, str) and "://" in where:
        return FsspecStore(where)
    if not isinstance(where, str | os.PathLike):
        return where
    if not os.fspath(where):
        raise CheckpointError("an empty path was given; \".\" is the current folder")
    return LocalStore(where)
