"""Settings of optimizers survive JSON, and go to the parameters they were of, however groups were cut since."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.optimizer_entries import LiveParameter, plan_optimizers, values_of
from shardwise.plan.saved_settings import (
    NamedOptimizer,
    OptimizerGroup,
    plan_take_over,
    settings_to_json,
    shared_to_json,
    take_over,
    take_over_shared,
)
from shardwise.space import Piece
from tests.plan.strategies import proven

numbers = st.booleans() | st.integers() | st.floats()
values = st.recursive(st.none() | numbers | st.text(), lambda each: st.lists(each, max_size=3).map(tuple), max_leaves=6)
settings = st.dictionaries(st.sampled_from(["lr", "betas", "eps", "mode"]), values)


class Tensor:
    """As much of a tensor as settings need."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tolist(self) -> Any:
        return self.value

    def new_tensor(self, value: Any) -> "Tensor":
        return Tensor(value)

    def copy_(self, other: "Tensor") -> "Tensor":
        self.value = other.value
        return self


def group(parameters: str, **settings: Any) -> OptimizerGroup:
    return OptimizerGroup(parameters=tuple(parameters), settings=settings)


def adam(*groups: OptimizerGroup, kind: str = "Adam", **more: Any) -> NamedOptimizer:
    return NamedOptimizer(kind=kind, groups=groups, **more)


def as_saved(*optimizers: NamedOptimizer, ties: Mapping[str, str] | None = None) -> dict[str, Any]:
    saved = {"ties": dict(ties or {}), "optimizers": [each.to_json() for each in optimizers]}
    return json.loads(json.dumps(saved, allow_nan=False))  # type: ignore[no-any-return]


def same(one: Any, other: Any) -> bool:
    """Equal in type and value; nan is nan, and -0.0 is not 0.0."""
    return repr(one) == repr(other)


@proven
@given(settings, settings)
def test_settings_come_back_from_json_as_they_were(mine: dict[str, Any], others: dict[str, Any]) -> None:
    saved = as_saved(adam(group("ab", **mine)))
    over = plan_take_over([adam(group("ab", **{**mine, **others}))], {}, saved)
    live = {"params": [1, 2], **{key: others.get(key, value) for key, value in mine.items()}}
    take_over(live, over.settings[0][0])
    assert same(live, {"params": [1, 2], **mine})


@proven
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2), st.integers(0, 2)), unique_by=lambda each: each[0])
)
def test_every_group_gets_what_its_parameters_had_or_a_finding(cut: list[tuple[str, int, int]]) -> None:
    """Brute force: parameter by parameter."""
    rates = (0.5, 0.25, 0.5)
    then = [group("".join(name for name, was, _ in cut if was == at), lr=rates[at]) for at in range(3)]
    now = [group("".join(name for name, _, at in cut if at == number), lr=1.0) for number in range(3)]
    over = plan_take_over([adam(*now)], {}, as_saved(adam(*then)))
    conflicts = 0
    for number, taken in enumerate(over.settings[0]):
        wanted = {rates[was] for _, was, at in cut if at == number}
        conflicts += len(wanted) > 1
        assert dict(taken) == ({"lr": wanted.pop()} if len(wanted) == 1 else {})
    assert len(over.findings) == conflicts
    assert set(over.source) == {name for name, *_ in cut}


def test_tensors_are_written_in_place_wherever_they_are() -> None:
    rate, beta = Tensor(0.5), Tensor(0.9)
    live = {"lr": rate, "betas": (beta, 0.99)}
    saved = settings_to_json(live)
    assert saved == {"lr": 0.5, "betas": [0.9, 0.99]}
    take_over(live, {"lr": 0.25, "betas": [0.8, 0.98]})
    assert live["lr"] is rate
    assert live["betas"] == (beta, 0.98)
    assert (rate.value, beta.value) == (0.25, 0.8)


def test_functions_and_choices_of_implementation_are_left_out() -> None:
    held = {"params": [1], "param_names": ["w"], "lr": 1.0, "hook": len, "pairs": [(1, len)], "fused": True}
    assert settings_to_json({**held, "foreach": None}) == {"lr": 1.0}


def test_one_group_takes_what_fits_it() -> None:
    """A choice of implementation in a checkpoint is not taken; what schedulers note is; a tensor takes numbers only."""
    saved = as_saved(adam(group("a", lr=1.0)))
    saved["optimizers"][0]["groups"][0]["settings"]["fused"] = True
    noted, other = (as_saved(adam(group("a", **each))) for each in ({"lr": 1.0, "initial_lr": 4.0}, {"lr": "auto"}))
    finding = "the group of Adam with 'a' has a tensor as 'lr', and the checkpoint 'auto'"
    for live, stored, taken, findings in (
        ({"lr": 2.0, "fused": None}, saved, {"lr": 1.0}, ()),
        ({"lr": 2.0, "max_lr": 8.0}, noted, {"lr": 1.0, "initial_lr": 4.0}, ()),
        ({"lr": Tensor(1.0)}, other, {}, (finding,)),
    ):
        over = plan_take_over([adam(group("a", **live))], {}, stored)
        assert (over.settings, over.findings) == (((taken,),), findings)


def test_another_kind_gives_no_settings_and_a_finding() -> None:
    saved = as_saved(adam(group("ab", lr=1.0), kind="SGD"), adam(group("c", lr=3.0)))
    over = plan_take_over([adam(group("abc", lr=2.0))], {}, saved)
    assert over.settings == (({"lr": 3.0},),)
    assert set(over.source) == {"c"}
    (finding,) = over.findings
    assert finding.startswith("Adam trains 'a', 'b' here, but SGD trained it in the checkpoint")


def test_parameters_are_found_through_the_ties_of_both_sides() -> None:
    saved = as_saved(adam(group("ab", lr=1.0)), ties={"x": "a"})
    over = plan_take_over([adam(group("xy", lr=2.0))], {"b": "y"}, saved)
    assert {name: then for name, (then, _) in over.source.items()} == {"x": "a", "y": "b"}
    assert over.findings == ()


def parameter(name: str = "w", *, dtype: str = "float32", has_state: bool = False, **more: Any) -> LiveParameter:
    return LiveParameter(name=name, shape=more.pop("shape", (4, 2)), dtype=dtype, has_state=has_state, **more)


def pieces(**shapes: tuple[str, tuple[int, ...]]) -> dict[str, Piece]:
    """Stored tensors; `w__key` is the state `key` of `w`."""
    named = {f"optimizer/{key.replace('__', '/')}" if "__" in key else key: each for key, each in shapes.items()}
    return {name: Piece(name=name, dtype=dtype, global_shape=shape) for name, (dtype, shape) in named.items()}


@pytest.mark.parametrize(
    ("shape", "along"),
    [
        ((4, 2), {"moment": True, "rows": False, "eta": False, "step": False}),
        ((), {"moment": True, "eta": False, "step": False}),  # of a scalar parameter only keys tell
    ],
)
def test_entries_are_along_where_they_have_the_shape_of_the_parameter(
    shape: tuple[int, ...], along: dict[str, bool]
) -> None:
    shapes = {"w": shape, "w__moment": shape, "w__rows": (4, 1), "w__eta": (), "w__step": (), "w__master": shape}
    stored = {name: ("float32", each) for name, each in shapes.items() if name[3:] in ("", "master", *along)}
    live = parameter(shape=shape, whole_keys=frozenset({"step", "eta"}))
    restoration = plan_optimizers([adam(group("w"))], [live], {}, stored=pieces(**stored), settings={})
    assert {entry.key: entry.along for entry in restoration.entries["w"]} == along


@pytest.mark.parametrize("held", ["w", "w__master"])
def test_state_made_in_the_dtype_of_the_parameter_follows_it(held: str) -> None:
    shapes = {"w": ("bfloat16", (4, 2)), held: ("float32", (4, 2))}
    state = {"w__moment": ("float32", (4, 2)), "w__low": ("bfloat16", (4, 2)), "w__step": ("float32", ())}
    restoration = plan_optimizers(
        [adam(group("w"))], [parameter(dtype="float64")], {}, stored=pieces(**shapes, **state), settings={}
    )
    assert {entry.key: entry.whole.dtype for entry in restoration.entries["w"]} == {
        "moment": "float64",
        "low": "bfloat16",
        "step": "float32",
    }


def test_a_parameter_of_another_shape_takes_no_state() -> None:
    stored = pieces(w=("float32", (2, 4)), w__moment=("float32", (2, 4)))
    restoration = plan_optimizers([adam(group("w"))], [parameter()], {}, stored=stored, settings={})
    assert restoration.entries == {}


def test_live_state_is_kept_where_the_checkpoint_knows_no_optimizers() -> None:
    stored = pieces(w=("float32", (4, 2)))
    fresh = plan_optimizers([adam(group("w"))], [parameter()], {}, stored=stored, settings={})
    assert (fresh.findings, fresh.replaces_state) == ((), False)
    trained = plan_optimizers([adam(group("w"))], [parameter(has_state=True)], {}, stored=stored, settings={})
    assert len(trained.findings) == 1
    assert not trained.replaces_state


def test_state_for_all_parameters_is_kept_as_settings() -> None:
    state: dict[Any, Any] = {"k": 3, "ema": {"short": 0.5, "far": math.inf}, "names": ["a"]}
    shared = shared_to_json("Adam", state)
    assert json.loads(json.dumps(shared)) == shared
    assert not list(values_of("Adam", {key: state[key] for key in shared}, {"w": "w"}))
    live: dict[Any, Any] = {"k": 0, "left": 1}
    take_over_shared(live, shared)
    assert live == {key: state[key] for key in shared}
    take_over_shared(live, None)
    assert live["k"] == 3


def test_settings_that_steps_make_come_and_go() -> None:
    def named(**settings: Any) -> NamedOptimizer:
        groups = (OptimizerGroup(parameters=("w",), settings={"lr": 0.1, **settings}),)
        return NamedOptimizer(kind="Shampoo", groups=groups, made=frozenset({"step"}))

    def taken(live: NamedOptimizer, stored: NamedOptimizer) -> dict[str, Any]:
        over = plan_take_over([live], {}, {"optimizers": [json.loads(json.dumps(stored.to_json()))]})
        assert not over.findings
        settings = dict(live.groups[0].settings)
        take_over(settings, over.settings[0][0])
        return settings

    assert taken(named(), named(step=7)) == {"lr": 0.1, "step": 7}
    assert taken(named(step=9), named()) == {"lr": 0.1}
    other = NamedOptimizer(kind="Shampoo", groups=named(new=1).groups)
    over = plan_take_over([named()], {}, {"optimizers": [other.to_json()]})
    assert "has no setting 'new'" in over.findings[0]
