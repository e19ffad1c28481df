"""Headers of safetensors files, against the safetensors library in both directions."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.safetensors_files import (
    TensorEntry,
    header,
    read_header,
    stored_as,
    unique_keys,
)
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import ITEMSIZE_BYTES, itemsize_bytes
from tests.properties import tried
from tests.refusals import Refusals

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (2, 4), (3, 0, 2), (2, 3, 4)]


NATIVE = sorted(dtype for dtype in ITEMSIZE_BYTES if stored_as(dtype, (1,))[0] != "U8" or dtype == "uint8")


tensors = st.lists(st.tuples(st.text(max_size=4), st.sampled_from(sorted(ITEMSIZE_BYTES)), st.sampled_from(SHAPES)))


def random_bytes(dtype: str, num_bytes: int) -> bytes:
    # A bool of another byte than 0 and 1 is none, and not kept by a copy.
    return bytes(torch.randint(0, 2 if dtype == "bool" else 256, (num_bytes,), dtype=torch.uint8).tolist())


def num_bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * itemsize_bytes(dtype)


def file_of(entries: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    head, starts = header(entries, metadata)
    return head + b"".join(random_bytes(dtype, num_bytes_of(dtype, shape)) for _, dtype, shape in entries), starts


def library_entries(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    return list(safetensors.deserialize(data))  # type: ignore[no-untyped-call]


def reading(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, num_bytes: data[start : start + num_bytes]


def parsed(data: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    return read_header(reading(data), len(data))


def raw(fields: Any, data: bytes = b"") -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data


def as_bytes(tensor: torch.Tensor) -> bytes:
    # Through a storage, since a scalar has no view of another itemsize.
    return bytes(torch.tensor([], dtype=torch.uint8).set_(tensor.clone().untyped_storage()).tolist())


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE_BYTES))
def test_the_library_reads_what_we_write(dtype: str, tmp_path: Path) -> None:
    entries = [(f"t{shape}", dtype, shape) for shape in SHAPES]
    data, starts = file_of(entries, {"who": "us"})
    (tmp_path / "file").write_bytes(data)
    with safetensors.safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"who": "us"}
        assert sorted(file.keys()) == sorted(key for key, _, _ in entries)
        for (key, _, shape), start in zip(entries, starts, strict=True):
            got = file.get_tensor(key)
            assert as_bytes(got) == data[start : start + num_bytes_of(dtype, shape)]
            if dtype in NATIVE and (shape or dtype != "float4_e2m1fn_x2"):
                assert (got.dtype, tuple(got.shape)) == (getattr(torch, dtype), shape)
            else:
                assert (got.dtype, tuple(got.shape)) == (torch.uint8, stored_as(dtype, shape)[1])


def test_we_read_the_librarys_pairs_of_float4_as_torch_counts_them() -> None:
    state = {"pairs": torch.zeros(2, 6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    entries, _ = parsed(safetensors.torch.save(state))
    assert entries["pairs"][:2] == ("F4", (2, 6))


@tried(40)
@given(tensors, st.dictionaries(st.text(max_size=3), st.text(max_size=3)))
def test_what_is_written_is_read_back(drawn: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> None:
    keys = unique_keys([name for name, _, _ in drawn])
    entries = [(key, dtype, shape) for key, (_, dtype, shape) in zip(keys, drawn, strict=True)]
    data, starts = file_of(entries, metadata)
    found, found_metadata = parsed(data)
    assert found_metadata == metadata
    assert (len(data) - sum(num_bytes_of(dtype, shape) for _, dtype, shape in entries)) % 64 == 0
    for (key, dtype, shape), start in zip(entries, starts, strict=True):
        code, stored = stored_as(dtype, shape)
        stored = (*stored[:-1], stored[-1] // 2) if code == "F4" else stored
        assert found[key] == (code, stored, start, start + num_bytes_of(dtype, shape))
    assert sorted(key for key, _ in library_entries(data)) == sorted(keys)


@tried(40)
@given(st.lists(st.sampled_from(["w", "w (2)", "w (2) (2)", "", "__metadata__", "\ud800", "\\ud800"])))
def test_keys_are_unique_and_the_first_of_a_name_keeps_it(names: list[str]) -> None:
    keys = unique_keys(names)
    assert len(keys) == len(names)
    assert len({"__metadata__", *keys}) == len(names) + 1
    assert "".join(keys).encode().decode() == "".join(keys)
    if names and names[0] not in ("__metadata__", "\ud800"):
        assert keys[0] == names[0]


GOOD = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "shorter than a length": b"\x01\0\0",
    "header longer than the file": raw({"a": GOOD})[:20],
    "absurd length": b"\xff" * 8 + b"{}",
    "not JSON": raw(b"nothing"),
    "not UTF-8": raw(b"\xff\xfe"),
    "not an object": raw([1, 2]),
    "nested without end": raw(b"[" * 100_000),
    "a number without end": raw(b'{"a": ' + b"1" * 10_000 + b"}"),
    "NaN": raw(b'{"a": NaN}'),
    "duplicate keys": raw(b'{"a":%b,"a":%b}' % ((json.dumps(GOOD).encode(),) * 2), b"xy"),
    "metadata that is no text": raw({"__metadata__": {"a": 1}}),
    "metadata that is a list": raw({"__metadata__": [1]}),
    "a tensor that is a number": raw({"a": 1}),
    "no offsets": raw({"a": {"dtype": "U8", "shape": [2]}}),
    "unknown dtype": raw({"a": GOOD | {"dtype": "F6_E2M3"}}, b"xy"),
    "dtype that is a list": raw({"a": GOOD | {"dtype": ["U8"]}}, b"xy"),
    "negative size": raw({"a": GOOD | {"shape": [-2]}}, b"xy"),
    "fractional size": raw({"a": GOOD | {"shape": [2.0]}}, b"xy"),
    "boolean size": raw({"a": GOOD | {"shape": [True, 2]}}, b"xy"),
    "three offsets": raw({"a": GOOD | {"data_offsets": [0, 1, 2]}}, b"xy"),
    "offsets reversed": raw({"a": GOOD | {"data_offsets": [2, 0]}}, b"xy"),
    "too few bytes": raw({"a": GOOD | {"shape": [3]}}, b"xy"),
    "a huge shape": raw({"a": GOOD | {"shape": [2**62] * 100_000}}, b"xy"),
    "an index that no machine has": raw({"a": GOOD | {"shape": [0, 2**64]}}, b"xy"),
    "an odd number of float4": raw({"a": {"dtype": "F4", "shape": [2, 1], "data_offsets": [0, 1]}}, b"x"),
    "half a byte": raw({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"x"),
    "overlap": raw({"a": GOOD, "b": GOOD | {"data_offsets": [1, 3]}}, b"xyz"),
    "hole": raw({"a": GOOD, "b": GOOD | {"data_offsets": [3, 5]}}, b"xyzab"),
    "data truncated": raw({"a": GOOD}, b"x"),
    "data grown": raw({"a": GOOD}, b"xyz"),
    "several tensors": raw({"a": 1, "b": GOOD, "c": GOOD | {"dtype": "X"}}, b"xy"),
}


def parsing(data: bytes) -> Any:
    return lambda: parsed(data)


def ends_early(data: bytes, *, short: bool) -> Any:
    def read(start: int, num_bytes: int) -> bytes:
        if not short:
            raise EOFError
        return data[start : start + num_bytes - 1]

    return lambda: read_header(read, len(data))


def of_an_absurd_length() -> None:
    asked = []

    def read(start: int, num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return b"\xff\xff\xff\xff\xff\0\0\0"

    try:
        read_header(read, 1 << 50)
    finally:
        assert asked == [8]  # nothing more is read


WHOLE = file_of([("a", "float32", (4,))], {})[0]
REFUSED = Refusals(
    "checkpoint.safetensors_files",
    {
        **{name: parsing(data) for name, data in MALFORMED.items()},
        "a reader that ends": ends_early(WHOLE, short=False),
        "a reader that gives less": ends_early(WHOLE, short=True),
        "an absurd length": of_an_absurd_length,
        "too many pieces": lambda: header([(f"{at}" * 2_000_000, "float32", (1,)) for at in range(60)], {}),
    },
    kind=CheckpointError,
)


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_files_are_refused(case: str) -> None:
    REFUSED.check(case)


@tried(40)
@given(st.integers(0, 10_000), st.integers(0, 7), st.booleans())
def test_any_flipped_bit_or_cut_is_refused_or_read_as_the_library_does(place: int, bit: int, cut: bool) -> None:
    data, _ = file_of([("a", "float32", (2, 2)), ("b", "int64", (3,)), ("c", "bool", ())], {"k": "v"})
    place %= len(data)
    changed = data[:place] if cut else data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
    try:
        entries, _ = parsed(changed)
    except CheckpointError:
        return
    assert not cut
    library = dict(library_entries(changed))
    assert {key: (entry.code, list(entry.shape)) for key, entry in entries.items()} == {
        key: (each["dtype"], each["shape"]) for key, each in library.items()
    }
    assert all(changed[entries[key].start : entries[key].stop] == each["data"] for key, each in library.items())
