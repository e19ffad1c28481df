"""Checkpoints of `torch.distributed.checkpoint`: metadata, and files with one tensor behind the other.

    .metadata       w float32 [4, 6], saved in two chunks        (a pickle)
                    (w, (0, 0)) -> __0_0.distcp from byte 0, 1200 bytes
                    (w, (2, 0)) -> __0_0.distcp from byte 1200, 1200 bytes
    __0_0.distcp    | torch.save of w[0:2] | torch.save of w[2:4] | ...
                      each a zip archive: the 48 bytes of the elements are somewhere inside

Both ways in which it writes tensors are read: as `torch.save` does, and as safetensors. The pickle is parsed without
importing what it names: so it is read without Megatron, and whichever version of torch has written it.
Its classes: torch/distributed/checkpoint/metadata.py, and `_StorageInfo` in filesystem.py
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

from shardwise.checkpoint.contents import Contents, StoredPiece, StoredTensor, can_exist
from shardwise.checkpoint.formats.dcp.training_names import KeyPath, is_setting, with_training_names
from shardwise.checkpoint.formats.saved_boxes import boxes_in, saved_offsets
from shardwise.checkpoint.formats.strided import TensorPlace, pieces_of
from shardwise.checkpoint.formats.torch_files.pickles import MadeObject, Named, parse
from shardwise.checkpoint.formats.torch_files.saved_values import (
    NotPlainError,
    ResolvedTensor,
    find_tensor,
    ints,
    number_of,
    read_value,
)
from shardwise.checkpoint.formats.torch_files.zip_parts import SIGNATURE
from shardwise.checkpoint.safetensors_files import TensorEntry, dtype_of, read_header
from shardwise.checkpoint.stores import (
    Findings,
    OpenFile,
    Store,
    about,
    is_value,
    open_data,
    read_whole,
    refusals,
    value_name,
)
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.dtypes import ITEMSIZE_BYTES
from shardwise.space import Box, Piece, check_cover
from shardwise.space.boxes import row_major_strides

_RECORDS = frozenset(
    {
        *("BytesIOWriteData", "BytesStorageMetadata", "ChunkStorageMetadata", "MEM_FORMAT_ENCODING", "Metadata"),
        *("MetadataIndex", "SavePlan", "StorageMeta", "TensorProperties", "TensorStorageMetadata", "TensorWriteData"),
        *("WriteItem", "WriteItemType", "_MEM_FORMAT_ENCODING", "_StorageInfo"),
    }
)
_OF_MEGATRON = frozenset({"MCoreMetadata", "MCoreSavePlan", "TensorReformulationMetadata"})
_OTHERS = frozenset(
    {
        Named("torch", "Size"),
        Named("torch.serialization", "_get_layout"),
        Named("collections", "OrderedDict"),
        # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as getattr(class, name). Nothing of it is called.
        Named("builtins", "getattr"),
        *(
            Named(module, kind)
            for module in ("pathlib", "pathlib._local")
            for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ),
    }
)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor and the boxes that were saved of it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Blob:
    """Where the bytes of a box or an object are."""

    file: str
    start: int
    num_bytes: int
    extensions: tuple[str, ...]
    """What the bytes went through on their way into the file (compression)."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a checkpoint holds."""

    tensors: Mapping[str, SavedTensor]
    objects: tuple[str, ...]
    """Names of what is no tensor."""
    blobs: Mapping[tuple[str, tuple[int, ...] | None], Blob]
    """By name and offset of the box; None for objects."""
    flat: Mapping[str, tuple[int, ...]]
    """The shapes of tensors whose boxes Megatron saved flat: see `megatron.names.in_shape`."""
    paths: Mapping[str, KeyPath]
    """Of names in the state dict that was saved, as far as it is known."""


def parse_metadata(data: bytes) -> Metadata:
    """Return what `.metadata` says; raises `CheckpointError` when it is damaged or names what does not belong there."""
    root = parse(data, _belongs)
    fields = _record(root, "MCoreMetadata" if _is_a(root, "MCoreMetadata") else "Metadata")
    tensors: dict[str, SavedTensor] = {}
    objects = []
    for name, value in _mapping(fields.get("state_dict_metadata")).items():
        if not isinstance(name, str):
            raise _unknown("a name")
        if _is_a(value, "BytesStorageMetadata"):
            objects.append(name)
        else:
            tensors[name] = _tensor(name, _record(value, "TensorStorageMetadata"))
    blobs = {}
    for key, value in _mapping(fields.get("storage_data")).items():
        index = _record(key, "MetadataIndex")
        offset = index.get("offset")
        blobs[_text(index.get("fqn")), None if offset is None else ints(offset)] = _blob(_record(value, "_StorageInfo"))
    flat = {}
    for name, value in _mapping(fields.get("mcore_data") or {}).items():
        if (shape := _mapping(value).get("nd_reformulated_orig_global_shape")) is not None:
            flat[_text(name)] = ints(shape)
    return Metadata(tensors, tuple(objects), blobs, flat, _paths(fields.get("planner_data")))


def _paths(value: object) -> dict[str, KeyPath]:
    """What planners keep of names; other planners than torch's may keep anything."""
    return {
        name: path
        for name, path in (value.items() if isinstance(value, dict) else ())
        if isinstance(name, str)
        and isinstance(path, tuple)
        and 0 < len(path) <= _MAX_DEPTH
        and all(type(each) in (str, int) for each in path)
    }


def _belongs(module: str, name: str) -> bool:
    # By class and not by module: torch has moved these classes between modules of this package.
    if f"{module}.".startswith("torch.distributed.") and name in _RECORDS:
        return True
    if module.startswith("megatron.core.dist_checkpointing.") and name in _OF_MEGATRON:
        return True
    return (module == "torch" and name in ITEMSIZE_BYTES) or Named(module, name) in _OTHERS


def _tensor(name: str, fields: Mapping[object, object]) -> SavedTensor:
    properties = fields.get("properties")
    # Its state is a tuple, the dtype first.
    state = properties.state if isinstance(properties, MadeObject) and _is_a(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Named) or dtype.name not in ITEMSIZE_BYTES:
        raise _unknown(f"the dtype of {name}")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise _unknown(f"the chunks of {name}")
    shape = ints(fields.get("size"))
    if not can_exist(shape, ITEMSIZE_BYTES[dtype.name]):
        raise CheckpointError(f"tensor {name} has a shape of {len(shape)} dims that no tensor has")
    boxes = []
    for chunk in chunks:
        box = _record(chunk, "ChunkStorageMetadata")
        offset, size = ints(box.get("offsets")), ints(box.get("sizes"))
        inside = len(offset) == len(size) == len(shape) and all(
            at + some <= whole for at, some, whole in zip(offset, size, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"tensor {name} of shape {shape} has a chunk outside, of shape {size} at {offset}")
        boxes.append(Box(offset, size))
    return SavedTensor(dtype.name, shape, tuple(boxes))


def _blob(fields: Mapping[object, object]) -> Blob:
    start, num_bytes = ints((fields.get("offset"), fields.get("length")))
    extensions = fields.get("transform_descriptors") or ()
    if not isinstance(extensions, list | tuple):
        raise _unknown("the extensions of a file")
    return Blob(_text(fields.get("relative_path")), start, num_bytes, tuple(map(_text, extensions)))


def _is_a(value: object, kind: str) -> bool:
    return isinstance(value, MadeObject) and isinstance(value.of, Named) and value.of.name == kind


def _record(value: object, kind: str) -> Mapping[object, object]:
    """The fields of an object of a class."""
    if not (isinstance(value, MadeObject) and _is_a(value, kind)):
        raise _unknown(f"a {kind}")
    return _mapping(value.state)


def _mapping(value: object) -> Mapping[object, object]:
    if isinstance(value, MadeObject) and value.of == Named("collections", "OrderedDict"):
        try:
            return dict(value.pairs)
        except TypeError:
            raise _unknown("a key") from None
    if not isinstance(value, dict):
        raise _unknown("a mapping")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _unknown("a text")
    return value


def _unknown(what: str) -> CheckpointError:
    return CheckpointError(f"it does not have {what} where torch 2.11 to 2.13 write it")


_METADATA = ".metadata"
_MAX_DEPTH = 64
"""Of a value in a state dict: those of torch are three deep."""
_MAX_OBJECT_BYTES = 1 << 26
_MAX_OBJECTS_BYTES = 1 << 30
"""Of one object, and of all together; those beyond are skipped."""


def read_contents(store: Store) -> Contents:
    """Return what the checkpoint of `torch.distributed.checkpoint` in a store holds.

    What is no tensor is in `extra["objects"]` by name, as JSON values. Names of what JSON cannot hold are in
    `extra["skipped"]`. Raises `CheckpointError`, with all findings, for missing, truncated or damaged files. It also
    refuses a `.metadata` that names other classes than those of such metadata, and runs none of it.
    """
    names = list(store.names())
    folders = parts_of(names) or [""]
    torn = {each[1] for each in map(_PART_DATA.fullmatch, names) if each} - set(folders)
    if torn and folders != [""]:
        raise CheckpointError(
            f"{store.location} has data in {few_of(sorted(torn), quotes=False)} without the .metadata, which is "
            "written last: the save was interrupted or copied in part. To have the rest alone, name "
            f"{store.location}/{folders[0]}"
        )
    parts = [_with_paths(store, folder) for folder in folders]
    contents, paths = parts[0]
    for other, more in parts[1:]:
        contents = contents.joined(other, where="in the model and in the optimizer")
        paths = {**paths, **more}
    return with_training_names(contents, paths, _settings_of(contents, paths, store))


def _settings_of(contents: Contents, paths: Mapping[str, KeyPath], store: Store) -> dict[str, Any]:
    """The numbers of optimizer settings that were saved as tensors without dims, by name. torch accepts either."""
    found = {}
    for name, tensor in contents.tensors.items():
        if not tensor.shape and is_setting(paths.get(name, (name,))):
            (piece,) = tensor.pieces
            data = bytearray(piece.num_bytes)
            place = f"{store.location}/{piece.file}"
            with refusals(f"{place} cannot be read"), closing(open_data(store, piece.file)) as reader:
                reader.read_into(memoryview(data), piece.start)
            found[name] = number_of(bytes(data), tensor.dtype)
    return {name: number for name, number in found.items() if number is not None}


_FOLDER = r"((?:pytorch_model_fsdp|optimizer)(?:_\d+)?/)"
_PART, _PART_DATA = re.compile(rf"{_FOLDER}\.metadata"), re.compile(rf"{_FOLDER}__\d+_\d+\.distcp")


def parts_of(names: Sequence[str]) -> list[str]:
    """The folders of a checkpoint: "", or those of model and optimizer where accelerate has written each apart.

    Empty where there is no checkpoint, or where several models or optimizers are.
    """
    if _METADATA in names:
        return [""]
    parts = sorted((found[1] for found in map(_PART.fullmatch, names) if found), reverse=True)
    num_models = sum(each.startswith("pytorch_model") for each in parts)
    return parts if num_models == 1 and len(parts) <= 2 else []


def _with_paths(store: Store, folder: str) -> tuple[Contents, Mapping[str, KeyPath]]:
    metadata = read_metadata(store, folder)
    contents = as_saved(metadata, store, folder)
    aliases = aliases_of(metadata, contents.tensors)
    tensors = {name: each for name, each in contents.tensors.items() if name not in aliases}
    return replace(contents, tensors=tensors, aliases=aliases), metadata.paths


def read_metadata(store: Store, folder: str = "") -> Metadata:
    """Return what `.metadata` says, which is in the store or in a folder of it ("iter_0000010/")."""
    data = read_whole(store, folder + _METADATA)
    with about(f"{store.location}/{folder}{_METADATA}"):
        return parse_metadata(data)


def as_saved(metadata: Metadata, store: Store, folder: str = "") -> Contents:
    """Return what a checkpoint with this metadata holds, under the names that it has there: see `read_contents`."""
    place = f"{store.location}/{folder}{_METADATA}"
    # Files stay open while tensors are looked up: a file has thousands
    # of them, and an object store asks for its size at each open.
    with ExitStack() as stack:
        files, problems = _opened(store, folder, metadata, stack)
        tensors: dict[str, StoredTensor] = {}
        for name, saved in metadata.tensors.items():
            with problems.collecting():
                tensors[name] = _stored(name, saved, metadata, files, place)
        extra = _objects(metadata, files, problems)
        skipped = extra.get("skipped", ())
        notes = (
            [f"{few_of(skipped)} left out: what JSON cannot hold is no part of a checkpoint here"] if skipped else []
        )
        problems += [f"{place}: {problem}" for problem in _unplaced(metadata)]
        sizes = {file.name: file.size for file in files.values()}
        pieces = (each for tensor in tensors.values() for each in tensor.pieces)
        sizes |= {each.file: each.num_bytes for each in pieces if is_value(each.file)}
    problems.check()
    return Contents(
        format="dcp", location=store.location, tensors=tensors, file_sizes=sizes, extra=extra, notes=tuple(notes)
    )


def aliases_of(metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return other names of tensors, whose chunks are at the same places."""
    first: dict[object, str] = {}
    found = {}
    for name, tensor in tensors.items():
        saved = metadata.tensors[name]
        places = tuple((chunk, metadata.blobs.get((name, chunk.offset))) for chunk in saved.chunks)
        if tensor.pieces and (owner := first.setdefault((saved.dtype, saved.shape, places), name)) != name:
            found[name] = owner
    return found


class _File(OpenFile):
    """A data file with the safetensors headers in it, each read once."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name)
        self.name = name
        self._headers: dict[int, tuple[dict[str, TensorEntry], Mapping[str, Any] | None]] = {}

    def header_at(self, start: int) -> tuple[dict[str, TensorEntry], Mapping[str, Any] | None]:
        """The entries of the safetensors file that begins at a byte and ends with the file, and its `boxes_in`."""
        if start not in self._headers:
            entries, texts = read_header(lambda at, num: self.read(start + at, num), self.size - start)
            self._headers[start] = entries, boxes_in(texts)
        return self._headers[start]


def _opened(store: Store, folder: str, metadata: Metadata, stack: ExitStack) -> tuple[dict[str, _File], Findings]:
    """The data files by the name that the metadata has, and what is wrong with those that are not whole."""
    ends: dict[str, int] = {}
    for blob in metadata.blobs.values():
        ends[blob.file] = max(ends.get(blob.file, 0), blob.start + blob.num_bytes)
    files = {}
    problems = Findings()
    for name, end in ends.items():
        with problems.collecting():
            file = stack.enter_context(_File(store, folder + name))
            # One finding for the file; without it each tensor in the missing part would be one.
            if file.size < end:
                raise CheckpointError(
                    f"{file.place} has {file.size:,} bytes, but the checkpoint has saved {end:,} in it: it is truncated"
                )
            files[name] = file
    return files, problems


def _unplaced(metadata: Metadata) -> Iterator[str]:
    """What the metadata names without saying where it is."""
    for name in metadata.objects:
        if (name, None) not in metadata.blobs:
            yield f"it gives no place for the object {name}"
    for name, saved in metadata.tensors.items():
        for chunk in saved.chunks:
            if 0 not in chunk.shape and (name, chunk.offset) not in metadata.blobs:
                yield f"it gives no place for the chunk of {name} at {chunk.offset}"


def _stored(
    name: str, saved: SavedTensor, metadata: Metadata, files: dict[str, _File], metadata_place: str
) -> StoredTensor:
    """A tensor with its pieces. Those without a whole file are left out: their problems are found elsewhere."""
    pieces: list[StoredPiece] = []
    problems = Findings()
    lost = False
    for chunk in saved.chunks:
        blob = metadata.blobs.get((name, chunk.offset))
        if 0 in chunk.shape:
            continue
        if blob is None or blob.file not in files:
            lost = True
        else:
            file = files[blob.file]
            where = f"{file.place}: tensor {name}, bytes {blob.start:,} to {blob.start + blob.num_bytes:,}"
            with problems.collecting(), about(where):
                pieces += _pieces(name, saved, chunk, *_place(name, chunk, blob, file))
    # What is missing is reported with its file; that the tensor then has holes would say it again.
    if not problems and not lost:
        held = [each.piece for each in pieces]
        with about(metadata_place):
            if findings := check_cover(held):
                raise CheckpointError(*findings)
            if not held and 0 not in saved.shape:
                raise CheckpointError(f"{name}: no chunk of it was saved")
    problems.check()
    return StoredTensor(name=name, dtype=saved.dtype, shape=saved.shape, pieces=tuple(pieces))


def _place(name: str, chunk: Box, blob: Blob, file: _File) -> tuple[str, TensorPlace]:
    """The file with the elements of a chunk, and where they are in it."""
    # Compressed or encrypted: the bytes in the file are not those of
    # the tensor, and which code makes them is for its owner to say.
    if blob.extensions:
        raise CheckpointError(f"it went through {', '.join(blob.extensions)}; save without extensions to read it here")
    # The metadata does not say which of the two formats was used, so the first bytes do.
    if file.read(blob.start, min(len(SIGNATURE), blob.num_bytes)) == SIGNATURE:
        found = find_tensor(lambda at, num: file.read(blob.start + at, num), blob.num_bytes)
        if isinstance(found, ResolvedTensor):
            return value_name(found.data), found.place
        return file.name, replace(found, start=blob.start + found.start)
    entries, boxes = file.header_at(blob.start)
    if name not in entries:
        raise CheckpointError("it is neither in the format of torch.save nor in that of safetensors")
    # The file says it too: one that was copied under another's name has all its bytes, and wrong elements.
    offset = saved_offsets(name, boxes)
    if offset is not None and offset != chunk.offset:
        raise CheckpointError(f"it holds the chunk at {offset}, not that at {chunk.offset}")
    entry = entries[name]
    strides, start = row_major_strides(entry.shape), blob.start + entry.start
    return file.name, TensorPlace(dtype=dtype_of(entry.code), shape=entry.shape, strides=strides, start=start)


def _pieces(name: str, saved: SavedTensor, chunk: Box, file: str, place: TensorPlace) -> Iterator[StoredPiece]:
    """The pieces of a chunk."""
    if (place.dtype, place.shape) != (saved.dtype, chunk.shape):
        raise CheckpointError(
            f"it is {place.dtype} of shape {place.shape}, but by the metadata {saved.dtype} of shape {chunk.shape}"
        )
    piece = Piece(name=name, dtype=saved.dtype, global_shape=saved.shape, offset=chunk.offset, shape=chunk.shape)
    yield from pieces_of(place, piece, file)


def _objects(metadata: Metadata, files: dict[str, _File], problems: Findings) -> dict[str, Any]:
    """What is no tensor, as `extra` of the contents; what is wrong is added to the problems."""
    values: dict[str, Any] = {}
    skipped: list[str] = []
    left = _MAX_OBJECTS_BYTES
    for name in metadata.objects:
        blob = metadata.blobs.get((name, None))
        if blob is not None and blob.file in files:
            file = files[blob.file]
            # Counted also where an object is then skipped: the sum of
            # what is read stays bounded, in any order of names.
            left -= blob.num_bytes
            try:
                if left < 0:
                    raise NotPlainError("those before it are large")
                values[name] = _object(name, blob, file)
            except NotPlainError:
                skipped.append(name)
            except CheckpointError as error:
                problems += error.problems
    return {key: found for key, found in (("objects", values), ("skipped", skipped)) if found}


def _object(name: str, blob: Blob, file: _File) -> Any:
    if blob.num_bytes > _MAX_OBJECT_BYTES or blob.extensions:
        raise NotPlainError("it is large or compressed")
    data = file.read(blob.start, blob.num_bytes)
    try:
        return read_value(data)
    except NotPlainError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{file.place}: object {name}, at byte {blob.start:,}: {error}") from error
