"""Pickles are parsed to the values that pickle loads, and never run; values are written to the same."""

import contextlib
import pickle
import pickletools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.foreign.pickle_writer import pickled
from shardwise.checkpoint.foreign.pickles import parse
from shardwise.errors import CheckpointError
from tests.properties import tried

keys = st.integers(-(1 << 60) + 1, (1 << 60) - 1)
"""Longer ones are refused: see `_MAX_KEY`."""


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | keys | st.tuples(st.text(), keys), inner, max_size=4)
        | st.sets(keys, max_size=4)
        | st.frozensets(st.text(), max_size=4)
    ),
)


@tried(40)
@given(plain, st.integers(4, 5))
def test_plain_values_are_parsed_as_pickle_loads_them(value: object, protocol: int) -> None:
    data = pickle.dumps([value, value], protocol=protocol)
    parsed = parse(data, lambda module, name: False)
    assert repr(parsed) == repr(pickle.loads(data))
    assert parsed[0] is parsed[1] or value in ((), "", b"", frozenset()) or isinstance(value, int | float | str | bytes)


@tried(40)
@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        parse(data, lambda module, name: True)


def test_an_absurd_place_in_the_memo_or_length_costs_nothing() -> None:
    assert parse(b"N" + b"r\xff\xff\xff\xff" + b".", lambda module, name: False) is None
    for code in (b"\x8d", b"\x8e"):
        with pytest.raises(CheckpointError, match="damaged"):
            parse(code + b"\xff" * 8, lambda module, name: False)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(VALUES)
@tried(100)
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
