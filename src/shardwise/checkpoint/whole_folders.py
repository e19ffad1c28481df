"""Whole folders: files of another format, in a folder that is there with all of them or not at all.

a file system    files in a hidden folder          it gets the name of the folder, in one act
other stores     files, each whole when it is seen  `CLAIM` is there before all of them, and goes when they are there
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeAlias, TypeVar

from shardwise.checkpoint.local import LocalStore, make_folder, sync_folder
from shardwise.checkpoint.stores import Address, Store, Writer, delete_all, refusals, store_of
from shardwise.errors import CheckpointError

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{8}\.new|\.checkpoint-\d+\.new", re.DOTALL)
"""Names of folders in which a conversion, or a trainer, writes until all is there."""

CLAIM = ".shardwise.new"
"""In the folder of a store that is being written, or was when its writer died. One of several writers creates it."""

_PART = ".part"
"""Behind the names of files that are not whole yet. No program reads such files."""


class PlannedFile(Protocol):
    """A file whose length is known before it is written."""

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""


F = TypeVar("F", bound=PlannedFile)


Folder: TypeAlias = str | Store
"""The path of a folder that can get its name in one act, or a store that is the folder."""


def location_of(folder: Folder) -> str:
    """Its path or address."""
    return folder if isinstance(folder, str) else folder.location


def check_folder(destination: Address) -> Folder:
    """A folder that may be made there. Raises CheckpointError for one that holds something, and for others."""
    if isinstance(destination, LocalStore):
        destination = destination.location
    if not isinstance(destination, str | os.PathLike) or "://" in os.fspath(destination):
        store = store_of(destination)
        with refusals(f"{store.location} cannot be listed"):
            if next(store.names(), None) is not None:
                raise _refusal(store.location, "a folder that holds something")
        return store
    if not os.fspath(destination):
        raise CheckpointError("an empty path was given; name the folder to make")
    # The folder behind a link, because rename does not follow one.
    path = os.path.realpath(destination)
    _check_empty(path)
    return path


def _nothing(_: Store) -> Mapping[str, bytes]:
    return {}


def write_folder(
    folder: Folder,
    files: Mapping[str, F],
    fill: Callable[[F, Writer], object],
    small: Mapping[str, bytes],
    finish: Callable[[Store], Mapping[str, bytes]] = _nothing,
) -> None:
    """Make a folder with these files, whole or not at all, and durable. Raises CheckpointError.

    fill: writes the bytes of a file. small: others, which come after these and in their order; the last of them is the
    one without which nothing is a checkpoint. finish: looks at all of them, and gives more.
    """
    if isinstance(folder, str):
        _write_in_one_act(folder, files, fill, small, finish)
    else:
        _write_in_order(folder, files, fill, small, finish)


def _in_order(
    small: Mapping[str, bytes], finish: Callable[[Store], Mapping[str, bytes]], store: Store
) -> Iterator[tuple[str, bytes]]:
    """Small files, then what is made when all of them are there."""
    yield from small.items()
    yield from finish(store).items()


def _write_in_order(
    store: Store,
    files: Mapping[str, F],
    fill: Callable[[F, Writer], object],
    small: Mapping[str, bytes],
    finish: Callable[[Store], Mapping[str, bytes]],
) -> None:
    """Where a file appears when it is whole, and no folder has to be made.

    What a process leaves that is killed is no checkpoint, and in the way of the next one: nobody knows that it is dead.
    """
    large, others = list[str](), list[str]()
    with _making(store.location, CLAIM):
        try:
            store.create(CLAIM, secrets.token_hex(8).encode())
        except FileExistsError:
            raise _refusal(store.location, "a folder that another conversion writes, or has left when killed") from None
    try:
        # A writer that is done meanwhile has taken its claim away.
        with _making(store.location, ""):
            if list(store.names()) != [CLAIM]:
                raise _refusal(store.location, "a folder that holds something")
        for name, file in files.items():
            with _making(store.location, name), store.write(name, num_bytes=file.num_bytes) as writer:
                large.append(name)
                fill(file, writer)
        for name, data in _in_order(small, lambda store: _unclaimed(store, finish), store):
            with _making(store.location, name):
                store.create(name, data)
            others.append(name)
    except BaseException:
        with contextlib.suppress(OSError):
            # The last one first, so that at no instant a reader takes a part for the whole.
            for name in reversed(others):
                store.delete(name)
            delete_all(store, large)
            store.delete(CLAIM)
        raise


def _unclaimed(store: Store, finish: Callable[[Store], Mapping[str, bytes]]) -> Mapping[str, bytes]:
    """What `finish` gives, which reads the folder: it is one from here on."""
    with _making(store.location, CLAIM):
        store.delete(CLAIM)
    return finish(store)


def _write_in_one_act(
    path: str,
    files: Mapping[str, F],
    fill: Callable[[F, Writer], object],
    small: Mapping[str, bytes],
    finish: Callable[[Store], Mapping[str, bytes]],
) -> None:
    """On a file system.

    They are written to a hidden folder next to it, `.<name>.<8 hex digits>.new`, which gets its name at the end. A
    process that is killed leaves the hidden folder: no reader takes it, and the next one that writes to `path` removes
    it.
    """
    parent, name = os.path.split(path)
    with _making(path, ""):
        touched = make_folder(parent)
        _remove_dead(parent, name)
        temporary, lock = _begun(parent, name)
    store = LocalStore(temporary)
    try:
        for each, file in files.items():
            # A file has its size and its header from the start: under its name it would look whole, wherever somebody
            # moves it. What is in a folder of the format is nothing without the files at its top.
            begun = each if "/" in each else f"{each}{_PART}"
            with _making(path, each), store.write(begun, num_bytes=file.num_bytes) as writer:
                fill(file, writer)
        with _making(path, ""):
            for each in (each for each in files if "/" not in each):
                os.rename(f"{temporary}/{each}{_PART}", f"{temporary}/{each}")
            for each, data in _in_order(small, finish, store):
                store.create(each, data)
            sync_folder(temporary)
        with _making(path, ""):
            os.rename(temporary, path)  # takes the place of an empty folder, and of nothing else
            # The files in it are durable by the store; the name of a folder is data of its parent.
            for folder in dict.fromkeys([parent, *touched]):
                sync_folder(folder)
    # Also for KeyboardInterrupt: the tensors of a large model are not left on the disk under a hidden name.
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def is_unfinished(path: str) -> bool:
    """Whether a path leads into a folder that is being written, or was when its writer died."""
    return any(_UNFINISHED.fullmatch(part) for part in path.split("/"))


def _begun(parent: str, name: str) -> tuple[str, int]:
    """A new hidden folder, and the descriptor that holds its lock, which the kernel takes back from a dead process."""
    while True:
        # In the same parent, so in the same file system: only there rename is one act.
        temporary = os.path.join(parent, f".{name}.{secrets.token_hex(4)}.new")
        os.mkdir(temporary)  # ours from here on: what an error leaves in it is removed with it
        with contextlib.suppress(FileNotFoundError):  # another one that begins found it before it was locked
            lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # file systems without locks, on which nothing is removed either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(temporary):
                return temporary, lock
            os.close(lock)


def _remove_dead(parent: str, name: str) -> None:
    """Remove hidden folders for this name whose writers are dead."""
    hidden = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}\.new")
    for each in filter(hidden.fullmatch, os.listdir(parent)):
        with contextlib.suppress(OSError):  # removed meanwhile, or its writer is alive
            lock = os.open(os.path.join(parent, each), os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.join(parent, each))
            finally:
                os.close(lock)


def _check_empty(path: str) -> None:
    with refusals(f"{path} cannot be looked at"):
        if not os.path.lexists(path):
            return
        if os.path.isdir(path):
            if not os.listdir(path):
                return
            what = "a folder that holds something"
        else:
            what = "a file"
    raise _refusal(path, what)


def _refusal(path: str, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is {what}, which is left as it is; name a new folder, or an empty one")


def _making(path: str, file: str) -> contextlib.AbstractContextManager[None]:
    """Say in our words what the file system refuses."""

    def then(error: OSError | EOFError) -> str:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and not file:
            # Somebody has made it since the first look: the words for that say more than those of the system.
            _check_empty(path)
        return "; nothing was made there"

    return refusals(f"{os.path.join(path, file) if file else path} cannot be written", then)
