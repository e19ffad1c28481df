"""What owners announce is read back as it was, and no other bytes are read at all."""

import ast
import dataclasses
import enum
import json
import math
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.comm.nested_values import ObjectSlot, TensorSlot
from shardwise.engine.pipeline.call_inference import CallOutcome, OutcomeTensor
from shardwise.engine.pipeline.nested import packed, unpacked
from shardwise.engine.pipeline.stage_values import Spec
from shardwise.errors import MismatchError, ModelError

SOURCE = Path(sw.__file__).parent

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
    made = Free(TensorSlot(0))
    made.note = "beside its fields"  # type: ignore[attr-defined]
    return made


def slotted(value: Any) -> Slotted:
    made = object.__new__(Slotted)
    object.__setattr__(made, "value", value)
    object.__setattr__(made, "other", None)
    return made


SPEC = Spec(
    shape=(2, 3), stride=(3, 1), dtype=torch.bfloat16, requires_grad=True, is_leaf=False, is_conj=False, is_neg=False
)


@pytest.mark.parametrize(
    "value",
    [
        (1, -(2**80), True, None, 0.1, -0.0, math.inf, "text \ud800 \0", b"\0\xff", 1 + 2j, ...),
        [slice(1, None), torch.float16, torch.device("cpu"), torch.strided, torch.channels_last, int, Colour.RED],
        {(1, "key"): [{}], None: torch.Size([2, 3]), Colour.RED: ()},
        OrderedDict(b=TensorSlot(1), a=ObjectSlot(2)),
        defaultdict(list, {"a": [1]}),
        UserDict({"a": TensorSlot(3)}),
        Pair(TensorSlot(0), {"x": TensorSlot(1)}),
        Numbers([1, 2]),
        tuple.__new__(Checked, (TensorSlot(0), "text")),
        slotted("text"),
        free(),
        torch.return_types.max((SLOT, SLOT)),
        CallOutcome(
            skeleton=(TensorSlot(0),),
            outputs=(OutcomeTensor(spec=SPEC, same_as=None, view_of=0, shares_with=None),),
            written=((0, SPEC),),
            writes_kept=False,
            has_known_shapes=False,
            announces=True,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_announced_is_read_back_as_it_was(value: Any) -> None:
    assert_read_back(value)


def test_an_output_of_transformers_is_read_back_as_it_was() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast  # seconds, which to collect tests does not take

    assert_read_back(CausalLMOutputWithPast(loss=SLOT, logits=SLOT, hidden_states=(SLOT,)))


def assert_read_back(value: Any) -> None:
    read = unpacked(packed(value))
    assert type(read) is type(value)
    assert read == value
    assert repr(read) == repr(value)
    if hasattr(value, "__dict__"):
        assert vars(read) == vars(value)


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


FOREIGN = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}


def test_nothing_in_the_source_reads_or_writes_pickles() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords)
                names = [] if safe else ["pickle"]
            elif isinstance(node, ast.Attribute) and node.attr in ("loads", "send_object_list", "all_gather_object"):
                names = [] if ast.unparse(node) in ("json.loads", "tomllib.loads") else ["pickle"]
            names = [name for name in names if name != "multiprocessing.util"]  # calls at the end of a process
            found += [f"{path}:{node.lineno}" for name in names if name.partition(".")[0] in FOREIGN]  # type: ignore[attr-defined]
    assert found == []
