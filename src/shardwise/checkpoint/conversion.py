"""Conversion: a checkpoint of any format becomes a save of ours, or a folder of Hugging Face files, without a model.

The bytes go through one window, however large the tensors are. Nothing is renamed, and no element changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from shardwise.checkpoint.addresses import Address, store_of
from shardwise.checkpoint.arrangement import Arrangement
from shardwise.checkpoint.commit import Description, Written, begin, commit, discard, storing
from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.held import bytes_of
from shardwise.checkpoint.huggingface_files import check_folder, shards_of, write_folder
from shardwise.checkpoint.names import is_model_name, model_name_of_master
from shardwise.checkpoint.sources import read_contents
from shardwise.checkpoint.stores import Store, Writer
from shardwise.checkpoint.windows import PieceReader, check_whole, part_of_piece, windows
from shardwise.checkpoint.writing import DataFile, Filling
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece

__all__ = ["ConvertReport", "Progress", "Target", "convert"]

Target = Literal["pieces", "whole", "hf"]
"""A save of ours that keeps the pieces of the source, one of whole tensors, or a folder of Hugging Face files."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and the bytes in all, after each window."""

MAX_SHARD_BYTES = 5 * 10**9
"""Tensors in one Hugging Face file: what `save_pretrained` took for long, and hubs advise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What was converted."""

    source: str
    """Path or address of the save or folder that was read."""
    source_format: str
    """See `Contents.format`."""
    destination: str
    """Path or address of the folder of the save, or of the Hugging Face files."""
    num_tensors: int
    num_bytes: int
    """Bytes of these tensors."""
    verified: bool
    """Whether all bytes were compared with checksums as they were read; other formats than ours have none."""
    aliases: Mapping[str, str]
    """Other names of tensors (ties): alias -> the name under which the tensor was written, once."""
    left_out: tuple[str, ...] = ()
    """Tensors that were not written because they are not the model's ("hf")."""
    num_masters: int = 0
    """How many of `left_out` are masters of parameters that were written in their own, lower precision."""


def convert(
    source: Address,
    destination: Address,
    *,
    to: Target = "whole",
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> ConvertReport:
    """Write the checkpoint at `source`, of any format that `open` reads, to `destination` in another form.

    to: "whole": a save of ours in which every tensor lies whole in one file. "pieces": a save of ours with the
        source's pieces, in as many files. "hf": a folder with `model.safetensors`, or several such files and an index,
        that Hugging Face readers load: the model's tensors only, each tied one once, under its own name.
    step: the newest save of this step; the default is the newest of all.
    max_shard_bytes: bytes of the tensors in one file of "hf"; a larger tensor has a file of its own.

    A save of ours is made by the same rules as `save`: it is the newest of its folder, and older ones stay. It keeps
    step, extra, settings, ties and the words on the layout; what other formats say beside their tensors is its extra.
    A folder of "hf" must not exist or be empty. Either is there as a whole or not at all. Saves of ours are verified
    as they are read. Memory stays below 64 MiB and what the metadata takes.
    Raises CheckpointError when the source is damaged or incomplete or the destination cannot be written.
    """
    if to not in get_args(Target):
        raise CheckpointError(f"a conversion to {to!r} was asked for; it goes to {', '.join(get_args(Target))}")
    if max_shard_bytes < 1:
        raise CheckpointError(f"files of {max_shard_bytes} bytes were asked for; give at least 1")
    store = store_of(source)
    contents = read_contents(store, step=step)
    if to == "hf":
        return _to_hugging_face(store, contents, destination, max_shard_bytes, progress)
    return _to_ours(store, contents, store_of(destination), to, progress)


def _to_ours(
    source: Store, contents: Contents, store: Store, to: Literal["pieces", "whole"], progress: Progress
) -> ConvertReport:
    attempt = begin(store)
    check_whole(contents, contents.tensors.values())
    arrangement = _arrangement(contents, to)
    copying = _Copying(source, contents, progress, total=contents.num_bytes)
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
        commit(store, attempt, arrangement, written, _description(contents))
    except CheckpointError:
        discard(store, attempt, 0)
        raise
    return _report(contents, f"{store.location}/{attempt.folder}".rstrip("/"), list(contents.tensors.values()))


def _to_hugging_face(
    source: Store, contents: Contents, destination: Address, max_shard_bytes: int, progress: Progress
) -> ConvertReport:
    path = check_folder(destination)
    tensors = [each for each in contents.tensors.values() if is_model_name(each.name, contents.format)]
    if not tensors:
        raise CheckpointError(f"{contents.location} has no tensor of a model, so that there is nothing to write")
    check_whole(contents, tensors)
    written = {each.name for each in tensors}
    aliases = {alias: name for alias, name in contents.aliases.items() if name in written}
    shards = shards_of(tensors, max_bytes=max_shard_bytes, aliases=aliases, metadata=_metadata(contents))
    copying = _Copying(source, contents, progress, total=sum(each.num_bytes for each in tensors))
    write_folder(path, shards, copying.fill)
    left_out = tuple(name for name in contents.tensors if name not in written)
    masters = [name for name in left_out if model_name_of_master(name) in written]
    report = _report(contents, path, tensors)
    return replace(report, aliases=aliases, left_out=left_out, num_masters=len(masters))


def _report(contents: Contents, destination: str, tensors: Sequence[StoredTensor]) -> ConvertReport:
    return ConvertReport(
        source=contents.location,
        source_format=contents.format,
        destination=destination,
        num_tensors=len(tensors),
        num_bytes=sum(each.num_bytes for each in tensors),
        verified=contents.verifiable,
        aliases=dict(contents.aliases),
    )


def _arrangement(contents: Contents, to: Literal["pieces", "whole"]) -> Arrangement:
    """Which files the save has; to the rules of a commit each is a rank's."""
    tensors = list(contents.tensors.values())
    if to == "whole":
        whole = [each.whole for each in tensors]
        return Arrangement(file_layout=to, holders=dict.fromkeys(whole, (0,)), written=[whole])
    files = {each.file for tensor in tensors for each in tensor.pieces}
    rank_of = {name: rank for rank, name in enumerate(sorted(files))}
    holders: dict[Piece, tuple[int, ...]] = {}
    placed: list[list[tuple[int, Piece]]] = [[] for _ in files or [""]]
    for tensor in tensors:
        for each in tensor.pieces:
            holders[each.piece] = (rank_of[each.file],)
            placed[rank_of[each.file]].append((each.start, each.piece))
        if not tensor.pieces:
            holders[tensor.whole] = (0,)
    written = [[piece for _, piece in sorted(each, key=lambda item: item[0])] for each in placed]
    return Arrangement(file_layout=to, holders=holders, written=written)


def _description(contents: Contents) -> Description:
    return Description(
        step=contents.step,
        layout=contents.layout or f"converted from {contents.format}",
        block_bytes=contents.block_bytes,
        aliases=contents.aliases,
        settings=contents.settings,
        extra=contents.extra,
    )


def _metadata(contents: Contents) -> dict[str, str]:
    """What the files say of themselves: what those of the source did, and in whose layout the tensors are."""
    kept: Any = contents.extra.get("metadata", {}) if contents.format == "safetensors" else {}
    ties = contents.aliases.keys()
    return {"format": "pt"} | {key: text for key, text in kept.items() if key not in ties}


class _Copying:
    """Fills files with pieces of a source, window by window."""

    def __init__(self, store: Store, contents: Contents, progress: Progress, *, total: int) -> None:
        self._contents = contents
        self._reader = PieceReader(store, contents)
        self._progress = progress
        self._done = 0
        self._total = total

    def fill(self, file: DataFile, writer: Writer) -> Written:
        """Write a file, the pieces in it from any pieces of the source that make them up."""
        filling = Filling(file, writer, block_bytes=self._contents.block_bytes)
        sizes = [(piece.num_elements, itemsize_bytes(piece.dtype)) for piece in file.pieces]
        for window in windows(sizes):
            parts = [part_of_piece(file.pieces[at], start, stop) for at, start, stop in window]
            for elements in self._reader.read(parts):
                data = elements.view(torch.uint8)
                filling.write(bytes_of(data))
                self._done += data.numel()
            self._progress(self._done, self._total)
        filling.flush()
        return Written(filling.checksums)
