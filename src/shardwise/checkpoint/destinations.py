"""Destinations: the outputs of a conversion as a save of ours, or as a folder of another format.

Files are filled in bounded memory, window by window. Two windows are in memory: while a thread hashes and writes one,
the next is read and put together::

    this thread    read 0 | read 1  | read 2  | ...
    writer                | write 0 | write 1 | ...

A folder of another format is there with all of its files or not at all:

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch

from shardwise.checkpoint.arrangement import Arrangement, assign_tensors
from shardwise.checkpoint.commit import Description, Written, begin, commit, discard, place_in
from shardwise.checkpoint.formats.format import FilledFile, Filling, FolderPlan
from shardwise.checkpoint.formats.model_shards import is_numbered
from shardwise.checkpoint.formats.registry import CLAIM
from shardwise.checkpoint.local import LocalStore, make_folder, sync_folder
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.passing_digests import PassingDigests
from shardwise.checkpoint.reading import DataFiles
from shardwise.checkpoint.safetensors_files import FileFilling
from shardwise.checkpoint.saves import storing
from shardwise.checkpoint.stores import Address, OneFile, Store, Writer, delete_all, refusals, store_of
from shardwise.comm.local_tensors import bytes_of
from shardwise.errors import CheckpointError, few_of
from shardwise.space import Piece

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all, after each window."""


class Copying:
    """Fills files with pieces of the outputs."""

    def __init__(self, store: Store, outputs: Outputs, progress: Progress, *, certify: bool) -> None:
        """certify: take digests of what is read of the store."""
        self.outputs = outputs
        self.digests = PassingDigests(outputs.contents.stored.tensors) if certify else None
        # The two readers never read at the same time, and share files and what they read into. Their windows are apart.
        self._files = DataFiles(store, digests=self.digests)
        self._readers = tuple(outputs.reader(self._files) for _ in range(2))
        self._progress = progress
        # What is cut across its rows in the source passes by in order as an output, if it is only renamed.
        self._sources = {name: outputs.unchanged(name) for name in outputs.tensors} if certify else {}
        self._done = 0
        self._total = outputs.num_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of data files read so far."""
        return self._files.read_bytes

    def fill(self, pieces: Sequence[Piece], filling: Filling) -> None:
        """Write the pieces of a file.

        Raises CheckpointError for what cannot be read, and OSError for what cannot be written.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="shardwise-write") as thread:
            writing: Future[int] | None = None
            for turn, window in enumerate(self.outputs.windows(pieces)):
                parts = self._readers[turn % 2](window)
                self._see(window, parts)
                # Not before this one is read: the window before is being written meanwhile. But before the next is
                # begun, which takes over the memory of the one that is being written.
                self._finish(writing)
                writing = thread.submit(_write, filling, parts)
            self._finish(writing)
        filling.flush()

    def _see(self, window: Sequence[Piece], parts: Sequence[torch.Tensor]) -> None:
        if self.digests is not None:
            for piece, elements in zip(window, parts, strict=True):
                if (source := self._sources[piece.name]) is not None:
                    self.digests.see(replace(piece, name=source), elements)

    def _finish(self, writing: "Future[int] | None") -> None:
        if writing is not None:
            self._done += writing.result()
            self._progress(self._done, self._total)


def _write(filling: Filling, parts: Sequence[torch.Tensor]) -> int:
    """Write the elements of a window; returns how many bytes they have."""
    num_bytes = 0
    for elements in parts:
        data = elements.view(torch.uint8)
        filling.write(bytes_of(data))
        num_bytes += data.numel()
    return num_bytes


# Saves


def check_save(destination: Address) -> None:
    """Raise CheckpointError where no save can be made."""
    store = store_of(destination)
    place_in(store)
    if isinstance(store, OneFile):
        raise CheckpointError(f"{os.fspath(str(destination))} is a file; name a folder to save to")


def make_save(copying: Copying, store: Store, to: Literal["pieces", "whole"], extra: Mapping[str, Any]) -> int:
    """Make a save of what is copied; returns its number in the store. Raises CheckpointError; then none was made."""
    outputs = copying.outputs
    attempt = begin(store)
    arrangement = _arrangement(outputs, to)
    written = []
    try:
        for rank in range(arrangement.num_ranks):
            file = arrangement.file(rank)
            name = attempt.folder + attempt.data_file(rank)
            sums = Written([])
            if file.pieces:
                with storing(store, name, "written"), store.write(name, num_bytes=file.num_bytes) as writer:
                    filling = FileFilling(file, writer, block_bytes=outputs.contents.block_bytes)
                    copying.fill(file.pieces, filling)
                    sums = Written(filling.checksums)
            written.append(sums)
        commit(store, attempt, arrangement, written, _description(outputs, extra))
    except BaseException:
        discard(store, attempt, None)
        raise
    return attempt.number


@contextlib.contextmanager
def leaving_no_folder(store: Store) -> Iterator[None]:
    """Where an error ends it, folders that were made on the way to the store's go again, if they hold nothing."""
    # A conversion that is refused leaves nothing behind, not even the folders on the way to its destination.
    made: list[str] = []
    if isinstance(store, LocalStore):
        folder = store.location
        while not os.path.lexists(folder):
            made.append(folder)
            folder = os.path.dirname(folder)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # it holds something, or was never made
            for each in made:
                os.rmdir(each)
        raise


def _arrangement(outputs: Outputs, to: Literal["pieces", "whole"]) -> Arrangement:
    """Which files the save has; to the rules of a commit each is a rank's.

    "pieces": a file for each of the source. Outputs with elements in the source's order are cut as there, and are in
    the same files. Those that are joined from others are whole, with about equal bytes in each file.
    """
    tensors = list(outputs.tensors.values())
    if to == "whole":
        whole = [each.whole for each in tensors]
        return Arrangement(file_layout=to, tensors=whole, written=[whole])
    # Files of the source stand for ranks here: a commit knows files as those of ranks, and nothing else of them.
    names = {each.file for tensor in outputs.contents.stored.tensors.values() for each in tensor.pieces}
    rank_of = {name: rank for rank, name in enumerate(sorted(names))}
    num_files = max(1, len(names))
    # Outputs that are put together have no place in the source that they could keep; they fill the files evenly.
    put_together = [each.whole for each in tensors if each.num_bytes and not each.pieces]
    shares = assign_tensors(put_together, num_files)
    placed: list[list[tuple[int, Piece]]] = [[] for _ in range(num_files)]
    # Elements that keep their order keep their file and their place in it: source and copy are read alike.
    for tensor in tensors:
        for each in tensor.pieces:
            placed[rank_of[each.file]].append((each.start, each.piece))
    kept = ([piece for _, piece in sorted(each, key=lambda item: item[0])] for each in placed)
    written = [[*pieces, *share] for pieces, share in zip(kept, shares, strict=True)]
    return Arrangement(file_layout=to, tensors=[each.whole for each in tensors], written=written)


def _description(outputs: Outputs, extra: Mapping[str, Any]) -> Description:
    contents = outputs.contents
    return Description(
        step=contents.step,
        layout=contents.layout or f"converted from {contents.format}",
        block_bytes=contents.block_bytes,
        aliases=outputs.aliases,
        settings=contents.settings,
        extra={**contents.extra, **extra},
    )


# Folders of other formats

_PART = ".part"
"""Behind the names of files that are not whole yet. No program reads such files."""

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


def write_folder(
    folder: Folder,
    files: Mapping[str, FilledFile],
    fill: Callable[[Any, Writer], object],
    small: Mapping[str, bytes],
    finish: Callable[[Store], Mapping[str, bytes]] = lambda store: {},
) -> None:
    """Make a folder with these files, whole or not at all, and durable. Raises CheckpointError.

    fill: writes the bytes of a file. small: others, which come after these and in their order; the last of them is the
    one without which nothing is a checkpoint. finish: looks at all of them, and gives more.
    """
    made: list[str] = []
    with _hidden(folder) if isinstance(folder, str) else _claimed(folder, made, len(files)) as store:
        location = location_of(folder)

        def create(others: Mapping[str, bytes]) -> None:
            for name, data in others.items():
                with _making(location, name):
                    store.create(name, data)
                made.append(name)

        # A file has its size and its header from the start: under its name it would look whole, wherever somebody
        # moves it. What is in a folder of the format is nothing without the files at its top.
        begun = {name: f"{name}{_PART}" if store is not folder and "/" not in name else name for name in files}
        for name, file in files.items():
            with _making(location, name), store.write(begun[name], num_bytes=file.num_bytes) as writer:
                made.append(name)
                fill(file, writer)
        for name in (name for name in files if begun[name] != name):
            with _making(location):
                os.rename(f"{store.location}/{begun[name]}", f"{store.location}/{name}")
        create(small)
        if store is folder:  # `finish` reads it: it is a checkpoint from here on
            with _making(location, CLAIM):
                store.delete(CLAIM)
        create(finish(store))


def check_numbered(folder: Folder, plan: FolderPlan) -> None:
    """Raise CheckpointError where some files of a model, without its index, would be read as all of them."""
    if isinstance(folder, str) or len(plan.files) < 2 or not any(name.endswith(".index.json") for name in plan.last):
        return
    if others := [name for name in plan.files if not is_numbered(name)]:
        raise CheckpointError(
            f"{few_of(others)} are files of a model without a number (model-00001-of-00002.safetensors), and are "
            f"written one after the other to {folder.location}: a conversion that is killed would leave what is read "
            "as a whole. Leave out like (--like), or convert to a local folder and copy it"
        )


@contextlib.contextmanager
def _claimed(store: Store, made: Sequence[str], num_large: int) -> Iterator[Store]:
    """A store where a file appears when it is whole, and no folder has to be made.

    What a process leaves that is killed is no checkpoint, and in the way of the next one: nobody knows that it is dead.
    made: the files in it, those that are large first.
    """
    with _making(store.location, CLAIM):
        try:
            store.create(CLAIM, secrets.token_hex(8).encode())
        except FileExistsError:
            raise _refusal(store.location, "a folder that another conversion writes, or has left when killed") from None
    try:
        # A writer that is done meanwhile has taken its claim away.
        with _making(store.location):
            if list(store.names()) != [CLAIM]:
                raise _refusal(store.location, "a folder that holds something")
        yield store
    except BaseException:
        with contextlib.suppress(OSError):
            # The last one first, so that at no instant a reader takes a part for the whole.
            for name in reversed(made[num_large:]):
                store.delete(name)
            delete_all(store, made[:num_large])
            store.delete(CLAIM)
        raise


@contextlib.contextmanager
def _hidden(path: str) -> Iterator[Store]:
    """A hidden folder next to a path of a file system, `.<name>.<8 hex digits>.new`, which gets its name at the end.

    A process that is killed leaves the hidden folder: no reader takes it, and the next one that writes to `path`
    removes it.
    """
    parent, name = os.path.split(path)
    with _making(path):
        touched = make_folder(parent)
        _remove_dead(parent, name)
        temporary, lock = _begun(parent, name)
    try:
        yield LocalStore(temporary)
        with _making(path):
            sync_folder(temporary)
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


def _making(path: str, file: str = "") -> contextlib.AbstractContextManager[None]:
    """Say in our words what the file system refuses."""

    def then(error: OSError | EOFError) -> str:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and not file:
            # Somebody has made it since the first look: the words for that say more than those of the system.
            _check_empty(path)
        return "; nothing was made there"

    return refusals(f"{os.path.join(path, file) if file else path} cannot be written", then)
