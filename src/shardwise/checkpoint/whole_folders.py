"""Whole folders: files of another format, in a folder that is there with all of them or not at all."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.stores import Address, Store, Writer, reason
from shardwise.errors import CheckpointError

__all__ = ["PlannedFile", "check_folder", "write_folder"]


class PlannedFile(Protocol):
    """A file whose length is known before it is written."""

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""


F = TypeVar("F", bound=PlannedFile)


def check_folder(destination: Address) -> str:
    """The path of a folder that may be made there. Raises CheckpointError for one that holds something, and for others.

    Only local file systems can give a whole folder its name in one act.
    """
    if isinstance(destination, LocalStore):
        destination = destination.location
    # An object store has no folders, so a reader could see half of them.
    if not isinstance(destination, str | os.PathLike) or "://" in os.fspath(destination):
        where = destination if isinstance(destination, str) else getattr(destination, "location", destination)
        raise CheckpointError(
            f"{where} is no local folder, and only a local file system can create a folder in "
            "one act. Convert to a local folder and copy it, or convert to whole (--to whole)"
        )
    if not os.fspath(destination):
        raise CheckpointError("an empty path was given; name the folder to make")
    # The folder behind a link, because rename does not follow one.
    path = os.path.realpath(destination)
    _check_empty(path)
    return path


def write_folder(
    path: str, files: Mapping[str, F], fill: Callable[[F, Writer], object], finish: Callable[[Store], None]
) -> None:
    """Make the folder `path` with these files, whole or not at all, and durable.

    fill: writes the bytes of a file. finish: adds others, when these are there and before the folder gets its name.

    They are written to a hidden folder next to it, `.<name>.<8 hex digits>.new`, which gets its name at the end. A
    process that is killed leaves the hidden folder. Raises CheckpointError.
    """
    parent, name = os.path.split(path)
    # In the same parent, so in the same file system: only there rename is one act.
    temporary = os.path.join(parent, f".{name}.{secrets.token_hex(4)}.new")
    store = LocalStore(temporary)
    with _making(path, ""):
        os.makedirs(parent, exist_ok=True)
        os.mkdir(temporary)  # ours from here on: what an error leaves in it is removed with it
    try:
        for each, file in files.items():
            with _making(path, each), store.write(each, num_bytes=file.num_bytes) as writer:
                fill(file, writer)
        with _making(path, ""):
            finish(store)
        with _making(path, ""):
            os.rename(temporary, path)  # takes the place of an empty folder, and of nothing else
            # The files in it are durable by the store; the name of the folder is data of its parent.
            _sync(parent)
    # Also for KeyboardInterrupt: the tensors of a large model are not left on the disk under a hidden name.
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_empty(path: str) -> None:
    try:
        if not os.path.lexists(path):
            return
        if os.path.isdir(path):
            if not os.listdir(path):
                return
            what = "a folder that holds something"
        else:
            what = "a file"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be looked at: {reason(error)}") from error
    raise CheckpointError(f"{path} is {what}, which is left as it is; name a new folder, or an empty one")


@contextlib.contextmanager
def _making(path: str, file: str) -> Iterator[None]:
    """Say in our words what the file system refuses."""
    try:
        yield
    except (OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and not file:
            # Somebody has made it since the first look: the words for that say more than those of the system.
            _check_empty(path)
        where = os.path.join(path, file) if file else path
        raise CheckpointError(f"{where} cannot be written: {reason(error)}; nothing was made there") from error


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # file systems that have nothing to sync there
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
