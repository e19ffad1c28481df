"""Files of Hugging Face, written: a folder that `from_pretrained` loads.

    model-00001-of-00002.safetensors     tensors, a file up to max_bytes
    model-00002-of-00002.safetensors
    model.safetensors.index.json         tensor -> file; only where there are several files

The format: https://huggingface.co/docs/transformers/big_models#sharded-checkpoints
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.formats.format import FolderPlan, FolderRequest
from shardwise.checkpoint.outputs import Outputs
from shardwise.checkpoint.safetensors_files import DataFile, JoinedWrites, lay_out, stored_as, unique_keys
from shardwise.checkpoint.stores import Writer
from shardwise.errors import CheckpointError


def plan_files(outputs: Outputs, request: FolderRequest) -> FolderPlan:
    """The folder with the outputs. Raises CheckpointError for names and dtypes that such files cannot hold."""
    shards = shards_of(
        list(outputs.tensors.values()),
        max_bytes=request.max_file_bytes,
        places=request.places,
        aliases=outputs.aliases,
        metadata=_metadata(outputs.contents),
    )
    files = {shard.name: shard.file for shard in shards}
    return FolderPlan(files=files, filling=_begun, last=index_of(shards))


def _begun(file: DataFile, writer: Writer) -> JoinedWrites:
    """A file that has its header, and takes no checksums."""
    writes = JoinedWrites(writer)
    writes.write(memoryview(file.header))
    return writes


def _metadata(contents: Contents) -> dict[str, str]:
    """The metadata of the files: that of the source, and the writer of the layout."""
    kept: Any = contents.extra.get("metadata", {}) if contents.format == "safetensors" else {}
    # Files of Hugging Face name ties in their metadata; `aliases` has these, and the writer names them anew.
    ties = contents.stored.aliases.keys()
    return {"format": "pt"} | {key: text for key, text in kept.items() if key not in ties}


_INDEX = "model.safetensors.index.json"


_SINGLE = "model.safetensors"
"""Of a model in one file, which needs no index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A file of the folder."""

    name: str
    tensors: tuple[StoredTensor, ...]
    file: DataFile


def shards_of(
    tensors: Sequence[StoredTensor],
    *,
    max_bytes: int,
    places: Mapping[str, tuple[str, int]],
    aliases: Mapping[str, str],
    metadata: Mapping[str, str],
) -> list[ShardFile]:
    """The files of these tensors, in order: each is full when the next tensor would bring it over `max_bytes`.

    A larger tensor has its own file. places: the file of each tensor, and its place there; {}: files go by size. Ties
    stand in the metadata of the file as safetensors.torch.save_model has them: alias -> name. Raises CheckpointError
    for names and dtypes that such files cannot hold.
    """
    _check_tensors(tensors)
    groups = _groups_at(tensors, places) if places else _groups_of_size(tensors, max_bytes)
    shards = []
    for name, group in groups:
        held = {tensor.name for tensor in group}
        ties = {alias: name for alias, name in aliases.items() if name in held}
        pieces = [tensor.whole for tensor in group]
        # empty: a parameter without elements is still one that `from_pretrained` looks for. The ties go first, so
        # that no alias named "format" takes its place.
        file = lay_out(pieces, metadata={**ties, **metadata}, empty=True)
        shards.append(ShardFile(name=name, tensors=tuple(group), file=file))
    return shards


_Groups = list[tuple[str, list[StoredTensor]]]
"""Tensors by the name of their file."""


def _groups_of_size(tensors: Sequence[StoredTensor], max_bytes: int) -> _Groups:
    groups: list[list[StoredTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        # An empty group takes any tensor: one that is larger than max_bytes has a file of its own.
        if groups[-1] and num_bytes + tensor.num_bytes > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(tensor)
        num_bytes += tensor.num_bytes
    if len(groups) == 1:
        return [(_SINGLE, groups[0])]
    return [(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group) for number, group in enumerate(groups, 1)]


def _groups_at(tensors: Sequence[StoredTensor], places: Mapping[str, tuple[str, int]]) -> _Groups:
    # What has no place, having no elements, stands in the first file.
    first = (min(file for file, _ in places.values()), 0)
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in sorted(tensors, key=lambda each: places.get(each.name, first)):
        groups.setdefault(places.get(tensor.name, first)[0], []).append(tensor)
    return list(groups.items())


def index_of(shards: Sequence[ShardFile]) -> dict[str, bytes]:
    """The file that says which tensor is in which of several files: name and bytes; none where a model has one file."""
    if [shard.name for shard in shards] == [_SINGLE]:
        return {}
    tensors = [(tensor, shard.name) for shard in shards for tensor in shard.tensors]
    total = sum(tensor.num_bytes for tensor, _ in tensors)
    # Both keys are what transformers reads; total_size counts the data without headers, as it does.
    fields = {"metadata": {"total_size": total}, "weight_map": {tensor.name: file for tensor, file in tensors}}
    return {_INDEX: (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()}


def _check_tensors(tensors: Sequence[StoredTensor]) -> None:
    names = [tensor.name for tensor in tensors]
    problems = [
        f"{name!r} cannot be the name of a tensor in a safetensors file"
        for name, key in zip(names, unique_keys(names), strict=True)
        if name != key
    ]
    problems += [
        f"{tensor.name} is of dtype {tensor.dtype}, which safetensors files cannot hold; convert to whole (--to "
        "whole), which names the dtype in its manifest"
        for tensor in tensors
        if stored_as(tensor.dtype, tensor.shape)[0] == "U8" and tensor.dtype != "uint8"
    ]
    if problems:
        raise CheckpointError(*problems)
