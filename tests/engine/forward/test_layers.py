"""Layers stand at their places. Working copies in another dtype than the batch: inputs follow them in all modules."""

import copy
import inspect
import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import shardwise as sw
from shardwise.comm import alone
from shardwise.engine.forward.aside import kept_attributes
from shardwise.engine.forward.layers import OfEngine, Place, is_compiled, run_eagerly, take_off, unwrap, wrap
from shardwise.engine.torch_private import COMPILED_CALL
from shardwise.errors import ModelError, UnderflowWarning
from tests.engine.loops import begun, mean_square, on_ranks, plan_of
from tests.oracle.batches import points, square_loss
from tests.oracle.program import sgd

BATCHES = [points(step, 8) for step in range(2)]
HELD: dict[str, Any] = {
    "itself": nn.Parameter,
    "a dict": lambda weight: nn.ParameterDict({"w": weight}),
    "a list": lambda weight: nn.ParameterList([weight]),
    "a dict of lists": lambda weight: nn.ParameterDict({"w": nn.ParameterList([weight])}),
    "parametrized": lambda weight: parametrizations.weight_norm(nn.Linear(4, 1, bias=False)),
    "cast by hand": lambda weight: nn.Linear(4, 1, bias=False),
}


class Held(nn.Module):
    """Multiplies by a parameter that it holds in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        weight = torch.randn(4, 1)
        self.way, self.held = way, HELD.get(way, HELD["cast by hand"])(weight)

    def forward(self, x: torch.Tensor) -> Any:
        match self.way:
            case "itself":
                return x @ self.held
            case "a dict":
                return x @ self.held["w"]
            case "a list":
                return x @ self.held[0]
            case "a dict of lists":
                return x @ self.held["w"][0]
            case "parametrized":
                return self.held(x)
            case "cast by hand":
                return nn.functional.linear(x.to(self.held.weight.dtype), self.held.weight)
        return nn.functional.linear(x, self.held.weight)


def losses(make: Any, stage: int = 1, compute: str | None = "bfloat16", **settings: Any) -> list[float]:
    keep, checkpoint = settings.pop("keep", ()), settings.pop("checkpoint", None)
    precision = sw.Precision(compute=compute, keep=keep)
    plan = plan_of("dp_shard=2", stage, precision=precision, checkpoint=checkpoint)
    return on_ranks(make, plan, BATCHES, **{"optimizer": sgd, "loss": square_loss, **settings}).losses


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("checkpoint", [None, ("*",)])
def test_inputs_meet_parameters_in_the_compute_dtype_in_whatever_way_a_module_holds_them(
    stage: int, checkpoint: tuple[str, ...] | None
) -> None:
    found = {
        way: losses(lambda way=way: nn.Sequential(nn.Identity(), Held(way)), stage, checkpoint=checkpoint)
        for way in HELD
    }
    assert found["a dict"] == found["a list"] == found["a dict of lists"] == found["itself"]
    assert len(found["parametrized"]) == len(found["cast by hand"]) == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_of_a_child_that_meet_other_inputs_are_refused_with_a_way_out(stage: int) -> None:
    with pytest.raises(ModelError, match=r"'1' \(Held\) mixes dtypes under .*bfloat16.*x.to\(weight.dtype\)"):
        losses(lambda: nn.Sequential(nn.Identity(), Held("child")), stage)
    assert len(losses(lambda: Held("child"), stage, keep=("held",))) == 2
    with torch.autocast("cpu", torch.bfloat16):
        engine = begun(alone(), lambda: Held("child"), plan_of(compute="bfloat16"), loss=square_loss)
        assert engine.step(points(0, 4)).loss > 0


class Notes(nn.Linear):
    def forward(self, x: torch.Tensor, notes: dict[str, int], order: list[str]) -> torch.Tensor:  # type: ignore[override]
        notes["calls"] = notes.get("calls", 0) + 1
        order.append("called")
        return super().forward(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Notes(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        notes, order = dict[str, int](), list[str]()
        out: torch.Tensor = self.inner(x, notes, order)
        assert (notes, order) == ({"calls": 1}, ["called"])
        return out


class Half(nn.Linear):
    """Is built in float16, and casts its input itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half())


def test_what_is_given_to_write_to_is_given_itself() -> None:
    """A dict or a list among the inputs without anything to cast."""
    assert len(losses(Outer)) == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_float16_is_warned_of_once_and_again_when_every_gradient_is_zero(stage: int) -> None:
    def tiny(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.float().mean() * 1e-9

    linear = partial(nn.Linear, 4, 1)
    with pytest.warns(UnderflowWarning, match="the model trains in float16: .*bfloat16") as seen:
        losses(linear, stage, "float16")
    assert sum(each.category is UnderflowWarning for each in seen) == 1
    with pytest.warns(UnderflowWarning, match="all gradients of a step are zero: .*bfloat16") as seen:
        losses(linear, stage, "float16", loss=tiny)
    assert sum(each.category is UnderflowWarning for each in seen) == 3  # and two steps
    with pytest.warns(UnderflowWarning):
        losses(lambda: Half(4, 1).half(), stage, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnderflowWarning)
        losses(linear, stage, loss=tiny)
        losses(linear, stage, "float16", loss=tiny, keep=("*",))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("made", "keep"),
    [
        *((each, ("1",)) for each in (parametrizations.weight_norm, parametrizations.spectral_norm)),
        (parametrizations.orthogonal, ("1",)),
        (lambda linear: nn.BatchNorm1d(linear.in_features), ()),
    ],
)
def test_parametrized_modules_may_be_kept_and_batch_norms_are_unasked(made: Any, keep: Any, stage: int) -> None:
    """They compute in float32, and the weight that is computed stays in it."""
    dtypes: set[torch.dtype] = set()

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), made(nn.Linear(6, 4)))
        model[1].register_forward_pre_hook(lambda module, _: dtypes.add(module.weight.dtype))
        return model

    plan = plan_of("dp_shard=2", stage, precision=sw.Precision(compute="bfloat16", keep=keep))
    on_ranks(make, plan, [{"input": torch.linspace(-1, 1, 48).view(8, 6)}] * 2, loss=mean_square)
    assert dtypes == {torch.float32}


class Noted(OfEngine):
    def __init__(self, place: Place, calls: list[Place]) -> None:
        self.place = place
        self.calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.place)
        return self.forward(*args, **kwargs)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations([Place.TENSOR, Place.PROOF, Place.STAGE])))
def test_layers_stand_at_their_places_whatever_was_put_on_first(order: tuple[Place, ...], compiles: bool) -> None:
    calls, hooked, compiled = list[Place](), list[nn.Module](), list[nn.Module]()
    linear, x = nn.Linear(4, 2), torch.ones(1, 4)
    expected = linear(x)
    linear.register_forward_hook(lambda module, *_: hooked.append(module))
    if compiles:
        whole: Any = linear._call_impl

        def as_compiled(*args: Any) -> Any:
            compiled.append(linear)
            return whole(*args)

        linear._compiled_call_impl = as_compiled
    layers = {place: Noted(place, calls) for place in order}
    for each in layers.values():
        wrap(linear, each)
    assert torch.equal(linear(x), expected)
    assert (calls, len(hooked), len(compiled)) == ([Place.STAGE, Place.PROOF, Place.TENSOR], 1, compiles)
    assert list(inspect.signature(linear.forward).parameters) == ["input"]
    assert is_compiled(linear) == compiles
    with run_eagerly(linear):
        assert torch.equal(linear(x), expected)
    assert len(compiled) == compiles
    calls.clear()
    twin = copy.deepcopy(linear)
    nn.init.zeros_(twin.weight)
    nn.init.zeros_(twin.bias)
    assert not twin(x).any()
    take_off(layers[Place.PROOF])
    put_back = kept_attributes([linear], names=("forward", COMPILED_CALL))
    unwrap(linear)
    assert torch.equal(linear(x), expected)
    put_back()
    calls.clear()
    linear(x)
    assert calls == [Place.STAGE, Place.TENSOR]
    assert len(compiled) == 3 * compiles
    unwrap(linear)
    assert "forward" not in vars(linear)
    assert (linear._compiled_call_impl is not None) == compiles
