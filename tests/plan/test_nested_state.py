"""Optimizer state in containers: keys that say where each value was, and the way back."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.optimizer_entries import flat_state, nested_state
from tests.properties import tried

LEAVES = st.integers() | st.booleans() | st.text() | st.none()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=3))
@tried(100)
def test_what_is_made_flat_comes_back(state: dict[str, Any]) -> None:
    flat = flat_state(state)
    assert nested_state(flat) == state
    assert all(type(each) in (int, bool, type(None)) for each in flat.values())


def test_keys_say_where_a_value_was() -> None:
    state = {"GG": [1, []], "expr": ("ab/bc", None), "buffers": {"a": 2, 3: 4}, "step": 5, "Q": None}
    assert flat_state(state) == {
        "GG[0]": 1,
        "GG[1]=[]": True,
        'expr(0)="ab\\u002fbc"': True,
        "expr(1)=null": True,
        'buffers{"a"}': 2,
        "buffers{3}": 4,
        "step": 5,
        "Q": None,
    }


def test_what_is_no_container_of_plain_keys_stays() -> None:
    parts = {(1, 2): 3}
    assert flat_state({"by pair": parts}) == {"by pair": parts}
