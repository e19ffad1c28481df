"""What is known of torch's optimizers without a trial is what a trial finds."""

from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.engine.optimizers import trials
from shardwise.engine.optimizers.traits import in_table, together
from shardwise.engine.optimizers.trials import traits_of
from tests.engine.loops import assert_alike, in_one_process, on_ranks, plan_of, rows
from tests.engine.optimizers.test_known import ALL, OPTIMIZERS

CPU = torch.device("cpu")


class Kept(torch.optim.NAdam):
    """A subclass with the step of torch."""


class Replaced(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


NAMES = [*ALL, "foreach", "fused", "foreach sgd", "fused sgd", "amsgrad", "centered"]


@pytest.mark.parametrize(
    ("name", "has_state"),
    # The state of Adafactor fits the shape of its parameter only, and no trial of it goes on from there.
    [(name, has_state) for name in NAMES for has_state in (False, True) if (name, has_state) != ("Adafactor", True)],
)
def test_the_table_says_what_doubles_find(name: str, has_state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = OPTIMIZERS[name]([nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(3, 2))])
    if has_state:
        for each in optimizer.param_groups[0]["params"]:
            each.grad = torch.ones_like(each)
        optimizer.step()
        optimizer.zero_grad()
    known = traits_of(optimizer, CPU).of_all
    monkeypatch.setattr(trials, "in_table", lambda _: None)
    found = traits_of(optimizer, CPU)
    assert together([known]) == found.of_all
    assert [[*each.values()] for each in found.of_groups] == [[known]]


def centred(optimizer: torch.optim.Optimizer) -> None:
    """What no slice of a parameter can do alone."""
    for each in optimizer.param_groups[0]["params"]:
        each.grad = each.grad - each.grad.mean()


class OwnGroups(torch.optim.SGD):
    def _init_group(self, *args: Any) -> Any:
        centred(self)
        return super()._init_group(*args)  # type: ignore[no-untyped-call]


class OwnCheck(torch.optim.Adam):
    def _accelerator_graph_capture_health_check(self) -> None:
        centred(self)


class CheckBehind(torch.optim.Optimizer):
    _accelerator_graph_capture_health_check = OwnCheck._accelerator_graph_capture_health_check


class Behind(torch.optim.RMSprop, CheckBehind):
    """The method of torch's is replaced by a class that comes after it."""


class Wrapped(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        centred(self)
        return super().step(closure)

    update_wrapper(step, torch.optim.SGD.step)


def replaced(name: str, parameters: Any) -> torch.optim.Optimizer:
    """A method of the object: bound to it."""

    def method(self: Any, *args: Any) -> Any:
        centred(self)
        return getattr(type(self), name)(self, *args)

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    setattr(optimizer, name, MethodType(method, optimizer))
    return optimizer


def unset(parameters: Any) -> torch.optim.Optimizer:
    """It has a number for each parameter before the first step, without a value."""
    optimizer = OwnGroups(parameters, lr=0.1)
    for each in optimizer.param_groups[0]["params"]:
        optimizer.state[each]["best"] = torch.tensor(torch.nan)
    return optimizer


CHANGED: dict[str, Any] = {
    "state that is not a number": unset,
    "a method that the step calls": partial(OwnGroups, lr=0.1),
    "another one": partial(OwnCheck, lr=0.1),
    "a class behind torch's": partial(Behind, lr=0.01),
    "a step under torch's name": partial(Wrapped, lr=0.1),
    "a method of the object": partial(replaced, "_init_group"),
    "a step of the object": partial(replaced, "step"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_others_change_in_an_optimizer_of_torch_is_tried(case: str) -> None:
    batches, make = [rows(seed) for seed in range(3)], partial(nn.Linear, 4, 3)
    sliced = plan_of("dp_shard=2", 3)
    assert_alike(
        on_ranks(make, sliced, batches, optimizer=CHANGED[case]), in_one_process(make, batches, optimizer=CHANGED[case])
    )


def test_only_a_step_of_torch_is_known() -> None:
    parameters = [nn.Parameter(torch.ones(4, 5))]
    assert in_table(Kept(parameters)) == in_table(torch.optim.NAdam(parameters)) is not None
    assert in_table(Replaced(parameters)) is None
