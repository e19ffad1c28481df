"""An optimizer that has masters answers for parameters of the model."""

import torch
from torch import nn

from shardwise.comm import default_channel
from tests.costs import calls_in
from tests.engine.loops import begun, rows


def test_the_first_step_of_a_deep_model_costs_as_much_for_each_layer_as_that_of_a_small_one() -> None:
    def calls(layers: int) -> int:
        engine = begun(
            default_channel(),
            lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))),
            optimizer=torch.optim.AdamW,
        )
        return calls_in(lambda: engine.step({"input": rows(0, width=2)["x"]}))

    calls(10)  # what torch imports at its first update
    few, many, most = (calls(layers) for layers in (10, 20, 60))
    assert most - many < 5 * (many - few)  # four times the layers
