"""What owners announce is read back as it was, and no other bytes are read at all."""

import dataclasses
import enum
import json
import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm.nested_values import ContainerSlot, ObjectSlot, TensorSlot, transform
from shardwise.engine.pipeline.infer import CallOutcome, OutcomeTensor
from shardwise.engine.pipeline.nested import packed, unpacked
from shardwise.engine.pipeline.stage_tensor import Spec
from shardwise.errors import MismatchError, ModelError

Pair = namedtuple("Pair", "first second")
SLOT: Any = TensorSlot(0)


class Numbers(list[int]):
    """A list with a name."""


class Checked(tuple[Any, ...]):
    """Would look at its items, which may be slots."""

    def __new__(cls, *_: Any) -> "Checked":
        raise AssertionError("constructors are not called")


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any
    other: Any = None

    def __post_init__(self) -> None:
        assert not isinstance(self.value, str), "constructors are not called"


@dataclasses.dataclass
class Free:
    value: Any


def free() -> Free:
    made = Free(SLOT)
    made.note = "beside its fields"  # type: ignore[attr-defined]
    return made


def slotted(value: Any) -> Slotted:
    made = object.__new__(Slotted)
    object.__setattr__(made, "value", value)
    object.__setattr__(made, "other", None)
    return made


def output(**values: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast  # seconds, which to collect tests does not take

    return CausalLMOutputWithPast(**values)


SPEC = Spec(
    shape=(2, 3), stride=(3, 1), dtype=torch.bfloat16, requires_grad=True, is_leaf=False, is_conj=False, is_neg=False
)
OUTCOME = CallOutcome(
    skeleton=(SLOT,),
    outputs=(OutcomeTensor(spec=SPEC, same_as=None, view_of=0, shares_with=None),),
    written=((0, SPEC),),
    writes_kept=False,
    has_known_shapes=False,
    announces=True,
)


@pytest.mark.parametrize(
    "value",
    [
        (1, -(2**80), True, None, 0.1, -0.0, math.inf, "text \ud800 \0", b"\0\xff", 1 + 2j, ...),
        [slice(1, None), torch.float16, torch.device("cpu"), torch.strided, torch.channels_last, int, Colour.RED],
        {(1, "key"): [{}], None: torch.Size([2, 3]), Colour.RED: ()},
        OrderedDict(b=TensorSlot(1), a=ObjectSlot(2), c=ContainerSlot(0)),
        defaultdict(list, {"a": [1]}),
        UserDict({"a": TensorSlot(3)}),
        Pair(SLOT, {"x": TensorSlot(1)}),
        Numbers([1, 2]),
        tuple.__new__(Checked, (SLOT, "text")),
        slotted("text"),
        free(),
        torch.return_types.max((SLOT, SLOT)),
        OUTCOME,
        lambda: output(loss=SLOT, logits=SLOT, hidden_states=(SLOT,)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_announced_is_read_back_as_it_was(value: Any) -> None:
    value = value() if callable(value) else value
    read = unpacked(packed(value))
    assert type(read) is type(value)
    assert read == value
    assert repr(read) == repr(value)
    assert getattr(read, "__dict__", None) == getattr(value, "__dict__", None)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(scalars, inner) | st.builds(Free, inner),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(nested)
def test_nested_values_are_read_back_as_they_were(value: Any) -> None:
    assert unpacked(packed(value)) == value
    assert transform(value, lambda leaf: leaf) is value, "what holds no tensor stays the same object"


def bytes_of(text: str | bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text if isinstance(text, bytes) else text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "written",
    [
        ["call", "os", "system"],
        ["class", ["antigravity", "fly"]],
        ["class", ["os", "system"]],
        ["record", ["pathlib", "Path"], []],
        ["sequence", ["subprocess", "Popen"], ["true"], []],
        ["mapping", ["subprocess", "Popen"], [], []],
        ["mapping", ["collections", "defaultdict"], [], [["default_factory", ["class", ["subprocess", "Popen"]]]]],
        ["member", ["subprocess", "Popen"], "RED"],
        ["dtype", "load"],
        ["device", "nowhere"],
        ["slot", []],
        ["dict", [[["list", []], 1]]],
        ["bytes", "zz"],
        ["tuple"],
        [],
        {"a": 1},
    ],
    ids=json.dumps,
)
def test_other_values_are_refused(written: Any) -> None:
    with pytest.raises(MismatchError, match="same versions"):
        unpacked(bytes_of(json.dumps(written)))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40) | st.sampled_from([b"[" * 100_000, b'["tuple",[' * 50_000, b"\x80\x04K\x01."]))
def test_other_bytes_are_refused_or_plain_values(content: bytes) -> None:
    try:
        read = unpacked(bytes_of(content or b"?"))
    except MismatchError:
        return
    assert isinstance(read, int | float | str | None)


def test_what_cannot_be_written_is_refused_by_its_class() -> None:
    with pytest.raises(ModelError, match="gives a Generator inside of a container"):
        packed({"a": torch.Generator()})
