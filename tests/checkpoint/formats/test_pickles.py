"""Pickles are parsed to the values that pickle loads, and never run; values are written to the same."""

import contextlib
import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.formats.torch_files.pickles import parse, pickled
from shardwise.errors import CheckpointError
from tests.properties import tried

KEYS = st.integers(-(1 << 60) + 1, (1 << 60) - 1)
"""Longer ones are refused."""
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
WRITTEN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
READ = st.one_of(
    WRITTEN,
    st.binary(),
    st.dictionaries(st.text() | KEYS | st.tuples(st.text(), KEYS), LEAVES | st.binary(), max_size=4),
    st.sets(KEYS, max_size=4),
    st.frozensets(st.text(), max_size=4),
)


@tried(40)
@given(st.lists(READ, max_size=3), st.integers(4, 5))
def test_plain_values_are_parsed_as_pickle_loads_them(value: list[object], protocol: int) -> None:
    data = pickle.dumps([value, value], protocol=protocol)
    parsed = parse(data, lambda module, name: False)
    assert repr(parsed) == repr(pickle.loads(data))
    assert parsed[0] is parsed[1]


@tried(40)
@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        parse(data, lambda module, name: True)


@tried(40)
@given(WRITTEN)
def test_a_written_pickle_has_its_value(value: Any) -> None:
    assert pickle.loads(pickled(value)) == value
    with pytest.raises(TypeError, match="a set is no value"):
        pickled([value, {1}])


def test_every_instruction_of_pickle_is_known_or_refused_by_its_number() -> None:
    refused = set()
    for each in pickletools.opcodes:
        try:
            parse(b"\x80\x02" + b"]]" + each.code.encode("latin1") + b"." * 20, lambda module, name: True)
        except CheckpointError as error:
            refused |= {each.name} if "it has the instruction" in str(error) else set()
    # What imports by number, calls, reads text as numbers, or takes buffers from outside of the file.
    assert refused == {
        "DICT", "EXT1", "EXT2", "EXT4", "FLOAT", "GET", "INST", "INT", "LIST", "LONG", "NEXT_BUFFER",
        "OBJ", "PERSID", "POP_MARK", "PUT", "READONLY_BUFFER", "STRING", "UNICODE",
    }  # fmt: skip
