"""Safetensors files: their header, both ways, and the data files of our saves, which are such files.

    byte 0        n, the length of the header: 8 bytes, little-endian
    byte 8        the header: {"w": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]}, "b": ...}, and spaces
    byte 8 + n    the 96 bytes of w, then those of b, and so on up to the end of the file

The elements of a tensor are row-major and little-endian; tensors follow each other without holes up to the end.
The format: https://github.com/huggingface/safetensors#format. Not by the package `safetensors`: it tells no places of
elements, and reads files of this machine alone.

A data file is laid out before a byte is written (`lay_out`), so that its size is known to the store and its header to
rank 0. `row_major_bytes` gives the elements of a piece as bytes, and `FileFilling` takes them in order, with checksums.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from shardwise.checkpoint.blocks import BlockSums
from shardwise.checkpoint.contents import MAX_INDEX, StoredPiece, can_exist
from shardwise.checkpoint.stores import Writer
from shardwise.errors import CheckpointError
from shardwise.moving.copies import part_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space import Piece, moves

ALIGNMENT_BYTES = 64
"""The data starts at a multiple of this: as far as any reader that maps files into memory asks for."""

MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

_LENGTH_BYTES = 8
_METADATA = "__metadata__"

_CODES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "uint16": "U16",
        "uint32": "U32",
        "uint64": "U64",
        "int8": "I8",
        "int16": "I16",
        "int32": "I32",
        "int64": "I64",
        "float4_e2m1fn_x2": "F4",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
    }
)
_DTYPES: Mapping[str, str] = MappingProxyType({code: dtype for dtype, code in _CODES.items()})

Read = Callable[[int, int], bytes]
"""Reads (first byte, number of bytes) of a file; gives fewer bytes, or raises EOFError, where the file ends before."""


class TensorEntry(NamedTuple):
    """A tensor of a file."""

    code: str
    """The dtype, as safetensors calls it."""
    shape: tuple[int, ...]
    """Counted in elements of `dtype_of(code)`: a pair of float4 is one element, as in torch."""
    start: int
    """First byte in the file."""
    stop: int
    """The byte after the last."""


def stored_as(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the dtype code and the shape under which safetensors keeps a tensor.

    What it has no code for is kept as bytes: U8, the last dim longer by the itemsize.

    >>> stored_as("complex128", (2, 3))
    ('U8', (2, 48))
    """
    code = _CODES.get(dtype, "U8")
    if code == "F4":  # counts single numbers, where torch counts pairs
        return (code, (*shape[:-1], shape[-1] * 2)) if shape else ("U8", (1,))
    if dtype in _CODES:
        return code, tuple(shape)
    size = itemsize_bytes(dtype)
    return code, (*shape[:-1], shape[-1] * size) if shape else (size,)


def dtype_of(code: str) -> str:
    """Return torch's name of the dtype with a safetensors code. Raises KeyError for a code that torch has no dtype for.

    >>> dtype_of("BF16")
    'bfloat16'
    """
    return _DTYPES[code]


def unique_keys(names: Sequence[str]) -> list[str]:
    """Return one key per name: the name itself, with a number behind it where that is taken, and valid Unicode.

    >>> unique_keys(["w", "b", "w"])
    ['w', 'b', 'w (2)']
    """
    taken = {_METADATA}
    seen: dict[str, int] = {}
    keys = []
    for name in names:
        # A lone surrogate, which Python strings can hold, has no UTF-8.
        key = valid = name.encode("utf-8", "backslashreplace").decode()
        while key in taken:
            seen[valid] = seen.get(valid, 1) + 1
            key = f"{valid} ({seen[valid]})"
        taken.add(key)
        keys.append(key)
    return keys


def header(entries: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return the bytes before the data of a file with these (key, dtype, shape), and the first byte of each entry.

    The data of the entries follow each other in the given order without holes. Keys are unique, see `unique_keys`.
    Raises `CheckpointError` when the header would be longer than safetensors reads: about a million entries.
    """
    fields: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    starts = []
    offset = 0
    for key, dtype, shape in entries:
        code, stored_shape = stored_as(dtype, shape)
        assert key not in fields, key
        starts.append(offset)
        num_bytes = math.prod(shape, start=itemsize_bytes(dtype))
        fields[key] = {"dtype": code, "shape": stored_shape, "data_offsets": (offset, offset + num_bytes)}
        offset += num_bytes
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    # Spaces behind JSON mean nothing to its readers.
    text += b" " * (-(len(text) + _LENGTH_BYTES) % ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{len(entries):,} pieces in one file need a header of {len(text):,} bytes, but safetensors reads at most "
            f"{MAX_HEADER_BYTES:,}. Save several checkpoints, or save from more ranks"
        )
    data = _LENGTH_BYTES + len(text)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, [data + start for start in starts]


def read_header(read: Read, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return the tensors of a file of `size` bytes, in the order of their bytes, and its metadata.

    Raises `CheckpointError`, with all findings, for everything that safetensors would not read either.
    """
    length = int.from_bytes(_exactly(read, 0, _LENGTH_BYTES, size), "little")
    # Before the header is read: any eight bytes are a length, of up to 2**64.
    if length > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"its first 8 bytes announce a header of {length:,} bytes. The file has {size:,} in all, and a header has "
            f"at most {MAX_HEADER_BYTES:,}: the file is truncated, or not safetensors"
        )
    fields = _parsed(_exactly(read, _LENGTH_BYTES, length, size))
    metadata = fields.pop(_METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{_METADATA} in its header is no object of texts")
    problems: list[str] = []
    entries = []
    for key, field in fields.items():
        entry = _entry(field)
        if isinstance(entry, str):
            problems.append(f"tensor {key}: {entry}")
        else:
            entries.append((key, entry))
    if problems:
        raise CheckpointError(*problems)
    return _laid_out(entries, _LENGTH_BYTES + length, size), metadata


def _exactly(read: Read, start: int, num_bytes: int, size: int) -> bytes:
    data = b""
    if start + num_bytes <= size:
        try:
            data = read(start, num_bytes)
        # Shorter than when it was opened: the same finding as one that was short from the start.
        except EOFError:
            data = b""
    if len(data) != num_bytes:
        raise CheckpointError(f"it ends before byte {start + num_bytes:,}, within its header: it is truncated")
    return data


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        # Of a key that is there twice Python takes the last; a reader that takes the first would see another tensor.
        fields = json.loads(text.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is not JSON as safetensors writes it: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError("its header is not a JSON object")
    return fields


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the key {name} is there twice")
        fields[name] = value
    return fields


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _entry(field: Any) -> TensorEntry | str:
    """A tensor, its bytes counted from the start of the data, or what is wrong with it."""
    if not isinstance(field, dict) or not {"dtype", "shape", "data_offsets"} <= field.keys():
        return "it has no dtype, shape and data_offsets"
    code, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        return f"dtype {_shown(code)} is none that torch has"
    if not (_is_indices(shape) and _is_indices(offsets) and len(offsets) == 2):
        return "its shape or its data_offsets are no lists of whole numbers"
    start, stop = offsets
    # Twice the bytes on both sides: an element of F4 takes half a byte.
    needed = _num_elements(shape, limit=MAX_INDEX) * (1 if code == "F4" else 2 * itemsize_bytes(_DTYPES[code]))
    if start > stop or needed != 2 * (stop - start):
        return f"shape {_shown(shape)} of {code} does not take the bytes {start:,} to {stop:,}"
    if not can_exist(shape, 1):
        return f"its shape of {len(shape)} dims is one that no tensor has"
    if code == "F4":
        if not shape or shape[-1] % 2:
            return f"shape {_shown(shape)} of F4 does not end with an even number, as torch needs it for its pairs"
        shape[-1] //= 2
    return TensorEntry(code, tuple(shape), start, stop)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]} ..."


def _is_indices(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= MAX_INDEX for each in value)


def _num_elements(shape: Sequence[int], limit: int) -> int:
    """The product, or a number above the limit once it is passed: a hostile shape costs no time."""
    if 0 in shape:
        return 0
    product = 1
    for size in shape:
        product *= size
        if product > limit:
            break
    return product


def _laid_out(entries: list[tuple[str, TensorEntry]], data: int, size: int) -> dict[str, TensorEntry]:
    """The entries in the order of their bytes, counted from the start of the file, once these fill it exactly."""
    entries.sort(key=lambda each: each[1][2:])
    problems = []
    # Holes and overlaps are refused, as by safetensors: bytes that no tensor has could carry anything.
    end, before = 0, "the header"
    laid = {}
    for key, entry in entries:
        if entry.start != end:
            how = "overlaps" if entry.start < end else "leaves a hole after"
            problems.append(f"tensor {key}: it starts at byte {entry.start:,} of the data and so {how} {before}")
        end, before = max(end, entry.stop), key
        laid[key] = entry._replace(start=data + entry.start, stop=data + entry.stop)
    if data + end != size:
        state = "truncated" if data + end > size else "grown"
        problems.append(f"it has {size:,} bytes, but its header describes {data + end:,}: it is {state}")
    if problems:
        raise CheckpointError(*problems)
    return laid


_READER_METADATA: Mapping[str, str] = MappingProxyType({"format": "pt"})
"""What readers of safetensors files look for."""

_CHUNK_BYTES = 1 << 20
"""So much is hashed and written at a time: it stays in the cache between the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """What a data file will be."""

    pieces: tuple[Piece, ...]
    """In the order of their bytes."""
    header: bytes
    starts: tuple[int, ...]
    """First byte of each piece in the file."""
    sizes: tuple[int, ...]
    """Bytes of each piece."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(self.sizes)

    def stored(self, name: str, checksums: Sequence[bytes]) -> list[StoredPiece]:
        """The pieces with their places in the file, which is called `name`."""
        return [
            StoredPiece(piece=piece, file=name, start=start, checksums=sums)
            for piece, start, sums in zip(self.pieces, self.starts, checksums, strict=True)
        ]


def lay_out(
    pieces: Sequence[Piece], *, metadata: Mapping[str, str] = _READER_METADATA, empty: bool = False
) -> DataFile:
    """The safetensors file with these pieces: wide elements first, so that all are aligned, else in the order given.

    `metadata` goes into its header. Pieces without elements are left out, unless `empty` says that they stay.
    """
    # The manifest lists tensors without elements by themselves; a file needs no entry for them.
    held = [piece for piece in pieces if piece.num_elements or empty]
    # Each size is a multiple of its itemsize, so what follows wide elements is aligned for narrower ones. The sort is
    # stable: pieces of one width keep the order in which they were given.
    held.sort(key=lambda each: -itemsize_bytes(each.dtype))
    # The keys are for other readers; ours goes by the byte ranges of the manifest.
    keys = unique_keys([each.name if each.whole else str(each) for each in held])
    shapes = [each.shape if each.run is None else (each.num_elements,) for each in held]
    entries = [(key, each.dtype, shape) for key, each, shape in zip(keys, held, shapes, strict=True)]
    head, starts = header(entries, metadata)
    return DataFile(
        pieces=tuple(held),
        header=head,
        starts=tuple(starts),
        sizes=tuple(each.num_elements * itemsize_bytes(each.dtype) for each in held),
    )


class Sink(Protocol):
    """What takes the bytes of a file's pieces, from front to back."""

    def write(self, data: memoryview) -> None:
        """Append the next bytes; `data` may change as soon as this returns."""


class JoinedWrites:
    """Hands bytes to a writer, small ones together: a write costs a call, or a request."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._small = bytearray()

    def write(self, chunk: memoryview) -> None:
        """Append bytes; they may change as soon as this returns."""
        if len(self._small) + len(chunk) < _CHUNK_BYTES:
            self._small += chunk
        else:
            self.flush()
            self._writer.write(chunk)

    def flush(self) -> None:
        """Hand everything to the writer."""
        if self._small:
            # A copy, for a writer may still hold its view, and a bytearray with a view cannot be cleared.
            self._writer.write(memoryview(bytes(self._small)))
            self._small.clear()


class FileFilling:
    """Fills a data file with the bytes of its pieces, in order, in chunks of any size; takes their checksums."""

    def __init__(self, file: DataFile, writer: Writer, *, block_bytes: int) -> None:
        self.checksums: list[bytes] = []
        """Of the pieces that are complete."""
        self._writes = JoinedWrites(writer)
        self._sums = BlockSums(block_bytes)
        self._sizes = iter(file.sizes)
        self._left = next(self._sizes, 0)  # bytes of the piece at hand that are still to come
        self._writes.write(memoryview(file.header))

    def write(self, data: memoryview) -> None:
        """Append the next bytes."""
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._hash(chunk)
            self._writes.write(chunk)

    def flush(self) -> None:
        """Hand everything to the writer."""
        self._writes.flush()

    def _hash(self, chunk: memoryview) -> None:
        start = 0
        while start < len(chunk):
            # Checksums begin anew with every piece, so a reader of one piece needs no byte of its neighbours.
            part = chunk[start : start + self._left]
            self._sums.add(part)
            self._left -= len(part)
            start += len(part)
            if not self._left:
                self.checksums.append(self._sums.finish())
                self._left = next(self._sizes, 0)


_BOUNCE_BYTES = 16 << 20
"""So much of a tensor that is not plain memory is copied at a time."""

_CPU = torch.device("cpu")


def cast_through(elements: torch.Tensor, dtypes: Iterable[torch.dtype]) -> torch.Tensor:
    """The elements in one dtype after the other."""
    # All of them: by way of a narrower dtype values are rounded, also where the first and the last are alike.
    for dtype in dtypes:
        elements = elements.to(dtype)
    return elements


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements are in CPU memory row-major, one after the other, as the bytes that they stand for."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def plain_bytes(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The memory of the elements `start` up to `stop` of a plain tensor, as flat bytes."""
    # Not view(-1): dims of size 1 may have any stride, and a single element would keep it.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat[start:stop].view(torch.uint8)


def row_major_bytes(
    piece: Piece, held: Piece, tensor: torch.Tensor, dtypes: Sequence[torch.dtype] = (), *, room: torch.device = _CPU
) -> Iterator[torch.Tensor]:
    """The elements of `piece`, a part of `held`, as flat bytes on a device: views where its memory has them so.

    dtypes: what they are cast to, one after the other. room: the CPU, or the device of the tensor.
    The last chunk may be overwritten as soon as the next is asked for; that of a device, when the one after that is.
    """
    # Conjugation and sign may be flags on the tensor, whose memory then has other values than it stands for.
    plain = tensor.resolve_conj().resolve_neg()
    # Both count in the same box, whose elements the memory has in row-major order: a part of them is a slice.
    start, stop = piece.elements.start - held.elements.start, piece.elements.stop - held.elements.start
    if plain.device == room and plain.is_contiguous() and not dtypes:
        yield plain_bytes(plain, start, stop)
        return
    dtype = dtypes[-1] if dtypes else plain.dtype
    step = _BOUNCE_BYTES // max(dtype.itemsize, plain.element_size())
    # A fixed amount, whatever the tensor: on another device, or strided, it is copied a part at a time. Of a device one
    # part comes while another is written.
    num_bounces = 2 if plain.device != room and stop - start > step else 1
    bounces = [torch.empty(min(step, stop - start), dtype=dtype, device=room) for _ in range(num_bounces)]
    first, last = piece.elements
    for turn, begin in enumerate(range(first, last, step)):
        part = held.within(begin, min(begin + step, last))
        chunk = bounces[turn % num_bounces][: part.num_elements]
        # A run of elements of a strided box is up to several boxes in memory.
        for move in moves(held, part):
            taken = part_of(plain, move.source, move.shape)
            part_of(chunk, move.target, move.shape).copy_(cast_through(taken, dtypes[:-1]))
        yield chunk.view(torch.uint8)
