"""Safetensors files as Hugging Face lays them out: one file, or shards with or without an index. Headers are read only.

    model.safetensors.index.json    weight_map: w -> model-00001-of-00002.safetensors, ...
    model-00001-of-00002...         header: w F32 [4, 6], bytes 0 to 96
                                    __metadata__: "v" -> "w"  (v was tied to w, and left out by save_model)

Shards that `torch.distributed.checkpoint` wrote without consolidating them hold boxes of tensors; their metadata says
where each starts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.checkpoint.contents import Contents, StoredPiece, StoredTensor, can_exist
from shardwise.checkpoint.formats.model_shards import (
    as_one_of,
    check_numbers,
    index_problems,
    read_index,
    unnamed_notes,
)
from shardwise.checkpoint.formats.saved_boxes import SHARDING_INFO, boxes_in, saved_offsets
from shardwise.checkpoint.safetensors_files import TensorEntry, dtype_of, read_header
from shardwise.checkpoint.stores import Findings, OneFile, OpenFile, Store, about
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece, check_cover

_INDEX_SUFFIX = ".safetensors.index.json"


def read_contents(store: Store) -> Contents:
    """Return what the safetensors files of a store hold: those that its index names, else all; or one file alone.

    Ties that the metadata of the files names are aliases. The metadata is in `extra["metadata"]`; what files say
    differently is there under `"key (file)"`.
    Raises `CheckpointError`, with all findings, when a file is missing or malformed, a tensor is in several files, or
    index and files disagree.
    """
    file = store.name if isinstance(store, OneFile) else None
    weight_map = None if file is not None else read_index(store, _INDEX_SUFFIX)
    files = [file] if file is not None else _files(store, weight_map)
    problems = Findings()
    sizes: dict[str, int] = {}
    texts: dict[str, dict[str, str]] = {}
    boxes: dict[str, Mapping[str, Any] | None] = {}
    places: dict[str, list[tuple[str, TensorEntry]]] = {}
    for name in files:
        with problems.collecting(), OpenFile(store, name) as opened, about(opened.place):
            entries, texts[name] = read_header(opened.read, opened.size)
            boxes[name] = boxes_in(texts[name])
            sizes[name] = opened.size
            for key, entry in entries.items():
                places.setdefault(key, []).append((name, entry))
    if weight_map is not None:
        held = {key: [name for name, _ in found] for key, found in places.items()}
        problems += index_problems(weight_map, held, sizes)
    # All findings are collected: a download that broke off lacks more than one thing.
    tensors = {}
    for key, found in places.items():
        with problems.collecting():
            tensors[key] = _tensor(key, found, boxes)
    problems.check()
    location = store.location if file is None else f"{store.location}/{file}"
    extra = {"metadata": _merged(texts)}
    # Ranks write their boxes and nobody counts them: without the file of the last rank a tensor ends earlier.
    cut = [key for key, found in places.items() if len(found) > 1 or any(boxes[each] is not None for each, _ in found)]
    notes = (
        f"no file says the shapes of {few_of(cut)}, which torch.distributed.checkpoint wrote in parts: if the file of "
        "the last rank never came, they are smaller than they were. Compare them with the model",
    )
    contents = Contents(
        format="safetensors",
        location=location,
        tensors=tensors,
        file_sizes=sizes,
        aliases=_ties(tensors, texts),
        extra=extra,
        notes=(*(notes if cut else ()), *_file_notes(store, files, weight_map)),
    )
    return as_one_of(store, contents)


def _files(store: Store, weight_map: dict[str, str] | None) -> list[str]:
    if weight_map is not None:
        # Files that the index does not name are not read, and a note names them.
        return sorted(set(weight_map.values()))
    files = [name for name in store.names() if _FILE.fullmatch(name)]
    if not files:
        raise CheckpointError(f"{store.location} holds no safetensors file")
    check_numbers(files, store.location)
    models = {re.sub(r"-\d+-of-\d+", "", name) for name in files}
    if len(known := {name for name in models if _MODEL.fullmatch(name)}) > 1:
        raise CheckpointError(f"{store.location} has the models {few_of(sorted(known))}: name the file of one")
    return files


_FILE = re.compile(r"[^/]*\.safetensors", re.DOTALL)
_MODEL = re.compile(r"(?:model(?:_\d+)?|adapter_model|diffusion_pytorch_model|consolidated)\.safetensors")


def _file_notes(store: Store, files: Sequence[str], weight_map: Mapping[str, str] | None) -> list[str]:
    """What to know of files that the index leaves out, or that neither an index nor numbers make one model."""
    if weight_map is not None:
        return unnamed_notes((name for name in store.names() if _FILE.fullmatch(name)), files)
    if len({re.sub(r"\d+", "", name) for name in files}) < 2:
        return []
    return [f"{few_of(sorted(files), quotes=False)} are read as one model; name a file to read it alone"]


def _tensor(
    key: str, found: list[tuple[str, TensorEntry]], boxes: Mapping[str, Mapping[str, Any] | None]
) -> StoredTensor:
    code = found[0][1].code
    starts = []
    for file, entry in found:
        with about(file):
            offsets = saved_offsets(key, boxes[file])
        # Several files may have boxes of one tensor, but only if they say where each begins.
        if offsets is None and len(found) > 1:
            raise CheckpointError(
                f"tensor {key} is in several files: {', '.join(name for name, _ in found)}. Programs differ in which "
                "one they take: remove the others (load the files that are meant, and save them anew), or name one file"
            )
        if len(offsets or entry.shape) != len(entry.shape) or entry.code != code:
            raise CheckpointError(f"tensor {key}: its boxes differ in dtype or number of dims, see {file}")
        starts.append(offsets or (0,) * len(entry.shape))
    ends = [
        [at + size for at, size in zip(start, each.shape, strict=True)]
        for start, (_, each) in zip(starts, found, strict=True)
    ]
    # No file says the shape of the tensor: it ends where its last box ends. check_cover finds what is missing.
    shape = tuple(map(max, zip(*ends, strict=True)))
    if not can_exist(shape, itemsize_bytes(dtype_of(code))):
        raise CheckpointError(f"tensor {key}: its boxes together have a shape that no tensor has")
    pieces = tuple(
        StoredPiece(
            piece=Piece(name=key, dtype=dtype_of(code), global_shape=shape, offset=start, shape=entry.shape),
            file=file,
            start=entry.start,
            checksums=None,
        )
        for start, (file, entry) in zip(starts, found, strict=True)
    )
    if findings := check_cover(each.piece for each in pieces):
        raise CheckpointError(*findings)
    # After the cover was checked: an empty box may say where the tensor ends, but nothing is read for it.
    pieces = tuple(each for each in pieces if each.piece.num_elements)
    return StoredTensor(name=key, dtype=dtype_of(code), shape=shape, pieces=pieces)


def _ties(tensors: Mapping[str, StoredTensor], texts: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Names that `safetensors.torch.save_model` left out, for the tensor is there under the name that they map to."""
    pairs = (pair for metadata in texts.values() for pair in metadata.items())
    # The metadata has other keys as well ("format": "pt"); only what maps to a tensor is a tie.
    return {alias: name for alias, name in pairs if name in tensors and alias not in tensors}


def _merged(texts: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The metadata of all files; a key that they give different values stands there once per file."""
    merged: dict[str, Any] = {}
    for file, metadata in texts.items():
        for key, text in metadata.items():
            if key == SHARDING_INFO:
                continue
            # Shards mostly say the same; only what they say differently needs the name of its file.
            alike = all(other.get(key, text) == text for other in texts.values())
            merged[key if alike else f"{key} ({file})"] = text
    return merged
