"""Stores: the one protocol through which checkpoints touch storage, and the store of what a user names.

A store is a folder of files. Saves need four acts of it, and only `create` has to be atomic:

    write   save-00000007/5e1f09ab-rank00000.safetensors    durable when it ends; a killed writer leaves parts of it
    write   save-00000007/5e1f09ab-tensors-00000.json
    create  save-00000007/manifest.json                     the commit: whole or absent, and one creator wins
    delete  save-00000006/manifest.json                     from here on save 6 is gone; its other files follow

`LocalStore`, `ObjectStore` and `FsspecStore` implement the protocol. Metadata is read through `OpenFile`, whose errors
name the file.
"""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from shardwise.checkpoint.hub import SCHEME as HUB
from shardwise.checkpoint.hub import HubStore
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.objects import SCHEMES, ObjectStore, has_obstore
from shardwise.checkpoint.remote import FsspecStore, is_configured
from shardwise.errors import CheckpointError

_MAX_METADATA_BYTES = 1 << 32
"""Of a manifest, a table or an index: a million pieces take 200 MB. They are read into memory as a whole."""


class Reader(Protocol):
    """One file, open for reading at any place. Safe to call from several threads.

    A reader may know a faster way, which is not needed:

        mapped(start, num_bytes) -> a context of the bytes in memory that takes no copy, or of None; see `LocalReader`
    """

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start` on; raises EOFError when the file ends before."""

    def close(self) -> None:
        """Give the file back."""


@contextlib.contextmanager
def mapped(reader: Reader, start: int, num_bytes: int) -> Iterator[memoryview | None]:
    """Bytes of a file in memory that takes no copy; None where there is no such memory, or where it is not safe."""
    if (known := getattr(reader, "mapped", None)) is None:
        yield None
        return
    with known(start, num_bytes) as memory:
        yield memory


class Writer(Protocol):
    """A new file, written from front to back. Leaving its context without an error makes it durable."""

    def write(self, data: memoryview) -> None:
        """Append; `data` may change as soon as this returns."""


_VALUE = "value:"


def value_name(data: bytes) -> str:
    """The name of a data file that has a few bytes, and is nowhere but in its name.

    Other programs keep some numbers in metadata that are tensors here, such as the count of an optimizer's updates.

    >>> value_name(b"\\x00\\x00@@")
    'value:00004040'
    """
    return f"{_VALUE}{data.hex()}"


def is_value(name: str) -> bool:
    """Whether `value_name` has made a name."""
    return name.startswith(_VALUE)


def open_data(store: "Store", name: str) -> Reader:
    """Open a data file of a checkpoint: one of its store, or one that is nowhere but in its name."""
    if not is_value(name):
        return store.open(name)
    try:
        return _ValueReader(bytes.fromhex(name.removeprefix(_VALUE)))
    except ValueError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from None


class _ValueReader:
    """A few bytes as a file."""

    __slots__ = ("_data", "size")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_into(self, buffer: memoryview, start: int) -> None:
        if start + len(buffer) > len(self._data):
            raise EOFError("the value has fewer bytes")
        buffer[:] = self._data[start : start + len(buffer)]

    def close(self) -> None:
        pass


class Store(Protocol):
    """A folder of files under names such as "save-00000001/manifest.json".

    Folders exist while they hold a file: they need no making, and go with their last file. All failures are OSError
    (FileNotFoundError, FileExistsError, PermissionError, ... with `strerror`) or EOFError. Names that could lead out of
    the folder raise ValueError.

    A store may know a faster way. These are used where they are there, and are not needed:

        folders() -> names of the folders directly in the store, by a listing that does not enter them
        sizes(folder) -> bytes of every file below a folder by its name in the store, from one listing
        delete_all(names) -> None; removes files, in any order, for good before anything that is deleted later
        check_creation(name) -> None; raises OSError where a second `create` of one name succeeds. Nothing is left
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

    # The size is announced so that a store can reserve the room, and refuse before the first byte.
    def write(self, name: str, *, num_bytes: int) -> AbstractContextManager[Writer]:
        """Begin a new file of `num_bytes` bytes under a name that is not in use. It is durable when the context ends.

        Raises FileExistsError for a name in use, and ValueError when other than `num_bytes` bytes were written. When
        the context ends by an error the file may stay, in parts.
        """

    def create(self, name: str, data: bytes) -> None:
        """Make a whole, durable file in one atomic act; raises FileExistsError, and changes nothing, if there is one.

        Of several that create one name at a time, exactly one succeeds. No reader ever sees the file in parts.
        """

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens when it is not there. It is durable before any later delete is."""


Address: TypeAlias = str | os.PathLike[str] | Store
"""A folder, an address ("s3://bucket/run"; to read also "hf://owner/name"), or a store."""


def store_of(where: Address) -> Store:
    """The store of a path ("runs/a") or an address ("s3://bucket/runs/a", "hf://owner/name"); a store stays itself."""
    if isinstance(where, str) and "://" in where:
        scheme = where.partition("://")[0]
        if scheme == HUB:
            return HubStore(where)
        # First the client that is made for it; else what fsspec and its packages reach, or were told how to reach.
        by_obstore = scheme in SCHEMES and has_obstore() and not is_configured(scheme)
        return ObjectStore(where) if by_obstore else FsspecStore(where)
    if not isinstance(where, str | os.PathLike):
        # Store is a protocol without a base class: one method tells a store from a dict or a model given by mistake.
        if not hasattr(where, "names"):
            raise CheckpointError(
                f"the path is a {type(where).__name__}. Give a path, an address or a store first, and a state after "
                "it: save(path, state), load(path, state)"
            )
        return where
    if isinstance(os.fspath(where), bytes) or "\0" in os.fspath(where):
        raise CheckpointError(f"{where!r} is no path; give one as text, without a zero byte")
    if not os.fspath(where):
        raise CheckpointError('an empty path was given; "." is the current folder')
    # abspath, because a bare "model.safetensors" has no folder to split off, and "runs/a/" no last name.
    folder, name = os.path.split(os.path.abspath(where))
    return OneFile(LocalStore(folder), name) if os.path.isfile(where) else LocalStore(where)


_SPLIT = ".gguf"
"""Of models in numbered files: who names one means all of them."""


class OneFile:
    """A store in which one file of another is seen, and nothing can be changed.

    A user who names `model.safetensors` means this file, and not the folder with whatever else it has.
    """

    __slots__ = ("_store", "name")

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.name = name

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
        return iter([] if folder else [self.name])

    def beside(self) -> set[str]:
        """The names of files in the same folder with the same ending, which `open` opens: parts of a split model."""
        end = os.path.splitext(self.name)[1]
        return {name for name in os.listdir(self.location) if name.endswith(end)} if end == _SPLIT else set()

    def open(self, name: str) -> Reader:
        """See `Store.open`."""
        if name != self.name and not (name.endswith(_SPLIT) and self.name.endswith(_SPLIT)):
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
        text = f"{self.name} is a file; name a folder to save to"
        return NotADirectoryError(errno.ENOTDIR, text, name)


class _ListedOnce:
    """A store whose names are asked for once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: list[str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def names(self, folder: str = "") -> Iterator[str]:
        """See `Store.names`."""
        if self._names is None:
            self._names = list(self._store.names())
        return iter([name for name in self._names if not folder or name.startswith(f"{folder}/")])


def listed_once(store: Store) -> Store:
    """A store as it is at its first listing, where each is a request: who recognises and reads asks again and again."""
    return store if store.parallel_reads == 1 else _ListedOnce(store)


def delete_all(store: Store, names: Sequence[str]) -> None:
    """Remove files, in any order; see `Store`."""
    if (of_store := getattr(store, "delete_all", None)) is not None:
        of_store(names)
        return
    for name in names:
        store.delete(name)


def sizes_of(store: Store, names: Collection[str], *, folder: str) -> dict[str, int | str]:
    """How many bytes files below a folder have, or why they cannot be seen."""
    if (listed := getattr(store, "sizes", None)) is not None:
        try:
            found = listed(folder.rstrip("/"))
        except OSError as error:
            return dict.fromkeys(names, reason(error))
        return {name: found.get(name, os.strerror(errno.ENOENT)) for name in names}
    seen: dict[str, int | str] = {}
    for name in names:
        try:
            reader = store.open(name)
            seen[name] = reader.size
            reader.close()
        except OSError as error:
            seen[name] = reason(error)
    return seen


@contextlib.contextmanager
def about(place: str) -> Iterator[None]:
    """Put the place before every problem that is raised within."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(*(f"{place}: {problem}" for problem in error.problems)) from error


class Findings(list[str]):
    """What is wrong with a checkpoint, to be said all at once."""

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Add the problems of an error that is raised within. What follows still runs."""
        try:
            yield
        except CheckpointError as error:
            self.extend(error.problems)

    def check(self) -> None:
        """Raise CheckpointError with all of them."""
        if self:
            raise CheckpointError(*self)


@contextlib.contextmanager
def refusals(what: str, then: Callable[[OSError | EOFError], str] = lambda error: "") -> Iterator[None]:
    """Say in our words what the operating system refuses.

    what: "the file x cannot be read"; then: what is said behind the words of the system, such as "; nothing was read".
    """
    try:
        yield
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{what}: {reason(error)}{then(error)}") from error


class OpenFile:
    """A file that is open for reading. Raises `CheckpointError`, naming it, when it is missing or cannot be read."""

    def __init__(self, store: Store, name: str) -> None:
        self.place = f"{store.location}/{name}"
        """The address of the file, for messages."""
        try:
            self._reader = store.open(name)
        # A missing file has a sentence of its own: most often a copy of the checkpoint is incomplete.
        except FileNotFoundError:
            raise CheckpointError(f"{self.place} is missing") from None
        # ValueError: the name comes from metadata that another program wrote, and leads out of the store.
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.place} cannot be read: {reason(error)}") from error

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._reader.size

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes from the file; `CheckpointError` when it ends before."""
        # Before the buffer is made: a damaged header may ask for any number of bytes.
        if start + num_bytes > self.size:
            raise CheckpointError(
                f"{self.place} has {self.size:,} bytes, but {num_bytes:,} from byte {start:,} on are needed: it is "
                "truncated"
            )
        buffer = bytearray(num_bytes)
        with refusals(f"{self.place} cannot be read"):
            self._reader.read_into(memoryview(buffer), start)
        return bytes(buffer)

    def whole(self) -> bytes:
        """Return all bytes of a file that is metadata; `CheckpointError` for one of more than 4 GiB."""
        if self.size > _MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{self.place} has {self.size:,} bytes; of such a file at most {_MAX_METADATA_BYTES:,} are read"
            )
        return self.read(0, self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()


def read_whole(store: Store, name: str) -> bytes:
    """Return a whole file, which is metadata; raises `CheckpointError`, which names it."""
    with OpenFile(store, name) as file:
        return file.whole()


def read_json(store: Store, name: str) -> Any:
    """Return what a file of JSON says; raises `CheckpointError`, which names it."""
    return parsed_json(read_whole(store, name), f"{store.location}/{name}")


def parsed_json(data: bytes, place: str) -> Any:
    """Return what JSON says; raises `CheckpointError`, which names the place."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is not JSON: {error}") from None


def reason(error: BaseException) -> str:
    """What an error of the operating system says, without its number and path."""
    # Messages say the place themselves, so the number and the path that str(error) has would stand there twice.
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
