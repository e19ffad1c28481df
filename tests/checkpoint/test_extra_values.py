"""`extra` comes back as it was given: the states of torch's schedulers go in as they are."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler, swa_utils

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint.manifest import packed, unpacked
from shardwise.comm.channel import alone
from tests.properties import tried
from tests.refusals import Refusals

STATE = {"w": torch.ones(2)}

Make = Callable[[Any], Any]

MAKERS: dict[str, Make] = {
    "LambdaLR": lambda sgd: lr_scheduler.LambdaLR(sgd, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda sgd: lr_scheduler.MultiStepLR(sgd, [2, 4, 4, 7]),
    "OneCycleLR": lambda sgd: lr_scheduler.OneCycleLR(sgd, 1.0, 12),
    "ReduceLROnPlateau": lambda sgd: lr_scheduler.ReduceLROnPlateau(sgd, patience=1),
    "SequentialLR": lambda sgd: lr_scheduler.SequentialLR(
        sgd, [lr_scheduler.LinearLR(sgd), lr_scheduler.MultiStepLR(sgd, [1, 3])], milestones=[3]
    ),
    "ChainedScheduler": lambda sgd: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(sgd), lr_scheduler.MultiStepLR(sgd, [1, 3])], optimizer=sgd
    ),
    "SWALR": lambda sgd: swa_utils.SWALR(sgd, 0.05),
}


def steps(scheduler: Any, optimizer: torch.optim.Optimizer, num: int) -> list[float]:
    rates = []
    for _ in range(num):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def optimizer_of() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)


def types(value: Any) -> Any:
    """What is where, and of which type."""
    if isinstance(value, dict):
        return type(value), [(type(key), key, types(each)) for key, each in value.items()]
    return (type(value), [types(each) for each in value]) if isinstance(value, list) else (type(value), repr(value))


@pytest.mark.parametrize("name", MAKERS)
def test_the_state_of_a_scheduler_is_restored_to_the_bit(name: str, tmp_path: Path) -> None:
    sgd = optimizer_of()
    scheduler = MAKERS[name](sgd)
    steps(scheduler, sgd, 3)
    state = scheduler.state_dict()
    sw.save(tmp_path, STATE, extra={"scheduler": state}, step=3, channel=alone())
    restored = sw.load(tmp_path, {"w": torch.zeros(2)}, channel=alone())["scheduler"]
    assert types(restored) == types(state)
    assert types(checkpoint.open(tmp_path).extra["scheduler"]) == types(state)
    other = optimizer_of()
    resumed = MAKERS[name](other)
    other.load_state_dict(sgd.state_dict())
    resumed.load_state_dict(restored)
    assert steps(resumed, other, 6) == steps(scheduler, sgd, 6)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.none() | st.floats(allow_nan=False) | st.sampled_from(["shardwise", "items"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.fixed_dictionaries({"shardwise": inner | st.just("dict"), "items": inner})
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=8,
)


@tried(40)
@given(values)
def test_any_values_come_back_with_their_types(value: object) -> None:
    import json

    assert types(unpacked(json.loads(json.dumps(packed(value, "extra"))))) == types(value)


def test_plain_values_are_plain_for_other_programs_and_numbers_of_numpy_are_those_of_python() -> None:
    plain = {"a": [1, 2.5, None, {"b": True}], "shardwise": "x", "nan": math.inf}
    assert packed(plain, "extra") == plain
    assert unpacked({"shardwise": "Tower", "items": [[1, 2]]}) == {"shardwise": "Tower", "items": [[1, 2]]}
    given = {"a": np.float64(1.5), "b": np.bool_(True), "c": [np.int64(3), np.float32(0.1)], "d": {1: np.uint8(2)}}
    expected = {"a": 1.5, "b": True, "c": [3, float(np.float32(0.1))], "d": {1: 2}}
    assert types(unpacked(packed(given, "extra"))) == types(expected)


def scheduled(folder: Path) -> None:
    rate = torch.tensor(0.1)
    scheduler = lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate), 2)
    extra = {"s": scheduler.state_dict(), "t": {(1, 2): 3}, "f": len}
    try:
        sw.save(folder, STATE, extra=extra, channel=alone())
    finally:
        assert not list(folder.iterdir())


REFUSED = Refusals(
    "checkpoint.extra",
    {
        "a tensor, a tuple as key, a function": scheduled,
        "a long double": lambda: packed({"a": np.longdouble(1)}, "extra"),
        "a complex number": lambda: packed({"a": np.complex64(1)}, "extra"),
        "an array": lambda: packed({"a": np.ones(2)}, "extra"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_come_back_is_named_with_what_to_write_instead(case: str) -> None:
    REFUSED.check(case)
