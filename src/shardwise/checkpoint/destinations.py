"""Destinations: the outputs of a conversion as a save of ours, or as a folder of Hugging Face files."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.checkpoint.arrangement import Arrangement
from shardwise.checkpoint.assignment import assign_tensors
from shardwise.checkpoint.commit import Description, Written, begin, commit, discard
from shardwise.checkpoint.contents import Contents
from shardwise.checkpoint.copying import Copying, Progress
from shardwise.checkpoint.huggingface_files import ShardFile, check_folder, shards_of, write_folder
from shardwise.checkpoint.local import LocalStore
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.saves import storing
from shardwise.checkpoint.stores import Address, OneFile, Store, store_of
from shardwise.errors import CheckpointError
from shardwise.space import Piece

__all__ = ["WrittenCopy", "check_save", "leaving_no_folder", "make_folder", "make_save", "planned_shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCopy:
    """What was written."""

    location: str
    """Path or address of the folder of the save, or of the Hugging Face files."""
    number: int
    """Of the save in its store; 0 for Hugging Face files."""
    read_bytes: int
    """Bytes of data files that were read."""


def make_save(
    source: Store,
    outputs: Outputs,
    store: Store,
    to: Literal["pieces", "whole"],
    extra: Mapping[str, Any],
    progress: Progress,
) -> WrittenCopy:
    """Make a save. Raises CheckpointError; then none was made."""
    attempt = begin(store)
    arrangement = _arrangement(outputs, to)
    copying = Copying(source, outputs, progress)
    written = []
    try:
        for rank in range(arrangement.num_ranks):
            file = arrangement.file(rank)
            name = attempt.folder + attempt.data_file(rank)
            sums = Written([])
            if file.pieces:
                with storing(store, name, "written"), store.write(name, num_bytes=file.num_bytes) as writer:
                    sums = copying.fill(file, writer)
            written.append(sums)
        commit(store, attempt, arrangement, written, _description(outputs, extra))
    except BaseException:
        discard(store, attempt, 0)
        raise
    return WrittenCopy(
        location=f"{store.location}/{attempt.folder}".rstrip("/"),
        number=attempt.number,
        read_bytes=copying.read_bytes,
    )


def make_folder(
    source: Store,
    outputs: Outputs,
    destination: Address,
    *,
    max_shard_bytes: int,
    finish: Callable[[Store, str], None],
    progress: Progress,
) -> WrittenCopy:
    """Make a folder of Hugging Face files; `finish` adds others, given the folder as it is made and its path to be.

    Raises CheckpointError; then nothing was made.
    """
    path, shards = planned_shards(outputs, destination, max_shard_bytes=max_shard_bytes)
    copying = Copying(source, outputs, progress)
    write_folder(path, shards, copying.fill, lambda store: finish(store, path))
    return WrittenCopy(location=path, number=0, read_bytes=copying.read_bytes)


def planned_shards(outputs: Outputs, destination: Address, *, max_shard_bytes: int) -> tuple[str, list[ShardFile]]:
    """The path of a folder of Hugging Face files, and the files. Raises CheckpointError where they cannot be made."""
    path = check_folder(destination)
    tensors = list(outputs.tensors.values())
    if not tensors:
        raise CheckpointError(
            f"{outputs.contents.location} has no tensor of a model, so that there is nothing to write"
        )
    metadata = _metadata(outputs.contents)
    return path, shards_of(tensors, max_bytes=max_shard_bytes, aliases=outputs.aliases, metadata=metadata)


def check_save(destination: Address) -> None:
    """Raise CheckpointError where no save can be made."""
    store = store_of(destination)
    begin(store)
    if isinstance(store, OneFile):
        raise CheckpointError(f"{os.fspath(str(destination))} is a file; name a folder to save to")


@contextlib.contextmanager
def leaving_no_folder(store: Store) -> Iterator[None]:
    """Where an error ends it, folders that were made on the way to the store's go again, if they hold nothing."""
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

    "pieces": a file for each of the source. Outputs whose elements the source has in this order are cut as there, and
    lie in the same files; those that are put together of others lie whole, about as many bytes of them in each file.
    """
    tensors = list(outputs.tensors.values())
    if to == "whole":
        whole = [each.whole for each in tensors]
        return Arrangement(file_layout=to, holders=dict.fromkeys(whole, (0,)), written=[whole])
    names = {each.file for tensor in outputs.contents.tensors.values() for each in tensor.pieces}
    rank_of = {name: rank for rank, name in enumerate(sorted(names))}
    num_files = max(1, len(names))
    put_together = [each.whole for each in tensors if each.num_bytes and not each.pieces]
    shares = assign_tensors(put_together, num_files)
    file_of = {piece: rank for rank, share in enumerate(shares) for piece in share}
    holders: dict[Piece, tuple[int, ...]] = {}
    placed: list[list[tuple[int, Piece]]] = [[] for _ in range(num_files)]
    for tensor in tensors:
        for each in tensor.pieces:
            holders[each.piece] = (rank_of[each.file],)
            placed[rank_of[each.file]].append((each.start, each.piece))
        if not tensor.pieces:
            holders[tensor.whole] = (file_of.get(tensor.whole, 0),)
    kept = ([piece for _, piece in sorted(each, key=lambda item: item[0])] for each in placed)
    written = [[*pieces, *share] for pieces, share in zip(kept, shares, strict=True)]
    return Arrangement(file_layout=to, holders=holders, written=written)


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


def _metadata(contents: Contents) -> dict[str, str]:
    """What the files say of themselves: what those of the source did, and in whose layout the tensors are."""
    kept: Any = contents.extra.get("metadata", {}) if contents.format == "safetensors" else {}
    ties = contents.aliases.keys()
    return {"format": "pt"} | {key: text for key, text in kept.items() if key not in ties}
