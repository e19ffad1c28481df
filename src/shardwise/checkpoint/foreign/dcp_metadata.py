"""The metadata of `torch.distributed.checkpoint`: a pickle, which is parsed without importing what it names.

Its classes: torch/distributed/checkpoint/metadata.py, and `_StorageInfo` in filesystem.py
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.checkpoint.contents import can_exist
from shardwise.checkpoint.foreign.pickles import MadeObject, Named, parse
from shardwise.checkpoint.foreign.torch_files import ints
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES

__all__ = ["Blob", "DcpChunk", "Metadata", "SavedTensor", "parse_metadata"]

_RECORDS = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MEM_FORMAT_ENCODING",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
        "_StorageInfo",
    }
)
_OTHERS = frozenset(
    {
        Named("torch", "Size"),
        Named("torch.serialization", "_get_layout"),
        Named("collections", "OrderedDict"),
        *(
            Named(module, kind)
            for module in ("pathlib", "pathlib._local")
            for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        ),
    }
)


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor and the boxes that were saved of it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class Blob:
    """Where a box or an object lies."""

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


def parse_metadata(data: bytes) -> Metadata:
    """Return what `.metadata` says; raises `CheckpointError` when it is damaged or names what does not belong there."""
    fields = _record(parse(data, _belongs), "Metadata")
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
    return Metadata(tensors, tuple(objects), blobs)


def _belongs(module: str, name: str) -> bool:
    if f"{module}.".startswith("torch.distributed.") and name in _RECORDS:
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
        boxes.append(DcpChunk(offset, size))
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
