"""A run of a model aside leaves no trace, also of what its first forward does once."""

from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
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

    def __init__(self, divide: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.is_rescaled = False
        self.divide = divide

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not self.is_rescaled:
            self.divide(self.layer.weight)
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


DIVIDE: dict[str, Callable[[torch.Tensor], object]] = {
    "counted": torch.no_grad()(lambda weight: weight.div_(2)),
    "data": lambda weight: weight.data.div_(2),
    "numpy": lambda weight: weight.detach().numpy().__itruediv__(2),
}


@pytest.mark.parametrize("way", DIVIDE)
def test_weights_that_a_first_forward_writes_are_not_written_again(way: str) -> None:
    model, given = RescalesAtFirst(DIVIDE[way]), torch.ones(2, 4)
    expected = nn.functional.linear(given, model.layer.weight)
    count_work(model, lambda: model(given), kind="flops")
    assert torch.equal(model(given), expected)


class GoesBackward(nn.Module):
    """Computes a gradient of its own in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            output: torch.Tensor = self.layer(given)
            output.sum().backward()
        return output.detach()


def test_a_run_that_goes_backward_leaves_no_gradient_and_calls_no_hook() -> None:
    model, given, seen = GoesBackward(), torch.ones(2, 4), list[str]()
    weight, bias = model.layer.weight, model.layer.bias
    weight.register_hook(lambda _: seen.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    weight.grad = before = torch.ones(4, 4)
    count_work(model, lambda: model(given), kind="flops")
    assert weight.grad is before
    assert torch.equal(before, torch.ones(4, 4))
    assert bias.grad is None
    assert not seen
    model(given)
    assert sorted(seen) == ["accumulated", "gradient"]


def things() -> dict[str, Any]:
    """What a module may keep notes in."""
    return {
        "dict": {"in": [[1]]},
        "ordered": OrderedDict(a=1),
        "counter": Counter("a"),
        "of the user": UserDict(a=1),
        "deque": deque([1, 2], maxlen=2),
        "set": {1},
        "tensor": torch.zeros(3),
        "tensors": [torch.zeros(3)],
    }


def write_to_all(held: dict[str, Any]) -> None:
    held["dict"]["in"][0].append(2)
    held["ordered"].move_to_end("a")
    held["ordered"]["b"] = 2
    held["counter"].update("ab")
    held["of the user"]["b"] = 2
    held["deque"].append(3)
    held["set"].add(2)
    held["tensor"].add_(1)
    held["tensors"][0].data.add_(1)


class Notes(nn.Module):
    """Writes to all that it keeps, and so does a hook on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(4, 4), things()
        self.shared = SimpleNamespace(count=0)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        write_to_all(self.held)
        self.shared.count += 1
        output: torch.Tensor = self.layer(given)
        return output


def test_what_modules_and_hooks_keep_is_as_it_was_whatever_it_is_in() -> None:
    model, given, of_hook = Notes(), torch.ones(2, 4), things()

    def hook(*_: Any) -> None:
        write_to_all(of_hook)

    model.register_forward_hook(hook)
    count_work(model, lambda: model(given), kind="flops")
    for held in (model.held, of_hook):
        assert repr(held) == repr(things())
    assert model.shared.count == 1, "others share an object"
