"""Wrong rules that only show in a forward, or that cut nothing: what is said of them names the module."""

import re

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, PlanError
from tests.engine.pipeline.oracle import adamw


class Two(nn.Module):
    """Two linear maps, the second of what the first gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 9)
        self.down = nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return out


def train(rules: dict[str, str], *, tp: int = 2, evaluates: bool = False) -> None:
    def on_rank(channel: sw.Channel) -> None:
        engine = sw.parallelize(
            Two(),
            sw.Plan(mesh=sw.Mesh(tp=tp), tensor=sw.Tensor(rules=rules)),
            optimizer=adamw,
            loss=lambda output, _: output.square().mean(),
            channel=channel,
        )
        batch = {"x": torch.ones(2, 4)}
        engine.evaluate(batch) if evaluates else engine.step(batch)

    sw.simulate(tp, on_rank)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"up": "column"}, r"in 'down' \(Linear, without a rule .* was given \(2, [45]\) and holds weight \(4, 9\)"),
        (
            {"down": "row"},
            r"in 'down' \(Linear, with the style 'row' .* was given \(2, 9\) and holds weight \(4, [45]\)",
        ),
    ],
)
def test_an_error_of_a_cut_module_names_it_and_its_rules(rules: dict[str, str], said: str, evaluates: bool) -> None:
    with pytest.raises(ModelError, match="fails when it is cut, and runs with whole parameters: mat1") as caught:
        train(rules, evaluates=evaluates)
    assert re.search(said, str(caught.value)), caught.value
    assert "'row'" not in rules or "The rules in it: 'down': row." in str(caught.value)


@pytest.mark.parametrize("rule", ["row(scatter=9)", "row(scatter=1)"])
def test_positions_along_a_dim_that_is_none_of_them_are_refused(rule: str) -> None:
    with pytest.raises(ModelError, match=r"'down': its rule \(row\) .* the tensor has the shape \(2, 4\); name a dim"):
        train({"up": "column", "down": rule})


def test_rules_mean_something_on_one_rank_too() -> None:
    with pytest.raises(PlanError, match=r"'upp' means none of .* the nearest name is 'up'"):
        train({"upp": "column", "down": "row"}, tp=1)
    train({"*": "auto", "up": "column", "down": "row"}, tp=1)
