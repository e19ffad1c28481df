"""When each part of a model runs: its forward by hooks of modules, its backward by hooks of what they give.

    forward     module   [ embedding ][ layers.0 ][ layers.1 ][ head ]
    backward    gradient of an output is there:    v head   v layers.1   v layers.0   v embedding
                                                   [ head  ][ layers.1  ][ layers.0  ][ embedding ]

Hooks of tensors do not change the graph, so the numbers are those of a run without them. A backward goes on to the next
one's beginning: what autograd does in between counts for the earlier one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class UnitBars:
    """The parts of a model, whose forwards and backwards are noted while `notes` is a list."""

    def __init__(self, model: nn.Module, now_s: Callable[[], float]) -> None:
        self.notes: list[tuple[str, str, float]] | None = None
        """(unit, "begin", "end" or "backward", when); None: nothing is noted."""
        self._now_s = now_s
        self._handles: list[Any] = []
        for name, module in units_of(model):
            self._handles += [
                module.register_forward_pre_hook(self._begin(name)),
                module.register_forward_hook(self._end(name)),
            ]

    def take_off(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str) -> Callable[..., None]:
        def begin(module: nn.Module, inputs: Any) -> None:
            if self.notes is not None:
                self.notes.append((name, "begin", self._now_s()))

        return begin

    def _end(self, name: str) -> Callable[..., None]:
        def goes_back(gradient: torch.Tensor) -> None:
            if self.notes is not None:
                self.notes.append((name, "backward", self._now_s()))

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.notes is None:
                return
            self.notes.append((name, "end", self._now_s()))
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(goes_back)
                    return

        return end


def units_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model: members of its outermost lists, and what is outside of them."""
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from ((f"{prefix}{name}.{key}", member) for key, member in module.named_children())
        elif any(isinstance(each, nn.ModuleList) for each in module.children()):
            yield from units_of(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", module


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for each in output:
            yield from _tensors(each)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
