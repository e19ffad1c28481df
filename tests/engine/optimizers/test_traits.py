"""What is known of torch's optimizers without a trial is what a trial finds."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.engine.optimizers import trials
from shardwise.engine.optimizers.traits import in_table, together
from shardwise.engine.optimizers.trials import traits_of
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


def test_only_a_step_of_torch_is_known() -> None:
    parameters = [nn.Parameter(torch.ones(4, 5))]
    assert in_table(Kept(parameters)) == in_table(torch.optim.NAdam(parameters)) is not None
    assert in_table(Replaced(parameters)) is None
