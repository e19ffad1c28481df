"""FsspecStore: object stores and everything else that fsspec reaches.

fsspec gives one interface to file systems. They differ in three points: whether a file appears in one act, whether
folders are real, and how old a listing may be. What differs is decided here, file system by file system.
"""

import contextlib
import errno
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from typing_extensions import Buffer

from shardwise.checkpoint.local import LocalStore, LocalWriter, check_complete, check_not_longer, checked_name, cut_off
from shardwise.errors import CheckpointError

REQUEST_BYTES = 8 << 20
"""Bytes of one request at most: longer reads are cut, and their parts asked for side by side."""

PARALLEL_REQUESTS = 8
"""So many are under way at a time: a service is as fast with each of them as with one."""

_KINDS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    TimeoutError: errno.ETIMEDOUT,
    NotImplementedError: errno.EOPNOTSUPP,
}
_NUMBERS = {
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.EEXIST,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "NotSupportedError": errno.EOPNOTSUPP,
}
"""Of obstore's own classes, by name: it may not be installed."""
_OF_OBJECT = re.compile("Object at location (?!.*<Code>(NoSuchBucket|ContainerNotFound))", re.DOTALL)
"""In its words: what says a path only."""
_DEBUG = "\n\nDebug source:"
"""In its words: where the state of the client begins."""
_ANSWER = re.compile("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", re.DOTALL)
"""In the answer of a service, which it quotes whole."""


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

    __slots__ = ("_decides", "_file_system", "_in_memory", "_local", "_root", "location")

    parallel_reads = PARALLEL_REQUESTS
    """See `Store.parallel_reads`: each read is a request with a way there and back."""

    def __init__(self, address: str, *, file_system: Any = None) -> None:
        self.location = without_password(address)
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
        self._decides = False
        """Whether the service was seen to refuse a second creation."""

    def names(self, folder: str = "") -> Iterator[str]:
        """Names of all files at any depth below `folder`, sorted."""
        return iter(sorted(self.sizes(folder)))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """See `Store.sizes`."""
        top = self._path(folder) if folder else self._root
        with translated(top):
            self._ask_anew()
            found = self._file_system.find(top, detail=True, **self._strictness(top))
        # Roots and paths differ in a leading "/" on some file systems; markers of folders end in one.
        prefix, skipped = f"{top.lstrip('/')}/".lstrip("/"), len(f"{self._root.lstrip('/')}/".lstrip("/"))
        bare = {path.lstrip("/"): facts for path, facts in found.items() if not path.endswith("/")}
        return {path[skipped:]: facts["size"] for path, facts in bare.items() if path.startswith(prefix)}

    def folders(self) -> list[str]:
        """See `Store.folders`."""
        with translated(self._root):
            self._ask_anew()
            try:
                found = self._file_system.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        return [each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory"]

    def open(self, name: str) -> "RemoteReader":
        """Open a file for reading; raises FileNotFoundError. Its bytes are asked for by range."""
        path = self._path(name)
        self._ask_anew()
        return RemoteReader(self._file_system, path)

    def write(self, name: str, *, num_bytes: int) -> "LocalWriter | RemoteWriter":
        """Begin a new file; raises FileExistsError when the name is in use.

        An error in the context throws away what was sent, as far as the service can. Raises ValueError when it was not
        `num_bytes` long.
        """
        if self._local is not None:
            return self._local.write(name, num_bytes=num_bytes)
        # Looking first and writing then is good enough here: names of data files begin with the id of their attempt,
        # so that no two writers want the same one.
        path = self._path(name)
        # A file of the memory file system appears by its commit; others by their close.
        end = operator.methodcaller("commit" if self._in_memory else "close")
        return RemoteWriter(path, num_bytes, begin=lambda: self._begin(path), end=end)

    def create(self, name: str, data: bytes) -> None:
        """Make a whole file in one atomic act, as far as the class says; raises FileExistsError if there is one."""
        if self._local is not None:
            self._local.create(name, data)
            return
        path = self._path(name)
        with translated(path):
            self._refuse_existing(path)
            try:
                self._put(path, data)
            except FileExistsError:
                # A client that repeats a put, because the answer was lost, is
                # refused by the file that it made itself.
                if self._in_memory or self._file_system.cat_file(path) != data:
                    raise

    def check_creation(self, name: str) -> None:
        """See `Store.check_creation`. It is asked once: packages before exclusive puts ignore what they are asked."""
        if self._local is None and not self._in_memory and not self._decides:
            path = self._path(name)
            with translated(path):
                check_creation_of(path, lambda data: self._put(path, data), lambda: self.delete(name))
            self._decides = True

    def _put(self, path: str, data: bytes) -> None:
        """Make a file where there is none, without a look; raises FileExistsError."""
        if self._in_memory:
            file = _memory_file(self._file_system, path, data)
            # Not `pipe_file`: it looks first and inserts then.
            if self._file_system.store.setdefault(file.path, file) is not file:
                raise FileExistsError(path)
        else:
            self._in_folder(path, lambda: self._file_system.pipe_file(path, data, mode="create"))

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens when it is not there."""
        if self._local is not None:
            self._local.delete(name)
            return
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError), translated(path):
            self._file_system.rm_file(path)

    def delete_all(self, names: Sequence[str]) -> None:
        """See `Store.delete_all`."""
        if self._local is not None:
            self._local.delete_all(names)
            return
        with ThreadPoolExecutor(PARALLEL_REQUESTS, thread_name_prefix="shardwise-request") as threads:
            list(threads.map(self.delete, names))

    def _begin(self, path: str) -> Any:
        """A file object of fsspec for a new file, open for writing."""
        self._refuse_existing(path)
        if self._in_memory:
            return _memory_file(self._file_system, path, b"")
        return self._in_folder(path, lambda: self._file_system.open(path, "wb"))

    def _refuse_existing(self, path: str) -> None:
        """Raise FileExistsError when there is a file, whatever a cache believes."""
        self._ask_anew()
        try:
            self._file_system.info(path)  # `exists` takes every failure for a no
        except FileNotFoundError:
            return
        raise FileExistsError(path)

    def _ask_anew(self) -> None:
        """Let no listing of before answer."""
        self._file_system.invalidate_cache()

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


class RemoteReader:
    """One file, read by ranges."""

    __slots__ = ("_file_system", "_path", "options", "size")

    def __init__(self, file_system: Any, path: str) -> None:
        self.options: dict[str, Any] = {}
        """For each of its reads."""
        self._file_system = file_system
        self._path = path
        with translated(path):
            # Object stores open nothing: a missing file shall fail here as it does on a disk, not at the first read.
            facts = file_system.info(path)
            if facts["type"] == "directory":
                raise IsADirectoryError(path)
            self.size: int = facts["size"]
            """Bytes of the file when it was opened."""

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill `buffer` with the bytes from `start` on; raises EOFError when the file ends before."""
        fill_by_requests(self._path, self.size, buffer, start, self._get)

    def _get(self, start: int, stop: int) -> bytes:
        with translated(self._path):
            data: bytes = self._file_system.cat_file(self._path, start=start, end=stop, **self.options)
            return data

    def close(self) -> None:
        """Nothing is held: every read is a separate request."""


class RemoteWriter:
    """A new file, from its context's begin to its end."""

    __slots__ = ("_begin", "_end", "_file", "_num_bytes", "_num_written", "_path")

    def __init__(self, path: str, num_bytes: int, *, begin: Callable[[], Any], end: Callable[[Any], object]) -> None:
        """begin: gives what takes the bytes by its `write`, and may have a `discard`. end: puts it in its place."""
        self._begin, self._end = begin, end
        self._path = path
        self._num_bytes = num_bytes
        self._num_written = 0
        self._file: Any = None

    def __enter__(self) -> "RemoteWriter":
        with translated(self._path):
            self._file = self._begin()
        return self

    def write(self, data: memoryview) -> None:
        """Append; raises ValueError beyond the announced size."""
        check_not_longer(self._path, self._num_bytes, self._num_written, data.nbytes)
        if data.nbytes:
            with translated(self._path):
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
        with translated(self._path):
            self._end(self._file)

    def _discard(self) -> None:
        """Throw away what was sent; the error that led here says the rest."""
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True  # else the collector closes it, which would put the parts in place


def is_configured(scheme: str) -> bool:
    """Whether the configuration of fsspec says how the addresses of a scheme are reached."""
    try:
        from fsspec.config import conf
    except ImportError:
        return False
    return bool(conf.get(scheme))


def without_password(address: str) -> str:
    """An address as messages may show it."""
    return re.sub(r"(//[^/@:]*):[^/@]*@", r"\1@", address)


def fill_by_requests(path: str, size: int, buffer: memoryview, start: int, get: Callable[[int, int], Buffer]) -> None:
    """Fill `buffer` from byte `start` of a file on, several requests at a time where it is long.

    get: the bytes from one place to another, in one request. Raises EOFError when the file ends before.
    """
    num_bytes = buffer.nbytes
    # Nothing is asked for where the size says that it is not there: services answer such ranges in many ways.
    if start + num_bytes > size:
        raise cut_off(path, num_bytes, start, max(0, size - start))

    def fill(first: int) -> int:
        """The bytes that came of a part."""
        stop = min(first + REQUEST_BYTES, num_bytes)
        data = get(start + first, start + stop)
        num_come = memoryview(data).nbytes
        buffer.cast("B")[first : first + num_come] = data
        if num_come < stop - first:  # the file has shrunk since it was opened
            raise cut_off(path, num_bytes, start, first + num_come)
        return num_come

    parts = range(0, num_bytes, REQUEST_BYTES)
    if len(parts) < 2:
        list(map(fill, parts))
        return
    with ThreadPoolExecutor(min(len(parts), PARALLEL_REQUESTS), thread_name_prefix="shardwise-request") as threads:
        list(threads.map(fill, parts))


def check_creation_of(place: str, put: Callable[[bytes], object], remove: Callable[[], object]) -> None:
    """Raise OSError unless a service refuses the second of two puts that must be the first, and remove what was put."""
    try:
        put(b"first")  # refused where its answer was lost, and the client has repeated it: that decides as well
        put(b"second")
    except FileExistsError:
        return
    finally:
        with contextlib.suppress(OSError):  # who may not delete may save: as with what else a save cannot remove
            remove()
    text = (
        "it was created twice, so that two programs which save here at a time would overwrite each other. Use a "
        "service with conditional writes (If-None-Match), update the package that reaches it, or save to a file system"
    )
    raise OSError(errno.EOPNOTSUPP, text, place)


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
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
    number = next((number for kind, number in _KINDS.items() if isinstance(error, kind)), None)
    number = number or _NUMBERS.get(type(error).__name__, errno.EIO)
    text = str(error).partition(_DEBUG)[0]
    # Then the text says the path only: the words of the operating system say more.
    bare = text in ("", path, path.lstrip("/"), f"/{path}") or _OF_OBJECT.match(text)
    if number != errno.EIO and bare:
        return OSError(number, os.strerror(number), path)
    if found := _ANSWER.search(text):
        text = f"{found[1]}: {found[2]}"
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
        # One of our own: listings are asked anew here each time, and the rest of the program keeps its cache.
        file_system, root = fsspec.url_to_fs(address, skip_instance_cache=True)
    except ImportError as error:
        advice = "For s3, gs and az, pip install shardwise[object] does as well"
        raise CheckpointError(f"{location} cannot be reached: {error}. {advice}") from error
    except ValueError as error:
        raise CheckpointError(f"{location} is no address that fsspec knows: {error}") from error
    return file_system, root
