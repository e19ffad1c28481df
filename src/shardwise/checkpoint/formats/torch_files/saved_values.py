"""What `torch.save` wrote: where the elements of its tensors are, and all other values; nothing of it is run.

The file is a zip archive without compression:

    PK.. x/data.pkl | pickle | PK.. x/byteorder | little | PK.. x/data/0 | the storage of a tensor | ... | directory
                        |                                                  ^ first byte + offset * itemsize
                        +-- shape, strides, offset and the storage "0" of the tensor

or, before torch 1.6, pickles with the storages behind them:

    number | version | system | pickle | keys of the storages | elements, storage "0" | elements, storage "1" | ...

Of a large tensor not a byte is read. The format: torch/serialization.py
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from shardwise.checkpoint.contents import MAX_INDEX, can_exist
from shardwise.checkpoint.formats.strided import TensorPlace
from shardwise.checkpoint.formats.torch_files.pickles import (
    CutShortError,
    MadeObject,
    Named,
    Persistent,
    parse,
    parse_first,
)
from shardwise.checkpoint.formats.torch_files.zip_parts import SIGNATURE, Read, ZipParts
from shardwise.checkpoint.stores import OpenFile
from shardwise.comm.local_tensors import bytes_of, torch_dtype
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES, itemsize_bytes
from shardwise.space.boxes import row_major_strides

_PICKLE = "data.pkl"
_MAX_VALUES = 1_000_000
_MAX_DEPTH = 200
_MAX_BITS = 4096
"""Of a whole number: Python writes no more than 4,300 digits."""
_FIRST_BYTES = 1 << 20
_MAX_PICKLE_BYTES = 1 << 28
_MAX_RESOLVED_BYTES = 1 << 26
"""Of conjugated and negated tensors of one file, whose values are kept in memory; more are named."""
_GROUPS = "param_groups"
STORAGES: Mapping[str, str] = MappingProxyType(
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
        "QInt8Storage": "int8",
        "QUInt8Storage": "uint8",
        "QInt32Storage": "int32",
    }
)
"""The dtype of each class of storages; of several classes of one dtype torch.save writes the first."""
_ORDERED = Named("collections", "OrderedDict")
_SIZE = Named("torch", "Size")
_PLAIN_TENSOR = Named("torch._utils", "_rebuild_tensor")
_TYPED = Named("torch._utils", "_rebuild_tensor_v2")
_UNTYPED = Named("torch._utils", "_rebuild_tensor_v3")
_PARAMETERS = (
    Named("torch._utils", "_rebuild_parameter"),
    Named("torch._utils", "_rebuild_parameter_with_state"),
)
_SUBCLASS = Named("torch._tensor", "_rebuild_from_type_v2")
_TENSOR_CLASSES = (
    Named("torch", "Tensor"),
    Named("torch._tensor", "Tensor"),
    Named("torch.nn.parameter", "Parameter"),
    Named("torch.nn.parameter", "Buffer"),
)
_DICTS = (_ORDERED, Named("collections", "defaultdict"), Named("builtins", "dict"), Named("__builtin__", "dict"))
_COUNTER = Named("collections", "Counter")
_SETS = tuple(Named(module, name) for module in ("builtins", "__builtin__") for name in ("set", "frozenset"))
_ENCODE = Named("_codecs", "encode")


def find_tensor(read: Read, size: int) -> "TensorPlace | ResolvedTensor":
    """Return the place of the one tensor whose save has `size` bytes; raises `CheckpointError` when it is none."""
    archive = _opened(read, size)
    value = parse(archive.part(_PICKLE), _may_be_in_tensor)
    found = _Finder(lambda key: _part_of(archive, key), read, size).tensor(value)
    if isinstance(found, UnknownObject) and not isinstance(found, ResolvedTensor):
        raise CheckpointError(found.hint)
    if found is None:
        raise CheckpointError("it is no tensor as torch.save writes them")
    return found


class NotPlainError(CheckpointError):
    """A saved value that JSON cannot hold."""


def read_value(data: bytes) -> Any:
    """Return a saved value of numbers, texts, None, and lists and dicts of those, as JSON has them; tuples as lists.

    Raises `NotPlainError` for any other value, and `CheckpointError` when the bytes are damaged.
    """
    archive = _opened(lambda start, num_bytes: data[start : start + num_bytes], len(data))
    value = parse(archive.part(_PICKLE), _may_be_in_value)
    try:
        return _plain(value, [_MAX_VALUES])
    except RecursionError:
        raise NotPlainError("it is nested too deeply") from None


def ints(value: object) -> tuple[int, ...]:
    """Return a pickled `torch.Size`, tuple or list of whole numbers; raises `CheckpointError` for all else."""
    if isinstance(value, MadeObject) and value.of == _SIZE and isinstance(value.args, tuple) and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list) or not all(type(each) is int and 0 <= each < 1 << 63 for each in value):
        raise CheckpointError("its sizes or offsets are not whole numbers")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownObject:
    """An object of a class that is not known here: what the file says of it. Nothing of it was made."""

    kind: str
    """Module and name of the class, or of the function that would have made it."""
    args: object = ()
    """What it would have been called with."""
    state: object = None
    """What would have been set on it afterwards."""
    items: object = ()
    """What would have been put into it: a dict, or a list."""
    hint: str = ""
    """For a tensor that cannot be read: what it is, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTensor(UnknownObject):
    """A tensor whose bytes in the file stand for others: conjugated or negated. To some readers it is unknown."""

    place: TensorPlace
    """In `data`."""
    data: bytes
    """Its values."""


def read_file(opened: OpenFile) -> Any:
    """Return what a file holds: dicts, lists, tuples, plain values, each tensor as its `TensorPlace`.

    An object of any other class is a `UnknownObject`. Tensors that share memory have places that share bytes; the same
    view of the same storage is the same place. Raises `CheckpointError` for what `torch.save` did not write, and for
    what is damaged.
    """
    read, size = opened.read, opened.size
    first = read(0, min(size, 512))
    if first.startswith(SIGNATURE):
        archive = _opened(read, size)
        value = parse(archive.part(_PICKLE), _anything)
        places: Callable[[object], _Storage] = partial(_part_of, archive)
    elif first.startswith(b"\x80"):
        value, storages = _read_pickles(read, size)
        places = partial(_behind, storages)
    else:
        raise CheckpointError(_unlike_torch(first))
    return _Finder(places, read, size).inert(value)


def read_dict(opened: OpenFile, why: str) -> dict[Any, Any]:
    """As `read_file`; raises CheckpointError for a file that holds no dict. why: in words, why it should hold one."""
    value = read_file(opened)
    if not isinstance(value, dict):
        raise CheckpointError(f"it is no dict, {why}")
    return value


def number_of(data: bytes, dtype: str) -> Any:
    """The number that the bytes of one element are; None of a dtype that is no real number."""
    if not dtype.startswith(("float", "bfloat", "int", "uint", "bool")) or dtype not in ITEMSIZE_BYTES:
        return None
    return torch.frombuffer(bytearray(data), dtype=torch_dtype(dtype))[0].item()


def _unlike_torch(first: bytes) -> str:
    """What a file is that begins so, and what to do."""
    if first.startswith(b"version https://git-lfs"):
        return "it is a pointer of git LFS, and not the file itself; run `git lfs pull`"
    if first[257:262] == b"ustar":
        return "it is a tar archive, as torch.save wrote before torch 0.1.10; load it with torch, and save it again"
    return f"torch.save did not write it: it begins with the bytes {first[:8].hex(' ') or '(none)'}"


def _opened(read: Read, size: int) -> ZipParts:
    archive = ZipParts(read, size)
    if "constants.pkl" in archive:
        raise CheckpointError(
            "it is a program of TorchScript (torch.jit.save). Load it with torch.jit.load, and save its state_dict() "
            "with torch.save"
        )
    if _PICKLE not in archive:
        raise CheckpointError("it is a zip archive, but none of torch.save: it has no data.pkl")
    order = archive.part("byteorder") if "byteorder" in archive else b"little"
    if order != b"little":
        raise CheckpointError(f"its elements are {order.decode(errors='replace')}-endian, not little-endian")
    return archive


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    """That its class says; "uint8" for one of bytes."""
    start: int
    """First byte in the file."""
    num_bytes: int


def _part_of(archive: ZipParts, key: object) -> _Storage:
    """A storage that is a part of the archive."""
    match key:
        case ("storage", Named(name=kind), str(part), str(), int(num_elements)) if (
            kind in STORAGES and 0 <= num_elements <= MAX_INDEX
        ):
            dtype = STORAGES[kind]
            start, num_bytes = archive.place(f"data/{part}")
            if num_bytes != num_elements * itemsize_bytes(dtype):
                raise CheckpointError(
                    f"its storage {part} has {num_bytes:,} bytes, and is announced with {num_elements:,} elements of "
                    f"{dtype}"
                )
            return _Storage(dtype, start, num_bytes)
    raise CheckpointError("its tensor has a storage that is not known")


_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001


def _read_pickles(read: Read, size: int) -> tuple[Any, dict[str, _Storage]]:
    """The value of a file of pickles, and its storages by key."""
    data = b""
    while True:
        # The file says nowhere how long its pickles are; behind them are all the elements.
        data = read(0, min(size, max(_FIRST_BYTES, 2 * len(data))))
        try:
            return _parse_pickles(data, read, size)
        except CutShortError:
            if len(data) == size or len(data) >= _MAX_PICKLE_BYTES:
                raise


def _parse_pickles(data: bytes, read: Read, size: int) -> tuple[Any, dict[str, _Storage]]:
    magic, at = parse_first(data, _anything)
    if magic != _MAGIC:
        raise CheckpointError(
            "it is a pickle that torch.save did not write; load it with the program that made it, and save its tensors "
            "with torch.save"
        )
    version, at = parse_first(data, _anything, start=at)
    system, at = parse_first(data, _anything, start=at)
    if version != _VERSION or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError("it is of a version of torch.save that is not known, or not little-endian")
    value, at = parse_first(data, _anything, start=at)
    keys, at = parse_first(data, _anything, start=at)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise CheckpointError("it does not list its storages")
    kinds = _storages_in(value)
    storages = {}
    for key in keys:
        if key not in kinds:
            raise CheckpointError(f"it has a storage {key[:40]!r} that no tensor names")
        dtype, num_elements = kinds[key]
        num_bytes = num_elements * itemsize_bytes(dtype)
        count = int.from_bytes(read(at, 8) if at + 8 <= size else b"", "little")
        at += 8
        if count != num_elements or at + num_bytes > size:
            raise CheckpointError(
                f"its storage {key[:40]!r} of {num_elements:,} elements has {count:,} from byte {at:,} on, in a file "
                f"of {size:,} bytes; it is damaged or truncated"
            )
        storages[key] = _Storage(dtype, at, num_bytes)
        at += num_bytes
    return value, storages


def _storages_in(value: object) -> dict[str, tuple[str, int]]:
    """The dtype and the number of elements of each storage that a value names, by key."""
    found: dict[str, tuple[str, int]] = {}
    seen: set[int] = set()
    left: list[object] = [value]
    while left:
        each = left.pop()
        if isinstance(each, Persistent):
            match each.key:
                case ("storage", Named(name=kind), str(key), str(), int(count), *_) if (
                    kind in STORAGES and 0 <= count <= MAX_INDEX
                ):
                    if found.setdefault(key, (STORAGES[kind], count)) != (STORAGES[kind], count):
                        raise CheckpointError(f"it names its storage {key[:40]!r} as of two kinds")
        # Each once: a pickle may name one list very often, or a list in itself.
        if isinstance(each, list | tuple | dict | set | frozenset | MadeObject) and id(each) not in seen:
            seen.add(id(each))
            left += _inside(each)
    return found


def _inside(value: Any) -> list[object]:
    if isinstance(value, MadeObject):
        return [value.of, value.args, value.state, *(each for pair in value.pairs for each in pair), *value.elements]
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _behind(storages: Mapping[str, _Storage], key: object) -> _Storage:
    """A storage that follows the pickles."""
    match key:
        case ("storage", Named(), str(name), str(), int(), None) if name in storages:
            return storages[name]
        case ("storage", Named(), str(name), str(), int(), (str(), int(first), int(count))) if name in storages:
            whole = storages[name]
            itemsize = itemsize_bytes(whole.dtype)
            if first < 0 or count < 0 or (first + count) * itemsize > whole.num_bytes:
                raise CheckpointError(f"its view of the storage {name[:40]!r} is beyond it")
            return _Storage(whole.dtype, whole.start + first * itemsize, count * itemsize)
    raise CheckpointError("its tensor has a storage that is not known")


def _anything(module: str, name: str) -> bool:
    return True


class _Finder:
    """Makes inert values of what a pickle describes: places of tensors, records, plain values."""

    def __init__(self, storage: Callable[[object], _Storage], read: Read, size: int) -> None:
        self._storage = storage
        self._read = read
        self._left_bytes = min(size, _MAX_RESOLVED_BYTES)
        # By id, with the objects themselves, so that no id is given anew: what is named twice is one object.
        self._done: dict[int, tuple[object, object]] = {}
        self._open: set[int] = set()
        self._counts: dict[int, int] = {}
        self._most_values = _MAX_VALUES + size

    def inert(self, value: Any, depth: int = 0) -> Any:
        """The value; raises CheckpointError for one that is in itself, or too deep."""
        if isinstance(value, Named):
            return UnknownObject(kind=str(value))
        if isinstance(value, Persistent):
            return UnknownObject(kind="torch.storage", hint="it is a storage without a tensor")
        if type(value) is int and value.bit_length() > _MAX_BITS:
            return UnknownObject(kind="int", hint=f"it is a whole number of more than {_MAX_BITS:,} bits")
        if not isinstance(value, list | tuple | dict | set | frozenset | MadeObject):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._open or depth > _MAX_DEPTH:
            why = "it has a value that is in itself" if id(value) in self._open else "it is nested too deeply"
            raise CheckpointError(f"{why}; that is no checkpoint")
        self._open.add(id(value))
        result = self._made(value, depth + 1)
        self._open.remove(id(value))
        self._done[id(value)] = value, result
        return result

    def _made(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return self._dict(list(value.items()), depth)
        if isinstance(value, tuple):
            return tuple(self.inert(each, depth) for each in value)
        if not isinstance(value, MadeObject):
            return [self.inert(each, depth) for each in value]
        tensor = self.tensor(value)
        return tensor if tensor is not None else self._object(value, depth)

    def _dict(self, pairs: list[tuple[object, object]], depth: int) -> dict[Any, Any] | UnknownObject:
        made = {_key(key): self.inert(each, depth) for key, each in pairs}
        if len(made) < len(pairs) or None in made:
            # With objects as keys: nothing in a name could stand for them.
            items = [(self.inert(key, depth), self.inert(each, depth)) for key, each in pairs]
            return UnknownObject(kind="dict", items=items)
        if _GROUPS not in made:
            return made
        # Who reads an optimizer enters a list as often as it is named.
        if sum(map(self._count, made.values())) > self._most_values:
            raise CheckpointError("it has an optimizer with the same lists again and again; that is no checkpoint")
        # Optimizers of torch accept a setting as a number or as a tensor without dims. A save has numbers.
        return {**made, _GROUPS: self._with_numbers(made[_GROUPS])}

    def _count(self, value: Any) -> int:
        """The values in a value that was made here, each as often as it is named."""
        if not isinstance(value, dict | list | tuple):
            return 1
        if id(value) not in self._counts:
            self._counts[id(value)] = 1 + sum(map(self._count, value.values() if isinstance(value, dict) else value))
        return self._counts[id(value)]

    def _with_numbers(self, value: Any) -> Any:
        if isinstance(value, TensorPlace) and not value.shape:
            number = number_of(self._read(value.start, itemsize_bytes(value.dtype)), value.dtype)
            return value if number is None else number
        if isinstance(value, list | tuple):
            return type(value)(map(self._with_numbers, value))
        return {key: self._with_numbers(each) for key, each in value.items()} if isinstance(value, dict) else value

    def _object(self, value: MadeObject, depth: int) -> Any:
        args = value.args
        if value.of in _DICTS:
            # The state of an OrderedDict has the versions of modules (_metadata), and the factory of a defaultdict
            # makes what is not there.
            return self._dict(value.pairs, depth)
        if value.of == _SIZE:
            return ints(value)
        if value.of == _COUNTER and isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], dict):
            return self._dict(list(args[0].items()), depth)
        if value.of in _SETS and isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], list):
            return self.inert(args[0], depth)
        if value.of == _ENCODE and isinstance(args, tuple) and len(args) == 2 and isinstance(args[0], str):
            # Python 3 writes bytes so for readers of Python 2.
            return args[0].encode("latin1", errors="replace") if args[1] == "latin1" else args[0]
        return UnknownObject(
            kind=str(value.of) if isinstance(value.of, Named) else "an object that makes objects",
            args=self.inert(args, depth),
            state=self.inert(value.state, depth),
            items=self._dict(value.pairs, depth) if value.pairs else self.inert(value.elements, depth),
        )

    def tensor(self, value: Any) -> TensorPlace | UnknownObject | None:
        """The place of a tensor; None for all else, and a record for a tensor that cannot be read."""
        of, args = getattr(value, "of", None), getattr(value, "args", None)
        if of == _SUBCLASS and isinstance(args, tuple) and len(args) == 4:
            of, kind, args, _ = args
            if kind not in _TENSOR_CLASSES:
                return _unread(of, f"a {kind}, which is no plain tensor; save its plain tensor")
        if of in _PARAMETERS and isinstance(args, tuple) and args:
            return self.tensor(args[0])
        match args:
            # Version 2 says the dtype by the class of the storage;
            # version 3 has an untyped storage and the dtype by itself.
            case (Persistent(key=key), offset, shape, strides, *rest) if of in (_PLAIN_TENSOR, _TYPED):
                return self._placed(of, self._storage(key), None, (offset, shape, strides), rest[2:])
            case (Persistent(key=key), offset, shape, strides, _, _, Named(name=name), *rest) if (
                of == _UNTYPED and name in ITEMSIZE_BYTES
            ):
                return self._placed(of, self._storage(key), name, (offset, shape, strides), rest)
        if isinstance(of, Named) and (of.module, of.name.startswith("_rebuild_")) == ("torch._utils", True):
            return _unread(of, _UNREAD.get(of.name, "a tensor of a kind that is not known here"))
        return None

    def _placed(
        self, of: object, storage: _Storage, dtype: str | None, view: tuple[Any, Any, Any], flags: list[Any]
    ) -> TensorPlace | UnknownObject:
        """The place in the file of a tensor, once it is known to be within its storage."""
        (offset,), shape, strides = ints((view[0],)), ints(view[1]), ints(view[2])
        dtype = storage.dtype if dtype is None else dtype
        itemsize = itemsize_bytes(dtype)
        # The last element that the strides reach. A pickle may say any
        # strides, and a read past the storage would be other tensors.
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=False)) + 1
        needed = 0 if 0 in shape else (offset + reach) * itemsize
        if len(shape) != len(strides) or needed > storage.num_bytes or not can_exist(shape, itemsize):
            raise CheckpointError(
                f"its tensor of shape {_short(shape)}, strides {_short(strides)} and offset {offset} does not fit its "
                f"storage of {storage.num_bytes:,} bytes"
            )
        place = TensorPlace(dtype=dtype, shape=shape, strides=strides, start=storage.start + offset * itemsize)
        # The last argument, where there is one, has flags (conj, neg): the bytes then stand for other values.
        return self._resolved(of, place, flags[0], reach * itemsize) if any(flags) else place

    def _resolved(self, of: object, place: TensorPlace, flags: Any, num_bytes: int) -> UnknownObject:
        """The values of a tensor that is conjugated or negated."""
        num_values_bytes = math.prod(place.shape) * itemsize_bytes(place.dtype)
        self._left_bytes -= max(num_values_bytes, num_bytes)
        if self._left_bytes < 0 or not (isinstance(flags, dict) and flags.keys() <= {"conj", "neg"}):
            return _unread(of, "a tensor that is conjugated or negated: save it resolved (resolve_conj, resolve_neg)")
        data = bytearray(self._read(place.start, num_bytes) if num_values_bytes else itemsize_bytes(place.dtype))
        held = torch.frombuffer(data, dtype=torch_dtype(place.dtype)).as_strided(place.shape, place.strides)
        held = held.conj() if flags.get("conj") else held
        held = (-held if flags.get("neg") else held).resolve_conj().contiguous()
        return ResolvedTensor(
            kind=str(of),
            hint="it is a tensor that is conjugated or negated; save it resolved (resolve_conj, resolve_neg)",
            place=replace(place, strides=row_major_strides(place.shape), start=0),
            data=bytes(bytes_of(held.view(-1).view(torch.uint8))),
        )


def _key(key: object) -> str | int | float | bool | None:
    """A key of a dict; None for one that is no text and no number."""
    if isinstance(key, Named):
        return str(key)
    if isinstance(key, tuple) and all(isinstance(each, str | int | float) for each in key):
        return ".".join(map(str, key))
    return key if isinstance(key, str | int | float | bool) else None


def _short(sizes: tuple[int, ...]) -> str:
    return str(sizes) if len(sizes) <= 8 else f"of {len(sizes)} dims"


_UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "_rebuild_sparse_tensor": "a sparse tensor; save it with to_dense()",
        "_rebuild_sparse_csr_tensor": "a sparse tensor; save it with to_dense()",
        "_rebuild_nested_tensor": "a nested tensor; save its tensors one by one",
        "_rebuild_qtensor": "a quantised tensor; save it with dequantize()",
        "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no values",
        "_rebuild_wrapper_subclass": "a tensor of a special class; save its plain tensor",
    }
)


def _unread(of: object, what: str) -> UnknownObject:
    return UnknownObject(kind=str(of), hint=f"it is {what}")


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
    raise NotPlainError(f"it holds a {type(value).__name__}, or a value that JSON cannot hold")
