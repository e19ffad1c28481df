"""What `torch.save` wrote: where the elements of a tensor are in it, and plain values, without torch.

The file is a zip archive without compression:

    PK.. x/data.pkl | pickle | PK.. x/byteorder | little | PK.. x/data/0 | the storage of a tensor | ... | directory
                        |                                                  ^ first byte + offset * itemsize
                        +-- shape, strides, offset and the storage "0" of the tensor

`data.pkl` is a pickle of the value, `data/0`, `data/1`, ... are the storages of its tensors. Both ends of the archive
are read, and a header in between; of a large tensor not a byte. The format: torch/serialization.py
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.foreign.pickles import MadeObject, Named, Persistent, parse
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES, itemsize_bytes

__all__ = ["SIGNATURE", "NotPlainError", "TensorPlace", "find_tensor", "ints", "read_value"]

SIGNATURE = b"PK\x03\x04"
"""The first bytes of what `torch.save` writes."""

_EDGE_BYTES = 4096
"""Everything but the elements of one tensor is so near to one of the ends."""
_MAX_PART_BYTES = 1 << 26
_MAX_DIRECTORY_BYTES = 1 << 20
"""A tensor or a value has five parts or six."""
_MAX_VALUES = 1_000_000
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
)
_STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "BoolStorage": "bool",
        "ByteStorage": "uint8",
        "CharStorage": "int8",
        "ShortStorage": "int16",
        "IntStorage": "int32",
        "LongStorage": "int64",
        "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16",
        "FloatStorage": "float32",
        "DoubleStorage": "float64",
        "ComplexFloatStorage": "complex64",
        "ComplexDoubleStorage": "complex128",
        "UntypedStorage": "uint8",
    }
)
_ORDERED = Named("collections", "OrderedDict")
_SIZE = Named("torch", "Size")
_TYPED = Named("torch._utils", "_rebuild_tensor_v2")
_UNTYPED = Named("torch._utils", "_rebuild_tensor_v3")

Read = Callable[[int, int], bytes]
"""Reads (first byte, number of bytes) of what `torch.save` wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where the elements of a tensor are."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements to the next index, per dim."""
    start: int
    """First byte of the first element."""


def find_tensor(read: Read, size: int) -> TensorPlace:
    """Return the place of the one tensor whose save has `size` bytes; raises `CheckpointError` when it is none."""
    archive = _Archive(read, size)
    value = parse(archive.part("data.pkl"), _may_be_in_tensor)
    match value:
        # Version 2 says the dtype by the class of the storage;
        # version 3 has an untyped storage and the dtype by itself.
        case MadeObject(of=of, args=(Persistent(key=key), offset, shape, strides, _, _, *rest)) if of == _TYPED:
            dtype, part, num_bytes = _storage(key)
        case MadeObject(of=of, args=(Persistent(key=key), offset, shape, strides, _, _, Named() as named, *rest)) if (
            of == _UNTYPED and named.name in ITEMSIZE_BYTES
        ):
            _, part, num_bytes = _storage(key)
            dtype = named.name
        case _:
            raise CheckpointError("it is no tensor as torch.save writes them")
    # The last argument, where there is one, has flags (conj, neg): the bytes then stand for other values.
    if any(rest):
        raise CheckpointError("its tensor is conjugated or negated: save it resolved (resolve_conj, resolve_neg)")
    place = TensorPlace(dtype=dtype, shape=ints(shape), strides=ints(strides), start=0)
    return _placed(archive, part, place, ints((offset,))[0], num_bytes)


class NotPlainError(CheckpointError):
    """A saved value that JSON cannot hold."""


def read_value(data: bytes) -> Any:
    """Return a saved value of numbers, texts, None, and lists and dicts of those, as JSON has them; tuples as lists.

    Raises `NotPlainError` for any other value, and `CheckpointError` when the bytes are damaged.
    """
    archive = _Archive(lambda start, num_bytes: data[start : start + num_bytes], len(data))
    value = parse(archive.part("data.pkl"), _may_be_in_value)
    try:
        return _plain(value, [_MAX_VALUES])
    except RecursionError:
        raise NotPlainError("it is nested too deeply") from None


def ints(value: object) -> tuple[int, ...]:
    """Return a pickled `torch.Size`, tuple or list of whole numbers; raises `CheckpointError` for all else."""
    if isinstance(value, MadeObject) and value.of == _SIZE and isinstance(value.args, tuple) and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list) or not all(type(each) is int and 0 <= each < 1 << 63 for each in value):
        raise CheckpointError("where it has sizes or offsets, there are no whole numbers")
    return tuple(value)


class _Archive(io.RawIOBase):
    """A zip archive that is read at its ends only; a file to `zipfile`. Raises `CheckpointError` for a damaged one."""

    def __init__(self, read: Read, size: int) -> None:
        super().__init__()
        self._read = read
        self._size = size
        self._at = 0
        # The limit holds while zipfile reads the directory. Parts may be longer, and have a limit of their own.
        self._max_bytes = _MAX_DIRECTORY_BYTES
        # Two reads for all that is needed: zipfile alone would ask for many short parts, each a request of its own.
        edge = min(size, _EDGE_BYTES)
        self._head = read(0, edge)
        self._tail = read(size - edge, edge) if size > edge else self._head
        try:
            self._zip = zipfile.ZipFile(self)
            self._infos = {info.filename.partition("/")[2]: info for info in self._zip.infolist()}
            self._max_bytes = _MAX_PART_BYTES
            order = self.part("byteorder") if "byteorder" in self._infos else b"little"
        except _ZIP_ERRORS as error:
            raise _damaged(error) from None
        if order != b"little":
            raise CheckpointError(f"its elements are {order.decode(errors='replace')}-endian, not little-endian")

    def part(self, name: str) -> bytes:
        """The bytes of a short part."""
        try:
            info = self._stored(name)
            if info.file_size > _MAX_PART_BYTES:
                raise CheckpointError(f"its part {name} has {info.file_size:,} bytes, too many for what it should be")
            return self._zip.read(info)
        except _ZIP_ERRORS as error:
            raise _damaged(error) from None

    def place(self, name: str) -> tuple[int, int]:
        """The first byte of a part, and the number of its bytes."""
        try:
            info = self._stored(name)
        except _ZIP_ERRORS as error:
            raise _damaged(error) from None
        # The directory does not say how long the header before the bytes is: torch pads it to align them.
        local = self._bytes(info.header_offset, 30)
        if local[:4] != SIGNATURE:
            raise CheckpointError(f"its part {name} is not where its directory says")
        name_bytes, extra_bytes = struct.unpack("<HH", local[26:])
        start = info.header_offset + 30 + name_bytes + extra_bytes
        if start + info.file_size > self._size:
            raise CheckpointError(f"its part {name} ends after it")
        return start, info.file_size

    def _stored(self, name: str) -> zipfile.ZipInfo:
        info = self._infos[name]
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            # torch never compresses; a part that is would be read as elements byte by byte.
            raise zipfile.BadZipFile(f"{name} is compressed")
        return info

    def _bytes(self, start: int, num_bytes: int) -> bytes:
        num_bytes = max(0, min(num_bytes, self._size - start))
        if num_bytes > self._max_bytes:
            # zipfile reads as much as the archive asks for, in one piece.
            raise zipfile.BadZipFile("its directory is too long")
        if start + num_bytes <= len(self._head):
            return self._head[start : start + num_bytes]
        first = self._size - len(self._tail)
        if start >= first:
            return self._tail[start - first : start - first + num_bytes]
        return self._read(start, num_bytes)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError("before the start")
        self._at = at
        return at

    def read(self, num_bytes: int = -1) -> bytes:
        wanted = self._size - self._at if num_bytes is None or num_bytes < 0 else num_bytes
        data = self._bytes(self._at, wanted)
        self._at += len(data)
        return data


def _damaged(error: Exception) -> CheckpointError:
    return CheckpointError(f"it is not what torch.save writes, or it is damaged: {str(error) or type(error).__name__}")


def _may_be_in_tensor(module: str, name: str) -> bool:
    if module in ("torch", "torch.storage") and name.endswith("Storage"):
        return True
    if module == "torch":
        return name == "Size" or name in ITEMSIZE_BYTES
    return Named(module, name) in (_ORDERED, _TYPED, _UNTYPED)


def _may_be_in_value(module: str, name: str) -> bool:
    # Its own error: such a value is skipped, while a damaged one makes the checkpoint damaged.
    if Named(module, name) not in (_ORDERED, _SIZE):
        raise NotPlainError(f"it holds a {module}.{name}")
    return True


def _storage(key: object) -> tuple[str, str, int]:
    """The dtype, the part of the archive and the number of bytes of a storage."""
    match key:
        case ("storage", Named(name=kind), str(part), str(), int(num_elements)) if kind in _STORAGES:
            dtype = _STORAGES[kind]
            return dtype, f"data/{part}", num_elements * itemsize_bytes(dtype)
    raise CheckpointError("its tensor has a storage that is not known")


def _placed(archive: _Archive, part: str, place: TensorPlace, offset: int, num_storage_bytes: int) -> TensorPlace:
    """The place in the file of a tensor that starts at an element of a storage, once it is known to be within."""
    first, num_bytes = archive.place(part)
    # The last element that the strides reach. A pickle may say any
    # strides, and a read past the storage would be other tensors.
    reach = sum((size - 1) * stride for size, stride in zip(place.shape, place.strides, strict=False)) + 1
    needed = (offset + (0 if 0 in place.shape else reach)) * itemsize_bytes(place.dtype)
    if len(place.shape) != len(place.strides) or num_bytes != num_storage_bytes or needed > num_bytes:
        raise CheckpointError(
            f"its tensor of shape {place.shape}, strides {place.strides} and offset {offset} does not lie in its "
            f"storage, which has {num_bytes:,} bytes and should have {num_storage_bytes:,}"
        )
    start = first + offset * itemsize_bytes(place.dtype)
    return TensorPlace(dtype=place.dtype, shape=place.shape, strides=place.strides, start=start)


def _plain(value: object, left: list[int]) -> Any:
    """The value as JSON has it. `left` holds how many values may still come: a pickle may name one very often."""
    left[0] -= 1
    if left[0] < 0:
        raise NotPlainError("it holds too many values")
    # State dicts are ordered dicts; with arguments or a state of its own it is something else.
    if isinstance(value, MadeObject) and value.of == _ORDERED and value.args == () and value.state is None:
        value = dict(value.pairs)
    if isinstance(value, MadeObject) and value.of == _SIZE:
        value = ints(value)
    if value is None or type(value) in (str, bool) or (type(value) is int and abs(value) < 1 << 64):
        return value
    # Infinity and NaN are skipped, since JSON has no word for them.
    if type(value) is float and value - value == 0.0:
        return value
    if isinstance(value, list | tuple):
        return [_plain(each, left) for each in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(each, left) for key, each in value.items()}
    raise NotPlainError(f"it holds a {type(value).__name__}, or what JSON cannot hold")
