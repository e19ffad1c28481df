"""Hooks through which autograd gives the engine finished gradients, behind all hooks of users."""

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Set
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.engine.torch_private import GRADIENT_HOOKS, gradient_hooks


class Collector(Protocol):
    """Who takes gradients."""

    def collect(self, name: str, parameter: torch.Tensor) -> None:
        """Take a finished gradient over from autograd; outside of an update it is the user's."""


class Collectors:
    """Hooks on parameters, which give their gradients to the collector.

    A model that is put under another plan keeps the hooks. They do nothing once the collector is gone, and do not keep
    it alive.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], collector: "Collector") -> None:
        # The collector itself in a hook would be kept, and with it all gradients, for as long as the model lives.
        reference = weakref.ref(collector)
        self._parameters = parameters
        self._hooks = {name: _Giving(reference, name) for name in parameters}
        self._handles: dict[str, RemovableHandle] = {}
        self._had_hooks: set[str] = set()
        """Those whose list of hooks is torch's. Handles of its hooks know it, so it stays."""

    def stand_on_all_but(self, quiet: Set[str]) -> None:
        """Have a hook on all others, behind those that a model has put there since: in its first forward, say."""
        # Such a hook may sum the gradient over ranks. Ours drops `p.grad`, and a hook behind it would find None.
        for name in [*self._handles.keys() & quiet, *filter(self._is_behind, self._had_hooks)]:
            if (handle := self._handles.pop(name, None)) is not None:
                handle.remove()
        if len(self._handles) + len(quiet) < len(self._parameters):
            lacking = (each for each in self._parameters if each not in quiet and each not in self._handles)
            # One that is frozen by now takes no hook, and gets no gradient.
            for name in [each for each in lacking if self._parameters[each].requires_grad]:
                self._handles[name] = self._put_on(name)

    def _is_behind(self, name: str) -> bool:
        """Whether there is a hook behind ours."""
        handle = self._handles.get(name)
        return handle is not None and next(reversed(gradient_hooks(self._parameters[name]) or ())) != handle.id

    def _put_on(self, name: str) -> RemovableHandle:
        parameter = self._parameters[name]
        if not (hooks := gradient_hooks(parameter)):
            setattr(parameter, GRADIENT_HOOKS, _BeforeOurs())
        elif type(hooks) is not _BeforeOurs:
            self._had_hooks.add(name)
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._hooks[name])
        return handle


class _BeforeOurs(OrderedDict[int, Any]):
    """The hooks of a parameter: those that users put there later come before ours, which takes the gradient away."""

    def __setitem__(self, key: int, hook: Any) -> None:
        ours = [(each, self.pop(each)) for each in list(self) if isinstance(self[each], _Giving)]
        super().__setitem__(key, hook)
        for each, held in ours:
            super().__setitem__(each, held)


class _Giving:
    """The hook of one parameter."""

    def __init__(self, reference: "weakref.ref[Collector]", name: str) -> None:
        self.collector = reference
        self._name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        if (collector := self.collector()) is not None:
            collector.collect(self._name, parameter)


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether somebody else is shown the finished gradient of a parameter."""
    if not (hooks := gradient_hooks(parameter)):  # of most, in each step
        return False
    return any(type(each) is not _Giving for each in hooks.values())


_TAKEN: "weakref.WeakValueDictionary[int, Collector]" = weakref.WeakValueDictionary()
"""The id of a parameter -> who takes its gradients. A collector holds its parameters: nothing else gets their ids."""


def taken_by(collector: Collector, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters, whose gradients `collector` takes from now on: through hooks, or as it finds them."""
    _TAKEN.update({id(each): collector for each in parameters})
    return parameters


def is_of_engine(parameter: torch.Tensor) -> bool:
    """Whether an engine takes the gradients of a parameter."""
    return id(parameter) in _TAKEN
