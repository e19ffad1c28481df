"""Destinations: the outputs of a conversion as a save of ours, or as a folder of Hugging Face files.

Files are filled in bounded memory, window by window. Two windows are in memory: while a thread hashes and writes one,
the next is read and put together::

    this thread    read 0 | read 1  | read 2  | ...
    writer                | write 0 | write 1 | ...
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from shardwise.checkpoint.arrangement import Arrangement, assign_tensors
from shardwise.checkpoint.commit import Description, Written, begin, commit, discard, place_in
from shardwise.checkpoint.contents import is_model_name
from shardwise.checkpoint.formats.format import FilledFile, Filling, FolderPlan, FolderRequest
from shardwise.checkpoint.formats.numbered_files import is_numbered
from shardwise.checkpoint.formats.registry import folder_planners
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.passing_digests import PassingDigests
from shardwise.checkpoint.reading import DataFiles
from shardwise.checkpoint.safetensors_files import FileFilling
from shardwise.checkpoint.saves import storing
from shardwise.checkpoint.stores import Address, OneFile, Store, Writer, store_of
from shardwise.checkpoint.whole_folders import Folder, location_of, write_folder
from shardwise.comm.local_tensors import bytes_of
from shardwise.errors import CheckpointError, few_of
from shardwise.rewrite.sections import uncollected
from shardwise.space import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCopy:
    """What was written."""

    location: str
    """Path or address of the folder of the save, or of the Hugging Face files."""
    number: int
    """Of the save in its store; 0 for Hugging Face files."""
    read_bytes: int
    """Bytes of data files that were read."""


Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all, after each window."""


def make_save(
    source: Store,
    outputs: Outputs,
    store: Store,
    to: Literal["pieces", "whole"],
    extra: Mapping[str, Any],
    progress: Progress,
    digests: PassingDigests | None,
) -> WrittenCopy:
    """Make a save. `digests` sees all that is read. Raises CheckpointError; then none was made."""
    attempt = begin(store)
    arrangement = _arrangement(outputs, to)
    copying = Copying(source, outputs, progress, digests)
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
    return WrittenCopy(
        location=f"{store.location}/{attempt.folder}".rstrip("/"),
        number=attempt.number,
        read_bytes=copying.read_bytes,
    )


@uncollected()
def plan_folder(
    outputs: Outputs,
    to: str,
    *,
    max_shard_bytes: int,
    places: Mapping[str, tuple[str, int]],
    source: Store | None = None,
) -> FolderPlan:
    """The folder with the outputs in a format; see `FolderRequest`. Raises CheckpointError where it cannot be made."""
    if not any(is_model_name(name, outputs.contents.format) for name in outputs.tensors):
        raise CheckpointError(
            f"{outputs.contents.location} has no tensor of a model, so that there is nothing to write"
        )
    request = FolderRequest(max_file_bytes=max_shard_bytes, places=places, source=source)
    return folder_planners()[to](outputs, request)


def make_folder(
    source: Store,
    outputs: Outputs,
    folder: Folder,
    plan: FolderPlan,
    *,
    beside: Mapping[str, bytes],
    finish: Callable[[Store], Mapping[str, bytes]],
    progress: Progress,
    digests: PassingDigests | None,
) -> WrittenCopy:
    """Make a folder, and small files in it. finish: looks at all, and gives more. digests: sees all that is read.

    Raises CheckpointError; then nothing was made.
    """
    if not isinstance(folder, str) and len(plan.files) > 1 and any(name.endswith(".index.json") for name in plan.last):
        _check_numbered(plan.files, folder)
    copying = Copying(source, outputs, progress, digests)

    def fill(file: FilledFile, writer: Writer) -> None:
        copying.fill(file.pieces, plan.filling(file, writer))

    write_folder(folder, plan.files, fill, {**beside, **plan.last}, finish)
    return WrittenCopy(location=location_of(folder), number=0, read_bytes=copying.read_bytes)


def _check_numbered(files: Iterable[str], store: Store) -> None:
    """Raise CheckpointError where some files of a model, without its index, would be read as all of them."""
    if others := [name for name in files if not is_numbered(name)]:
        raise CheckpointError(
            f"{few_of(others)} are files of a model without a number (model-00001-of-00002.safetensors), and are "
            f"written one after the other to {store.location}: a conversion that is killed would leave what is read as "
            "a whole. Leave out like (--like), or convert to a local folder and copy it"
        )


def check_save(destination: Address) -> None:
    """Raise CheckpointError where no save can be made."""
    store = store_of(destination)
    place_in(store)
    if isinstance(store, OneFile):
        raise CheckpointError(f"{os.fspath(str(destination))} is a file; name a folder to save to")


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
    names = {each.file for tensor in outputs.contents.tensors.values() for each in tensor.pieces}
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
        settings=outputs.settings,
        extra={**contents.extra, **extra},
    )


class Copying:
    """Fills files with pieces of the outputs."""

    def __init__(
        self, store: Store, outputs: Outputs, progress: Progress, digests: PassingDigests | None = None
    ) -> None:
        self._outputs = outputs
        # The two readers never read at the same time, and share files and what they read into. Their windows are apart.
        files = DataFiles(store)
        self._readers = tuple(outputs.reader(files, digests=digests) for _ in range(2))
        self._progress = progress
        self._digests = digests
        # What is cut across its rows in the source passes by in order as an output, if it is only renamed.
        self._sources = {} if digests is None else {name: outputs.unchanged(name) for name in outputs.tensors}
        self._done = 0
        self._total = outputs.num_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of data files read so far."""
        return sum(reader.read_bytes for reader in self._readers)

    def fill(self, pieces: Sequence[Piece], filling: Filling) -> None:
        """Write the pieces of a file.

        Raises CheckpointError for what cannot be read, and OSError for what cannot be written.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="shardwise-write") as thread:
            writing: Future[int] | None = None
            for turn, window in enumerate(self._outputs.windows(pieces)):
                parts = self._readers[turn % 2].read(window)
                self._see(window, parts)
                # Not before this one is read: the window before is being written meanwhile. But before the next is
                # begun, which takes over the memory of the one that is being written.
                self._finish(writing)
                writing = thread.submit(_write, filling, parts)
            self._finish(writing)
        filling.flush()

    def _see(self, window: Sequence[Piece], parts: Sequence[torch.Tensor]) -> None:
        if self._digests is not None:
            for piece, elements in zip(window, parts, strict=True):
                if (source := self._sources[piece.name]) is not None:
                    self._digests.see(replace(piece, name=source), elements)

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
