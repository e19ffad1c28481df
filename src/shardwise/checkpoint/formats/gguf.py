"""GGUF files, the models of llama.cpp: one file with names, sizes and values in front, and the elements behind them.

    GGUF | version | number of tensors | number of values
    | key, kind, value | ... | name, sizes (innermost first), kind, offset | ... | zeros | elements | ...
                                                                                        ^ aligned, where offset 0 is

Tensors of plain numbers are read. Quantised ones hold blocks of small numbers with a scale each; a file with any is
refused, with their names. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

Not by the package `gguf`, which reads files of this machine alone.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.contents import Contents, can_exist, printable
from shardwise.checkpoint.formats.format import Format
from shardwise.checkpoint.formats.model_shards import parts_of_set
from shardwise.checkpoint.formats.strided import TensorPlace, stored_tensor
from shardwise.checkpoint.stores import OneFile, OpenFile, Store, about
from shardwise.errors import CheckpointError, few_of
from shardwise.plan.dtypes import itemsize_bytes
from shardwise.space.boxes import row_major_strides

_DTYPES: Mapping[int, str] = MappingProxyType(
    dict(zip((0, 1, 30, 28), ("float32", "float16", "bfloat16", "float64"), strict=True))
    | dict(enumerate(("int8", "int16", "int32", "int64"), 24))
)
_QUANTISED: Mapping[int, str] = MappingProxyType(
    dict(
        zip(
            (2, 3, *range(6, 24), 29, 34, 35, 39),
            (
                *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"),
                *("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M"),
                *("TQ1_0", "TQ2_0", "MXFP4"),
            ),
            strict=True,
        )
    )
)
_NUMBERS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_VALUES = 1 << 20
_MAX_KEPT = 64
"""Elements of an array of values that are kept: those of a tokenizer are many, and no part of the weights."""
_FIRST_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 28


class _CutOffError(Exception):
    """The bytes that were read end before the head does."""


def read_contents(store: Store) -> Contents:
    """Return what a file holds, with the other parts of a split one; its values are in `extra["metadata"]`.

    Raises `CheckpointError` for a damaged file, for one with quantised tensors, and where a part is missing.
    """
    assert isinstance(store, OneFile), "no folder is recognised"
    first = _read_file(store, store.name)
    count = first.extra["metadata"].get("split.count", 1)
    names = parts_of_set(store.name, count) if type(count) is int and count > 1 else [store.name]
    here = {store.name, *store.beside()}
    if len(names) < count or not here.issuperset(names):
        lacking = [name for name in names if name not in here] if store.name in names else ["their names say no number"]
        raise CheckpointError(
            f"{first.location} is one of the {count} parts of a model: {few_of(lacking, quotes=False)} missing. Put "
            "all parts into one folder, under the names that llama-gguf-split gave them. Or join them: "
            "llama-gguf-split --merge FIRST OUT"
        )
    parts = [first if name == store.name else _read_file(store, name) for name in names]
    # The first part has the values of the model, the others little besides their numbers.
    whole = reduce(lambda one, other: one.joined(other, where="in two parts"), parts)
    return replace(whole, location=first.location)


def _read_file(store: OneFile, name: str) -> Contents:
    with OpenFile(store, name) as file, about(file.place):
        data = b""
        while True:
            # The file does not say how long its head is.
            data = file.read(0, min(file.size, max(_FIRST_BYTES, 2 * len(data))))
            try:
                values, places = _GgufHead(data, file.size).read()
                break
            except _CutOffError:
                if len(data) == file.size or len(data) >= _MAX_HEAD_BYTES:
                    raise CheckpointError(f"its head is longer than {len(data):,} bytes: it is truncated") from None
        tensors = {each: stored_tensor(each, name, place) for each, place in places.items()}
        return Contents(
            format="gguf",
            location=file.place,
            tensors=tensors,
            file_sizes={name: file.size},
            extra={"metadata": values},
        )


class _GgufHead:
    def __init__(self, data: bytes, size: int) -> None:
        self._data = data
        self._size = size
        self._at = 0
        self._left = _MAX_VALUES

    def read(self) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
        """The values and the places of the tensors; raises `_CutOffError` and `CheckpointError`."""
        magic, version = self._take("4s"), self._take("I")
        if magic == b"GGUF" and version in (2 << 24, 3 << 24):
            raise CheckpointError(
                "it is a big-endian GGUF file, and little-endian ones are read. Convert it with "
                "gguf_convert_endian.py of llama.cpp (gguf-convert-endian FILE little), or take the little-endian file"
            )
        if magic != b"GGUF" or version not in (2, 3):
            raise CheckpointError(f"it is no GGUF file of version 2 or 3: it begins with {magic.hex(' ')}, {version}")
        num_tensors, num_values = self._take("Q"), self._take("Q")
        if num_tensors > _MAX_VALUES or num_values > _MAX_VALUES:
            raise CheckpointError(f"it announces {num_tensors:,} tensors and {num_values:,} values, which is too many")
        values = {self._text(): self._value(self._take("I")) for _ in range(num_values)}
        entries = {}
        for _ in range(num_tensors):
            name = self._text()
            num_dims = self._take("I")
            if num_dims > _MAX_DIMS or name in entries:
                raise CheckpointError(f"its tensor {printable(name)[:80]} has {num_dims} dims, or is there twice")
            sizes = tuple(self._take("Q") for _ in range(num_dims))
            entries[name] = sizes[::-1], self._take("I"), self._take("Q")
        _refuse_quantised({name: kind for name, (_, kind, _) in entries.items()})
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise CheckpointError(f"its alignment is {alignment!r:.40}")
        first = -(-self._at // alignment) * alignment
        places = {name: self._place(name, first, *entry) for name, entry in entries.items()}
        # Readers make room for what a head announces: tensors may not share bytes.
        following = first
        for place in sorted(places.values(), key=lambda each: each.start):
            if place.start < following:
                raise CheckpointError("its tensors overlap each other")
            following = place.start + place.num_bytes
        return values, places

    def _place(self, name: str, first: int, shape: tuple[int, ...], kind: int, offset: int) -> TensorPlace:
        dtype = _DTYPES[kind]
        itemsize = itemsize_bytes(dtype)
        num_bytes = math.prod(shape) * itemsize
        if not can_exist(shape, itemsize) or first + offset + num_bytes > self._size:
            raise CheckpointError(
                f"its tensor {printable(name)[:80]} of {num_bytes:,} bytes ends after the file, which has "
                f"{self._size:,}: it is truncated"
            )
        return TensorPlace(dtype=dtype, shape=shape, strides=row_major_strides(shape), start=first + offset)

    def _take(self, form: str) -> Any:
        size = struct.calcsize(f"<{form}")
        if self._at + size > len(self._data):
            raise _CutOffError
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += size
        return value

    def _text(self) -> str:
        num_bytes = self._take("Q")
        if num_bytes > self._size:
            raise CheckpointError(f"it has a text of {num_bytes:,} bytes, and is shorter")
        return str(self._take(f"{num_bytes}s").decode(errors="replace"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            if kind not in _NUMBERS:
                raise CheckpointError(f"it has a value of the unknown kind {kind}")
            return self._take(_NUMBERS[kind])
        inner, count = self._take("I"), self._take("Q")
        self._left -= count
        if self._left < 0 or depth > 3:
            raise CheckpointError("it has more values than any model")
        found = [self._value(inner, depth + 1) for _ in range(count)]
        return found if count <= _MAX_KEPT else {"count": count}


def _refuse_quantised(kinds: Mapping[str, int]) -> None:
    """Raise CheckpointError where tensors are no plain numbers."""
    names = [printable(name) for name, kind in kinds.items() if kind not in _DTYPES]
    if not names:
        return
    forms = dict.fromkeys(_QUANTISED.get(kind, f"kind {kind}") for kind in kinds.values() if kind not in _DTYPES)
    raise CheckpointError(
        f"{len(names)} of its {len(kinds)} tensors are quantised ({', '.join(forms)}): "
        f"{few_of(names, quotes=False)}. Such numbers are not read. Take the safetensors of the same model, or let "
        "llama-quantize of llama.cpp write it again as F32"
    )


FORMAT = Format(
    name="gguf",
    recognises=lambda names: False,
    recognises_file=lambda name: name.endswith(".gguf"),
    read=read_contents,
)
