"""A run of a model aside leaves no trace, also of what its first forward does once."""

from typing import Any

import torch
from torch import nn

from shardwise.engine.forward.trial_runs import count_work


class HooksAtFirst(nn.Module):
    """Puts a hook on its layer in its first forward, and notes that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.has_hooks = False
        self.seen: list[torch.Tensor] = []

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not self.has_hooks:
            self.layer.register_forward_hook(self._see)
            self.has_hooks = True
        output: torch.Tensor = self.layer(given) + self.seen.pop()
        return output

    def _see(self, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self.seen.append(output)


class RescalesAtFirst(nn.Module):
    """Divides its weights once, and multiplies by the same in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.is_rescaled = False

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not self.is_rescaled:
            with torch.no_grad():
                self.layer.weight.div_(2)
            self.is_rescaled = True
        doubled: torch.Tensor = self.layer(given) * 2
        return doubled


def test_hooks_of_a_first_forward_are_put_on_again() -> None:
    model, given = HooksAtFirst(), torch.ones(2, 4)
    for _ in range(2):
        count_work(model, lambda: model(given), kind="flops")
        assert not model.has_hooks
        assert not model.layer._forward_hooks
    assert torch.equal(model(given), 2 * nn.functional.linear(given, model.layer.weight, model.layer.bias))


def test_weights_that_a_first_forward_writes_are_not_written_again() -> None:
    model, given = RescalesAtFirst(), torch.ones(2, 4)
    expected = nn.functional.linear(given, model.layer.weight)
    count_work(model, lambda: model(given), kind="flops")
    assert torch.equal(model(given), expected)
