"""FsspecStore: object stores and everything else that fsspec reaches.

fsspec gives one interface to file systems. They differ in three points: whether a file appears in one act, whether
folders are real, and how old a listing may be. What differs is decided here, file system by file system.
"""

import contextlib
import errno
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from shardwise.checkpoint.local import LocalStore, LocalWriter, check_complete, check_not_longer, checked_name, cut_off
from shardwise.errors import CheckpointError

_REQUEST_BYTES = 1 << 26
"""Bytes of one read at most: fsspec returns them as a new object, which is copied to its place."""

_KINDS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    TimeoutError: errno.ETIMEDOUT,
    NotImplementedError: errno.EOPNOTSUPP,
}


class FsspecStore:
    """A `Store` in any file system of fsspec: "s3://bucket/folder", "gs://...", "memory://...", "file:///...".

    Where several `create` one name, whether exactly one succeeds, and whether the file is never seen in parts:

    - Object stores: the service decides. s3fs asks for it by If-None-Match (botocore 1.35.20 and later; AWS, and those
      of its imitators that know conditional writes), gcsfs by ifGenerationMatch=0, adlfs by a put without overwriting.
      When the answer to a put is lost and the repeated one is refused, the file is read back. If it holds our bytes, it
      is ours, so give every creator different bytes.
    - "memory" by a single insertion, "file" as in `LocalStore`, which makes all changes there.
    - Elsewhere (sftp, smb, ftp, ...) fsspec looks first and writes then: good for one creator at a time only.

    A new file of an object store or in memory appears when its context ends. Elsewhere it grows in place, and is as
    durable as the service makes it. Folders of file systems that have real ones stay when they are empty ("file":
    they go). Listings of fsspec are cached; this asks anew each time.

    `address` is a URL (its options come from fsspec's configuration), or a folder in `file_system`. Raises
    CheckpointError when fsspec or the package behind the scheme is missing.
    """

    __slots__ = ("_file_system", "_in_memory", "_local", "_root", "location")

    parallel_reads = 8
    """See `Store.parallel_reads`: each read is a request with a way there and back."""

    def __init__(self, address: str, *, file_system: Any = None) -> None:
        self.location = re.sub(r"(//[^/@:]*):[^/@]*@", r"\1@", address)
        """The address of the folder, without its password, which does not belong into messages."""
        if file_system is None:
            file_system, root = _found(address, self.location)
        else:
            root = file_system._strip_protocol(address)
        self._file_system = file_system
        # Names in the store are this root, a slash and the name; a second slash would be another key of a bucket.
        self._root = str(root).rstrip("/")
        # Late: fsspec is an optional dependency, and users of local folders do without it.
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.implementations.memory import MemoryFileSystem

        # fsspec on a local disk has neither an atomic create nor an fsync; our own store has.
        self._in_memory = isinstance(file_system, MemoryFileSystem)
        self._local = LocalStore(str(root)) if isinstance(file_system, LocalFileSystem) else None

    def names(self, folder: str = "") -> Iterator[str]:
        """Names of all files at any depth below `folder`, sorted."""
        top = self._path(folder) if folder else self._root
        with _translated(top):
            self._file_system.invalidate_cache()
            paths = self._file_system.find(top, **self._strictness(top))
        # Roots and paths differ in a leading "/" on some file systems; markers of folders end in one.
        prefix, skipped = f"{top.lstrip('/')}/".lstrip("/"), len(f"{self._root.lstrip('/')}/".lstrip("/"))
        bare = (path.lstrip("/") for path in paths if not path.endswith("/"))
        return iter(sorted(path[skipped:] for path in bare if path.startswith(prefix)))

    def open(self, name: str) -> "_RemoteReader":
        """Open a file for reading; raises FileNotFoundError. Its bytes are asked for by range."""
        return _RemoteReader(self._file_system, self._path(name))

    def write(self, name: str, *, num_bytes: int) -> "LocalWriter | _RemoteWriter":
        """Begin a new file; raises FileExistsError when the name is in use.

        An error in the context throws away what was sent, as far as the service can. Raises ValueError when it was not
        `num_bytes` long.
        """
        if self._local is not None:
            return self._local.write(name, num_bytes=num_bytes)
        # Looking first and writing then is good enough here: names of data files begin with the id of their attempt,
        # so that no two writers want the same one.
        return _RemoteWriter(self, self._path(name), num_bytes)

    def create(self, name: str, data: bytes) -> None:
        """Make a whole file in one atomic act, as far as the class says; raises FileExistsError if there is one."""
        if self._local is not None:
            self._local.create(name, data)
            return
        path = self._path(name)
        self._warn_of_overwriting()
        with _translated(path):
            self._refuse_existing(path)
            if self._in_memory:
                file = _memory_file(self._file_system, path, data)
                # Not `pipe_file`: it looks first and inserts then.
                if self._file_system.store.setdefault(file.path, file) is not file:
                    raise FileExistsError(path)
                return
            try:
                self._in_folder(path, lambda: self._file_system.pipe_file(path, data, mode="create"))
            except FileExistsError:
                # A client that repeats a put, because the answer was lost, is
                # refused by the file that it made itself.
                if self._file_system.cat_file(path) != data:
                    raise

    def _warn_of_overwriting(self) -> None:
        """Warn where the package of an object store is older than exclusive puts: it ignores what it is asked for."""
        put = getattr(self._file_system, "_pipe_file", self._file_system.pipe_file)
        given = inspect.signature(put).parameters
        passes_on = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in given.values())
        if self._file_system.async_impl and "mode" not in given and not passes_on:
            kind = type(self._file_system)
            warnings.warn(
                f"{kind.__name__} of {kind.__module__.split('.')[0]} is too old to create a file that must be new: two "
                f"programs that save to {self.location} at a time may overwrite each other. Update it",
                stacklevel=2,
            )

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens when it is not there."""
        if self._local is not None:
            self._local.delete(name)
            return
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError), _translated(path):
            self._file_system.rm_file(path)

    def begin(self, path: str) -> Any:
        """A file object of fsspec for a new file, open for writing."""
        self._refuse_existing(path)
        if self._in_memory:
            return _memory_file(self._file_system, path, b"")
        return self._in_folder(path, lambda: self._file_system.open(path, "wb"))

    def finish(self, file: Any) -> None:
        """Put a file object that was written in its place."""
        if self._in_memory:
            # A file of the memory file system appears by its commit; others by their close.
            file.commit()
        else:
            file.close()

    def _refuse_existing(self, path: str) -> None:
        """Raise FileExistsError when there is a file, whatever a cache believes."""
        self._file_system.invalidate_cache()
        try:
            self._file_system.info(path)  # `exists` takes every failure for a no
        except FileNotFoundError:
            return
        raise FileExistsError(path)

    def _in_folder(self, path: str, act: Callable[[], Any]) -> Any:
        """Do it; where folders are real and this one is missing, make it first."""
        try:
            return act()
        except FileNotFoundError:
            if self._file_system.async_impl:  # an object store, whose bucket is missing: not ours to make
                raise
            self._file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
            return act()

    def _strictness(self, top: str) -> dict[str, Any]:
        """What keeps `find` of fsspec from taking a folder that cannot be listed for an empty one."""
        nothing = FileNotFoundError if top == self._root else (FileNotFoundError, NotADirectoryError)

        def raise_unless_nothing(error: OSError) -> None:
            if not isinstance(error, nothing):
                raise error

        from fsspec import AbstractFileSystem

        # File systems with a `find` of their own ask the service, which fails by itself; the general one walks, and
        # by default passes over what it cannot list.
        walks = type(self._file_system).find is AbstractFileSystem.find
        return {"on_error": raise_unless_nothing} if walks else {}

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}" if self._root else checked_name(name)


class _RemoteReader:
    """One file, read by ranges."""

    __slots__ = ("_file_system", "_path", "size")

    def __init__(self, file_system: Any, path: str) -> None:
        self._file_system = file_system
        self._path = path
        with _translated(path):
            file_system.invalidate_cache()
            # Object stores open nothing: a missing file shall fail here as it does on a disk, not at the first read.
            facts = file_system.info(path)
            if facts["type"] == "directory":
                raise IsADirectoryError(path)
            self.size: int = facts["size"]
            """Bytes of the file when it was opened."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start` on; raises EOFError when the file ends before."""
        num_read, num_there = 0, max(0, min(buffer.nbytes, self.size - start))
        # Nothing is asked for where the size says that it is not there: services answer such ranges in many ways.
        while num_read < buffer.nbytes and num_there == buffer.nbytes:
            begin, num_more = start + num_read, min(_REQUEST_BYTES, buffer.nbytes - num_read)
            with _translated(self._path):
                data = self._file_system.cat_file(self._path, start=begin, end=begin + num_more)
            buffer.cast("B")[num_read : num_read + len(data)] = data
            num_read += len(data)
            if len(data) < num_more:  # the file has shrunk since it was opened
                num_there = num_read
        if num_there < buffer.nbytes:
            raise cut_off(self._path, buffer.nbytes, start, num_there)

    def close(self) -> None:
        """Nothing is held: every read is a separate request."""


class _RemoteWriter:
    """A new file, from its context's begin to its end."""

    __slots__ = ("_file", "_num_bytes", "_num_written", "_path", "_store")

    def __init__(self, store: FsspecStore, path: str, num_bytes: int) -> None:
        self._store = store
        self._path = path
        self._num_bytes = num_bytes
        self._num_written = 0
        self._file: Any = None

    def __enter__(self) -> "_RemoteWriter":
        with _translated(self._path):
            self._file = self._store.begin(self._path)
        return self

    def write(self, data: memoryview) -> None:
        """Append; raises ValueError beyond the announced size."""
        check_not_longer(self._path, self._num_bytes, self._num_written, data.nbytes)
        if data.nbytes:
            with _translated(self._path):
                self._file.write(data.cast("B"))
        self._num_written += data.nbytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            check_complete(self._path, self._num_bytes, self._num_written)
        except ValueError:
            self._discard()
            raise
        with _translated(self._path):
            self._store.finish(self._file)

    def _discard(self) -> None:
        """Throw away what was sent; the error that led here says the rest."""
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True  # else the collector closes it, which would put the parts in place


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Errors of fsspec and of what is behind it become OSErrors that say their kind, their text and the file.

    The protocol of stores promises OSErrors, but botocore, aiohttp and others raise other classes.
    """
    try:
        yield
    except OSError as error:
        if error.strerror is not None:
            raise
        raise _as_os_error(error, path) from error
    except Exception as error:
        raise _as_os_error(error, path) from error


def _as_os_error(error: Exception, path: str) -> OSError:
    number = next((number for kind, number in _KINDS.items() if isinstance(error, kind)), errno.EIO)
    text = str(error)
    # Then the text says the path only: the words of the operating system say more.
    if number != errno.EIO and text in ("", path, path.lstrip("/"), f"/{path}"):
        return OSError(number, os.strerror(number), path)
    return OSError(number, f"{type(error).__name__}: {text}", path)


def _memory_file(file_system: Any, path: str, data: bytes) -> Any:
    """A file of the memory file system that is not seen before it is committed."""
    from fsspec.implementations.memory import MemoryFile

    return MemoryFile(file_system, file_system._strip_protocol(path), data)


def _found(address: str, location: str) -> tuple[Any, str]:
    """The file system behind an address, and the folder in it."""
    try:
        import fsspec
    except ImportError as error:
        raise CheckpointError(f"{location} needs fsspec: pip install shardwise[object]") from error
    try:
        file_system, root = fsspec.url_to_fs(address)
    except ImportError as error:
        raise CheckpointError(f"{location} cannot be reached: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{location} is no address that fsspec knows: {error}") from error
    return file_system, root
