"""Working copies in another dtype than the batch: wherever a module holds them, its inputs follow, or it is named."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import shardwise as sw
from shardwise.errors import ModelError, UnderflowWarning
from tests.engine.expected import points, seeded, sgd, square_loss

BF16 = sw.Precision(compute="bfloat16")


class Held(nn.Module):
    """Multiplies by a parameter that it holds in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        weight = torch.randn(4, 1)
        match way:
            case "itself":
                self.weight = nn.Parameter(weight)
            case "in a dict":
                self.held: Any = nn.ParameterDict({"w": weight})
            case "in a list":
                self.held = nn.ParameterList([weight])
            case "in a dict of lists":
                self.held = nn.ParameterDict({"w": nn.ParameterList([weight])})
            case "parametrized":
                self.held = parametrizations.weight_norm(nn.Linear(4, 1, bias=False))
            case _:
                self.held = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.way:
            case "itself":
                return x @ self.weight
            case "in a dict":
                return x @ self.held["w"]  # type: ignore[no-any-return]
            case "in a list":
                return x @ self.held[0]  # type: ignore[no-any-return]
            case "in a dict of lists":
                return x @ self.held["w"][0]  # type: ignore[no-any-return]
            case "parametrized":
                return self.held(x)  # type: ignore[no-any-return]
            case "cast by hand":
                return nn.functional.linear(x.to(self.held.weight.dtype), self.held.weight)
            case _:
                return nn.functional.linear(x, self.held.weight)


def engine_of(make: Callable[[], nn.Module], precision: sw.Precision = BF16, stage: int = 1, **more: Any) -> Any:
    def run(channel: sw.Channel) -> list[float]:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=precision, sharding=sw.Sharding(stage=stage))
        engine = sw.parallelize(
            seeded(make)(), plan, channel=channel, **{"optimizer": sgd, "loss": square_loss, **more}
        )
        return [engine.step(points(step, 4)).loss for step in range(2)]

    return sw.simulate(2, run)[0]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", ["in a dict", "in a list", "in a dict of lists"])
def test_inputs_follow_parameters_that_a_module_holds_in_any_way(way: str, stage: int) -> None:
    assert engine_of(lambda: Held(way), stage=stage) == engine_of(lambda: Held("itself"))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("way", ["parametrized", "cast by hand"])
def test_inputs_follow_what_is_computed_of_parameters(way: str, stage: int) -> None:
    assert len(engine_of(lambda: Held(way), stage=stage)) == 2


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("checkpoint", [None, ("*",)])
def test_parameters_of_a_child_meet_inputs_in_the_compute_dtype(stage: int, checkpoint: tuple[str, ...] | None) -> None:
    def run(channel: sw.Channel, way: str) -> list[float]:
        plan = sw.Plan(
            mesh=sw.Mesh(dp_shard=2),
            precision=BF16,
            sharding=sw.Sharding(stage=stage),
            activations=sw.Activations(checkpoint=checkpoint),
        )
        model = seeded(lambda: nn.Sequential(nn.Identity(), Held(way)))()
        engine = sw.parallelize(model, plan, channel=channel, optimizer=sgd, loss=square_loss)
        batches = [points(step, 4) for step in range(2)]
        return [loss for each in batches for loss in (engine.step(each).loss, engine.evaluate(each).loss)]

    by_hand = sw.simulate(2, lambda channel: run(channel, "cast by hand"))
    assert sw.simulate(2, lambda channel: run(channel, "child")) == by_hand


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_of_a_child_that_meet_other_inputs_before_a_step_are_refused_with_a_way_out(stage: int) -> None:
    def run(channel: sw.Channel) -> None:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=BF16, sharding=sw.Sharding(stage=stage))
        model = nn.Sequential(nn.Identity(), Held("child"))
        sw.parallelize(model, plan, channel=channel, optimizer=sgd, loss=square_loss).evaluate(points(0, 4))

    torch.manual_seed(0)
    with pytest.raises(ModelError, match=r"'1' \(Held\) mixes dtypes under .*bfloat16.*x.to\(weight.dtype\)"):
        sw.simulate(2, run)
    kept = sw.Precision(compute="bfloat16", keep=("held",))
    assert len(engine_of(lambda: Held("child"), kept, stage)) == 2
    with torch.autocast("cpu", torch.bfloat16):
        plan = sw.Plan(precision=BF16)
        engine = sw.parallelize(Held("child"), plan, optimizer=sgd, loss=square_loss)
        assert engine.step(points(0, 4)).loss > 0


def test_what_is_given_to_write_to_is_given_itself() -> None:
    """A dict or a list among the inputs without anything to cast."""

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
            notes: dict[str, int] = {}
            order: list[str] = []
            out: torch.Tensor = self.inner(x, notes, order)
            assert (notes, order) == ({"calls": 1}, ["called"])
            return out

    assert len(engine_of(Outer)) == 2


class Half(nn.Linear):
    """Is built in float16, and casts its input itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.half())


@pytest.mark.parametrize("stage", [1, 3])
def test_float16_is_warned_of_once_and_again_when_every_gradient_is_zero(stage: int) -> None:
    def tiny(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.float().mean() * 1e-9

    half = sw.Precision(compute="float16")
    with pytest.warns(UnderflowWarning, match="the model trains in float16: .*bfloat16") as seen:
        engine_of(lambda: nn.Linear(4, 1), half, stage)
    assert sum(each.category is UnderflowWarning for each in seen) == 1
    with pytest.warns(UnderflowWarning, match="all gradients of a step are zero: .*bfloat16") as seen:
        engine_of(lambda: nn.Linear(4, 1), half, stage, loss=tiny)
    assert sum(each.category is UnderflowWarning for each in seen) == 3  # and two steps
    with pytest.warns(UnderflowWarning):
        engine_of(lambda: Half(4, 1).half(), sw.Precision(), stage)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnderflowWarning)
        engine_of(lambda: nn.Linear(4, 1), BF16, stage, loss=tiny)
        frozen = sw.Precision(compute="float16", keep=("*",))
        engine_of(lambda: nn.Linear(4, 1), frozen, stage, loss=tiny)
